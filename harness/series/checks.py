"""What a leg must satisfy before any of its numbers counts.  Each check returns reasons, empty when it holds."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.series.arms import foreign_paths
from legs.protocol import (
    MARK_NAMES,
    OUTPUTS,
    RESULT,
    TRACES,
    LegRequest,
    ProtocolError,
    Trace,
    check_result,
    read_marks,
    read_outputs,
    read_traces,
    sha256,
)

CLOCK_OFFSET_MAX = 0.01

_WATCHED = re.compile(r"(?:gpu \d+ \(.*?\): )?(foreign cpu|steal|foreign \w+ process|clock event|unreadable: \w+)(?:: |$)")
_CHECKS = {
    "foreign cpu": "foreign_cpu", "steal": "steal", "foreign compute process": "processes", "foreign graphics process": "processes",
    "clock event": "clock_event", "unreadable: utilisation": "unreadable.utilisation",
    "unreadable: clock_event_reasons": "unreadable.clock_event_reasons", "unreadable: foreign_compute": "unreadable.compute_pids",
    "unreadable: foreign_graphics": "unreadable.graphics_pids",
}
"""The words with which the watcher begins a reason to void a leg, by the check of the idle gate that looks for the same."""


def read_result(folder: Path, request: LegRequest) -> dict[str, Any]:
    """The leg's result.  Raises :class:`ProtocolError` when it is missing, malformed, or answers another request."""
    path = folder / RESULT
    if not path.is_file():
        raise ProtocolError(f"{RESULT} is missing: the leg did not happen")
    try:
        result: dict[str, Any] = json.loads(path.read_bytes())
    except ValueError as error:
        raise ProtocolError(f"{RESULT} is not JSON: {error}") from None
    check_result(result, request)
    for name in (TRACES, OUTPUTS):
        if sha256((folder / name).read_bytes()) != result["files"].get(name):
            raise ProtocolError(f"{name}: its hash is not the one in {RESULT}")
    return result


def broken_contract(
    folder: Path, request: LegRequest, result: Mapping[str, Any], declared: Mapping[str, Any], prompt_tokens: int
) -> list[str]:
    """Reasons to call the leg failed: it did other work than asked, ran other code, or resolved other options than declared."""
    traces, outputs = read_traces(folder), read_outputs(folder)
    reasons = [
        f"option {name}: declared {value!r}, resolved {result['resolved'].get(name)!r}"
        for name, value in declared.items()
        if result["resolved"].get(name) != value
    ]
    if outside := foreign_paths(result["sys_path"]):
        reasons.append(f"the arm could import from outside its stage: {len(outside)} search path entries, one is {Path(outside[0]).name}")
    reasons += wrong_counts(request, result["counts"], traces, outputs, prompt_tokens)
    reasons += wrong_times(folder, traces)
    return reasons


def wrong_counts(
    request: LegRequest, counts: Mapping[str, int], traces: Sequence[Trace], outputs: Sequence[Sequence[int]], prompt_tokens: int
) -> list[str]:
    """The exact amount of work, from three sides: the engine's own counts, the client's traces and the ids themselves."""
    n, length = request.requests, request.max_tokens
    wanted = {"requests": n, "prompt_tokens": prompt_tokens, "output_tokens": n * length}
    from_client = {
        "requests": len(traces),
        "prompt_tokens": sum(trace.prompt_tokens for trace in traces),
        "output_tokens": sum(ids for trace in traces for _, ids in trace.stamps),
    }
    reasons = []
    for name, value in wanted.items():
        for side, found in (("result.json", counts.get(name)), ("the client", from_client[name])):
            if found != value:
                reasons.append(f"{name}: {side} counted {found}, the plan says {value}")
    reasons += [f"request {i}: {len(ids)} output ids, {length} were asked for" for i, ids in enumerate(outputs) if len(ids) != length]
    reasons += [f"request {trace.index}: finished by {trace.finish!r}, not by length" for trace in traces if trace.finish != "length"]
    if len(outputs) != n:
        reasons.append(f"outputs of {len(outputs)} requests, {n} were asked for")
    return reasons


def wrong_times(folder: Path, traces: Sequence[Trace]) -> list[str]:
    """Marks are there and in order; a request's stamps strictly increase and lie between its submission and its end."""
    marks = {line["mark"]: line["t_ns"] for line in read_marks(folder)}
    if missing := [name for name in MARK_NAMES if name not in marks]:
        return [f"marks missing: {', '.join(missing)}"]
    late = [f"{after} before {before}" for before, after in itertools.pairwise(MARK_NAMES) if marks[after] < marks[before]]
    reasons = [f"marks are out of order: {', '.join(late)}"] if late else []
    for trace in traces:
        stamps = [t for t, _ in trace.stamps]
        inside = trace.scheduled_ns <= trace.submitted_ns < stamps[0] and stamps[-1] <= trace.end_ns if stamps else False
        if not inside or any(a >= b for a, b in itertools.pairwise(stamps)):
            reasons.append(f"request {trace.index}: its times are not strictly increasing from submission to end")
    return reasons


def clock_offsets(telemetry: Mapping[str, Mapping[str, Any] | None]) -> list[str]:
    """Reasons to void a block: a card whose median SM clock lies more than 1 % apart between two arms, from their legs' telemetry by arm.

    A byte-identical kernel follows the clock, so arms at two clocks are not one machine.  A card that an arm did not work on has none,
    nor has one under a software power cap: there the clock follows what the arm itself asks of it.
    """
    medians: dict[tuple[int, str], dict[str, float]] = {}
    for arm, summary in telemetry.items():
        for card in (summary or {}).get("gpus") or ():
            if card["sm_clock_mhz"] is not None:
                medians.setdefault((card["index"], card["name"]), {})[arm] = card["sm_clock_mhz"]["median"]
    reasons = []
    for (index, name), clocks in sorted(medians.items()):
        low, high = min(clocks, key=lambda arm: clocks[arm]), max(clocks, key=lambda arm: clocks[arm])
        if clocks[high] / clocks[low] - 1 > CLOCK_OFFSET_MAX:
            reasons.append(f"gpu {index} ({name}): SM clock {clocks[high]:g} MHz in {high}, {clocks[low]:g} in {low} "
                           f"(medians at most {CLOCK_OFFSET_MAX:.0%} apart); lock the clocks, or let the card cool")
    return reasons


def waive(reasons: Sequence[str], waived: Sequence[str]) -> tuple[list[str], list[str]]:
    """(reasons that stay, notes of those that the plan waives) of what the watcher saw in a performance leg.  `waived` names checks of
    the idle gate: what a machine is known to have before a leg it also has within one."""
    kept, notes = [], []
    for reason in reasons:
        found = _WATCHED.match(reason)
        if found and _CHECKS.get(found[1]) in waived:
            notes.append(f"waived: {reason}")
        else:
            kept.append(reason)
    return kept, notes


def contaminated(result: Mapping[str, Any]) -> list[str]:
    """Reasons to void the leg: the right work under the wrong conditions.  A counter that cannot be read voids as well."""
    reasons = []
    for name, why in (("prefix_cache_hits", "prompts were replayed from a cache"), ("preemptions", "work was done twice")):
        value = result["counters"].get(name)
        if value is None:
            reasons.append(f"{name} is unreadable: the leg cannot be shown clean")
        elif value:
            reasons.append(f"{name} is {value}: {why}")
    return reasons
