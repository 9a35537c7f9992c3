"""The part of a leg that is the same for every driver: read the request, build the arm, warm up, run the clock, leave the result."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import legs
from legs.client import Delta, closed_loop
from legs.drivers.scoring import run_jobs
from legs.protocol import (
    MARKS,
    MODEL_VARIABLE,
    OUTPUTS,
    PROTOCOL,
    RESULT,
    SCORE_PHASE,
    SITE_VARIABLE,
    TRACES,
    Corpus,
    LegRequest,
    Marks,
    ProtocolError,
    Trace,
    check_result,
    read_corpus,
    read_request,
    to_json,
    write_atomic,
    write_outputs,
    write_traces,
)

STAGE = Path(legs.__file__).resolve().parent.parent
"""Root of the staged code this process runs from."""

PROGRESS_PERIOD_NS = 1_000_000_000


class Arm(Protocol):
    """One engine, as a driver wraps it."""

    def submit(self, index: int, prompt: Sequence[int]) -> None: ...

    def step(self) -> Sequence[Delta]: ...

    def who(self) -> dict[str, Any]: ...

    def device(self) -> dict[str, Any]: ...

    def resolved(self) -> dict[str, Any]: ...

    def counters(self) -> dict[str, Any]:
        """Counts since the engine started; null where it does not tell.  Two readings bracket the measured window."""
        ...

    def pids(self) -> list[int]: ...

    def close(self) -> None: ...


Builder = Callable[[LegRequest, Path, Marks], Arm]
"""Builds the arm from the request and the checkpoint folder, and sets the marks load_start and loaded."""


def main(build: Builder) -> None:
    """Carry out the leg whose folder is the working directory.  A driver calls this under its `__main__` guard."""
    folder = Path.cwd()
    marks = Marks(folder / MARKS)
    marks("imported")
    request = read_request(folder)
    if request.client != "step":
        raise ProtocolError(f"client {request.client!r} is not built yet; this driver has `step`")
    corpus = read_corpus(STAGE / request.corpus, request.corpus_sha256)
    if len(corpus.prompts) < request.requests or len(corpus.warmup) < request.warmup_requests:
        raise ProtocolError(f"{request.corpus}: holds {len(corpus.prompts)} prompts and {len(corpus.warmup)} warm-up prompts, "
                            f"{request.requests} and {request.warmup_requests} were asked for")
    arm = build(request, Path(os.environ[MODEL_VARIABLE]), marks)
    marks("ready")
    try:
        if request.warmup_requests:
            warmed, _ = closed_loop(arm, corpus.warmup[: request.warmup_requests], request.concurrency)
            marks("warmup_token", min(trace.stamps[0][0] for trace in warmed))
        marks("warm")
        before = arm.counters()
        if request.phase == SCORE_PHASE:
            files, counts = run_jobs(arm, folder, request, corpus)
        else:
            files, counts = _measure(arm, folder, request, corpus, marks)
        counters = _difference(before, arm.counters())
        result = {
            "protocol": PROTOCOL, "leg": request.leg, "arm": request.arm, "client": request.client,
            "who": arm.who(), "device": arm.device(), "resolved": arm.resolved(), "counters": counters, "pids": arm.pids(),
            "counts": counts, "files": files, "sys_path": [_relative(entry) for entry in sys.path],
        }
        check_result(result, request)
    finally:
        arm.close()
    write_atomic(folder / RESULT, to_json(result))


def _measure(arm: Arm, folder: Path, request: LegRequest, corpus: Corpus, marks: Marks) -> tuple[dict[str, str], dict[str, int]]:
    """Run the clock, write the two streams; returns their `files` and `counts` for the result."""
    traces, outputs = closed_loop(arm, corpus.prompts[: request.requests], request.concurrency, _progress(marks))
    _mark_window(marks, traces)
    counts = {
        "requests": len(traces), "prompt_tokens": sum(trace.prompt_tokens for trace in traces), "output_tokens": sum(map(len, outputs)),
    }
    return {TRACES: write_traces(folder, traces), OUTPUTS: write_outputs(folder, outputs)}, counts


def _progress(marks: Marks) -> Callable[[int, int], None]:
    """At most one line a second, the same for every arm, so that a watcher can show tokens/s."""
    due = time.monotonic_ns() + PROGRESS_PERIOD_NS

    def note(t_ns: int, tokens: int) -> None:
        nonlocal due
        if t_ns >= due:
            marks("progress", t_ns, tokens=tokens)
            due = t_ns + PROGRESS_PERIOD_NS

    return note


def _mark_window(marks: Marks, traces: list[Trace]) -> None:
    marks("first_submit", min(trace.submitted_ns for trace in traces))
    marks("first_token", min(trace.stamps[0][0] for trace in traces))
    marks("last_token", max(trace.stamps[-1][0] for trace in traces))
    marks("drained")


def _difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Counters over the measured window; what either reading could not tell stays null."""
    out: dict[str, Any] = {}
    for name, value in after.items():
        earlier = before.get(name)
        if isinstance(value, dict):
            out[name] = _difference(earlier if isinstance(earlier, dict) else dict.fromkeys(value, 0), value)
        else:
            out[name] = None if value is None or earlier is None else value - earlier
    return out


def _relative(entry: str) -> str:
    """A sys.path entry without the machine in it: relative to the stage or the interpreter, else in full."""
    path = Path(entry).resolve() if entry else Path.cwd()
    sites = [("site", Path(folder)) for folder in os.environ.get(SITE_VARIABLE, "").split(os.pathsep) if folder]
    for name, root in (("stage", STAGE), *sites, ("prefix", Path(sys.prefix)), ("base", Path(sys.base_prefix))):
        if path.is_relative_to(root.resolve()):
            return f"{name}:{path.relative_to(root.resolve())}"
    return str(path)
