"""One leg carried out: gate, launch under a guard, watch, check, record."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.evidence import layout
from harness.leg.launch import LegProcess, start_leg
from harness.leg.memory_summary import read_rows, summarise_memory
from harness.leg.telemetry import Watcher
from harness.leg.telemetry_summary import summarise_telemetry
from harness.machine.idle import check_idle
from harness.machine.idle_rule import IdleLimits
from harness.machine.lock import SeriesLock
from harness.machine.page_cache import evict
from harness.oracle import Oracle, role_of
from harness.series import checks
from harness.series.arms import Launch, launch
from harness.series.compile_cache import cache_state, compiled_anew
from harness.series.plan import corpus_path
from harness.series.progress import Progress
from harness.series.stage import code_sha256
from legs.protocol import MARKS, PROTOCOL, LegRequest, ProtocolError, read_marks, to_gzip, to_json, write_atomic, write_request

SCHEMA = 1
POLL_S = 0.5
"""How often the runner looks at a running leg.  Looking costs the measured machine CPU time, so it is rare and cheap."""

COLD = ("memory", "performance")
"""Phases whose legs load the model from storage, so that no arm profits from the pages another has left."""


@dataclass(kw_only=True)
class Context:
    """What every leg of a running series shares."""

    root: Path
    series: Path
    plan: dict[str, Any]
    model: Path
    model_files: list[dict[str, Any]]
    """The checkpoint's listing: `path` below `model`, `bytes`."""
    oracles: dict[str, Oracle]
    stages: dict[str, tuple[Path, str]]
    """(staged folder, code SHA-256) by driver."""
    lock: SeriesLock
    progress: Progress
    own_roots: set[int]
    prompt_lengths: list[int]
    """Tokens of each prompt of the corpus, in its order."""
    previous_end_ns: int | None = None
    arms: dict[str, dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.arms = {arm["name"]: arm for arm in (*self.plan["arms"], self.plan["ceiling"])}


@dataclass(frozen=True, kw_only=True)
class LegPlace:
    """Which leg this is."""

    name: str
    phase: str
    repetition: int
    attempt: int
    order: int
    arm: str


def run_leg(context: Context, place: LegPlace, folder: Path) -> dict[str, Any]:
    """Run one leg into `folder` (created here, exclusively) and return its leg.json.

    Never raises for what an arm does: a broken arm gives status `failed`, `hung` or `void` with reasons.  KeyboardInterrupt ends the arm,
    leaves leg.json with status `interrupted`, and goes on up.
    """
    folder.mkdir(parents=True)
    arm = context.arms[place.arm]
    context.progress.leg(place.name, f"{place.phase}-{place.arm}")
    record: dict[str, Any] = {
        "schema": SCHEMA, "leg": place.name, "arm": place.arm, "phase": place.phase, "repetition": place.repetition,
        "attempt": place.attempt, "order": place.order, "environment": arm["environment"], "code_sha256": context.stages[arm["driver"]][1],
        "started_utc": datetime.now(UTC).isoformat(timespec="seconds"), "started_ns": time.monotonic_ns(), "ended_ns": None,
        "since_previous_s": None, "argv": [], "compile_caches": None, "role": None, "status": "interrupted", "reasons": [], "notes": [],
    }
    try:
        context.lock.verify()
        idle = check_idle(IdleLimits(**context.plan["idle"]), context.own_roots, context.previous_end_ns, context.lock.path)
        write_atomic(folder / layout.IDLE, to_json(idle))
        if not idle["ok"]:
            record |= {"status": "void", "reasons": [f"the machine is not idle: {reason}" for reason in idle["reasons"]]}
        else:
            _run(context, place, folder, record)
            context.lock.verify()
    finally:
        record["ended_ns"] = context.previous_end_ns = time.monotonic_ns()
        write_atomic(folder / layout.LEG, to_json(record))
        context.progress.done(record["status"], "".join(f"\n    {reason}" for reason in record["reasons"][:5]))
    return record


def _run(context: Context, place: LegPlace, folder: Path, record: dict[str, Any]) -> None:
    arm = context.arms[place.arm]
    stage, code = context.stages[arm["driver"]]
    oracle = context.oracles[arm["oracle"]] if arm["oracle"] else None
    command = launch(arm, stage, context.model, oracle, context.root)
    request = _request(context, place, arm)
    write_request(folder, request)
    if place.phase in COLD:
        warm, record["notes"] = _evict_model(context, folder)
        if warm:
            record |= {"status": "void", "reasons": warm}
            return
    logs = context.series / "logs" / folder.relative_to(context.series)
    logs.mkdir(parents=True, exist_ok=True)
    started = time.monotonic_ns()
    record |= {
        "argv": command.shown, "oracle_environment": command.oracle_environment, "started_ns": started,
        "since_previous_s": None if context.previous_end_ns is None else (started - context.previous_end_ns) / 1e9,
    }
    compiled = cache_state(command.environment)
    watched = _supervise(context, place, folder, command, logs)
    record["compile_caches"] = {"before": compiled, "after": cache_state(command.environment)}
    if place.phase in COLD:
        record["notes"] += _storage_notes(context, folder)
        record["notes"] += compiled_anew(**record["compile_caches"], window_ns=_measured_window(folder))
    if code_sha256(stage, arm["driver"]) != code:
        record |= {"status": "failed", "reasons": ["the staged code changed while the leg ran"]}
        return
    record["status"], record["reasons"], record["role"] = _judge(context, place, folder, request, oracle, logs)
    if watched is not None:
        _keep_telemetry(context, folder, watched, record)


def _evict_model(context: Context, folder: Path) -> tuple[list[str], list[str]]:
    """Evict the checkpoint from the page cache, leave page_cache.json, and return (reasons to void the leg, notes)."""
    names = [entry["path"] for entry in context.model_files]
    try:
        found = evict(context.model / name for name in names)
    except OSError as error:
        found = {"proven": False, "pages_before": None, "pages_after": None, "reasons": [f"a file cannot be read: {error.strerror}"]}
    write_atomic(folder / layout.PAGE_CACHE, to_json({"schema": SCHEMA, **found, "files": names}))
    said = [f"page cache: {reason}" for reason in found["reasons"]]
    return (said, []) if found["proven"] is False else ([], said)


def _storage_notes(context: Context, folder: Path) -> list[str]:
    """What bytes read from storage say about a cold start.  A note, no gate: not every file system counts them (proc(5))."""
    read = _guard(folder).get("read_bytes")
    weights = sum(entry["bytes"] for entry in context.model_files if entry["path"].endswith(".safetensors"))
    if read is None:
        return ["storage: the bytes that the arm read from it cannot be had here; mincore alone shows the cold start"]
    if read < weights:
        return [f"storage: the arm read {read} bytes, its weights are {weights}: this file system does not count, or not all were loaded"]
    return []


def _measured_window(folder: Path) -> tuple[int, int] | None:
    """first_submit and last_token of a leg as times since the epoch; None when it has not both."""
    marks = {line["mark"]: line["t_ns"] for line in (read_marks(folder) if (folder / MARKS).exists() else [])}
    if not {"first_submit", "last_token"} <= marks.keys():
        return None
    epoch = time.time_ns() - time.monotonic_ns()
    return marks["first_submit"] + epoch, marks["last_token"] + epoch


def _guard(folder: Path) -> dict[str, Any]:
    """The guard's record, empty when it left none."""
    path = folder / layout.GUARD
    return dict(json.loads(path.read_bytes())) if path.exists() else {}


def _request(context: Context, place: LegPlace, arm: Mapping[str, Any]) -> LegRequest:
    work = context.plan["workload"]
    gate = place.phase == "correctness"
    requests = context.plan["correctness"]["cases"] if gate else work["requests"]
    return LegRequest(
        protocol=PROTOCOL, leg=place.name, phase=place.phase, arm=place.arm, driver=arm["driver"],
        corpus=corpus_path(work["corpus"]), corpus_sha256=work["corpus_sha256"], requests=requests,
        warmup_requests=0 if gate else work["warmup_requests"], max_tokens=work["max_tokens"], min_tokens=work["min_tokens"],
        ignore_eos=work["ignore_eos"], concurrency=min(work["concurrency"], requests), client=arm["client"], options=arm["options"],
    )


def _supervise(context: Context, place: LegPlace, folder: Path, command: Launch, logs: Path) -> list[dict[str, Any]] | None:
    """Start the arm under its guard and stay until it is gone: in a memory leg with the sampler beside it, in a performance leg watching
    the machine.  Returns the watcher's rows, None where there is none."""
    watcher = Watcher(context.own_roots) if place.phase == "performance" else None
    process = start_leg(
        command.argv, command.environment, folder, context.lock.fd, context.plan["leg_timeout_s"],
        record=folder / layout.GUARD, stdout=logs / "stdout.log", stderr=logs / "stderr.log",
    )
    sampler = _start_sampler(process, folder, logs) if place.phase == "memory" else None
    try:
        while process.poll() is None:
            context.progress.update(_doing(folder))
            if watcher is not None:
                watcher.look()
            process.wait(POLL_S)
    except BaseException:
        process.terminate()
        raise
    finally:
        if sampler is not None:
            assert sampler.stdin is not None
            sampler.stdin.close()
            sampler.wait(30)
    return None if watcher is None else watcher.finish()


def _keep_telemetry(context: Context, folder: Path, rows: list[dict[str, Any]], record: dict[str, Any]) -> None:
    """Write the watcher's stream, and its summary, notes and reasons into leg.json.  A leg that failed stays failed."""
    write_atomic(folder / layout.TELEMETRY, to_gzip("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()))
    marks = read_marks(folder) if (folder / MARKS).exists() else []
    record["telemetry"], void, notes = summarise_telemetry(rows, marks, context.plan["idle"])
    void, waived = checks.waive(void, context.plan["idle"]["waived"])
    record["notes"] += notes + waived
    if void and record["status"] in ("ok", "void"):
        record |= {"status": "void", "reasons": (record["reasons"] if record["status"] == "void" else []) + void}


def _start_sampler(process: LegProcess, folder: Path, logs: Path) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "harness.leg.memory", "--root-pid", str(process.pid), "--out", str(folder / layout.MEMORY),
            "--marks", str(folder / "marks.jsonl")]
    with (logs / "sampler.log").open("xb") as log:
        return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=log, stderr=log)


def _doing(folder: Path) -> str:
    """The phase a running leg is in and its rate so far, from its marks."""
    marks = read_marks(folder) if (folder / "marks.jsonl").exists() else []
    if not marks:
        return "starting"
    last = marks[-1]
    if last["mark"] == "progress":
        warm = next(line["t_ns"] for line in marks if line["mark"] == "warm")
        return f"running, {last['tokens'] / max((last['t_ns'] - warm) / 1e9, 1e-9):.0f} output tokens/s"
    return {"imported": "starting", "load_start": "loading", "loaded": "getting ready", "ready": "warming up", "warm": "running"}.get(
        last["mark"], "ending")


def _judge(
    context: Context, place: LegPlace, folder: Path, request: LegRequest, oracle: Oracle | None, logs: Path
) -> tuple[str, list[str], str | None]:
    """(status, reasons, role) of a leg whose processes are gone."""
    guard = _guard(folder)
    if not guard:
        return "failed", ["the guard left no record"], None
    if guard["reason"] == "timeout":
        return "hung", [f"no result within leg_timeout_s = {context.plan['leg_timeout_s']:g}"], None
    if guard["returncode"] != 0:
        return "failed", [f"the arm exited with {guard['returncode']} ({guard['reason']}): {_last_words(logs / 'stderr.log')}"], None
    try:
        result = checks.read_result(folder, request)
        arm = context.arms[place.arm]
        prompt_tokens = sum(context.prompt_lengths[: request.requests])
        reasons = checks.broken_contract(folder, request, result, arm["options"], prompt_tokens)
    except (ProtocolError, OSError, KeyError, ValueError) as error:
        return "failed", [str(error)], None
    role, why = _role(arm, oracle, result)
    if reasons:
        return "failed", reasons, role
    void = checks.contaminated(result)
    if place.phase == "memory":
        void += _memory_reasons(folder)
    if void:
        return "void", void, role
    return "ok", [f"role {role}: {reason}" for reason in why], role


def _role(arm: Mapping[str, Any], oracle: Oracle | None, result: Mapping[str, Any]) -> tuple[str | None, list[str]]:
    """The role of a leg that ran, and why it is no pin.  The null engine has none: nothing is compared with it."""
    if oracle is not None:
        return role_of(oracle, result)
    return (None if arm["driver"] == layout.NULL_ARM else "ours"), []


def _memory_reasons(folder: Path) -> list[str]:
    if not (folder / layout.MEMORY).exists():
        return ["the memory sampler left no stream"]
    summary = summarise_memory(read_rows(folder / layout.MEMORY), read_marks(folder))
    reasons = [f"{name} is unreadable" for name in ("peak_pss", "stable_pss") if summary[name] is None]
    return reasons + [
        f"a peak was missed: {missed['name']} (pid {missed['pid']}) once held {missed['hwm']} bytes by VmHWM, and {missed['sampled_rss']} "
        "is the most that was sampled of it" for missed in summary["peak_missed"]]


def _last_words(log: Path) -> str:
    """The last line an arm wrote to stderr, cut to 300 characters; the whole log stays beside the series."""
    if not log.exists():
        return "it wrote nothing"
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f"{lines[-1].strip()[:300]} (logs/{log.parent.name})" if lines else "it wrote nothing"


