"""Read a series directory into checked, frozen values.  What does not hold is an :class:`EvidenceError` naming file and field."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from harness.evidence import layout
from harness.evidence.layout import NULL_ARM
from harness.evidence.store import read_manifest
from legs.protocol import (
    MARK_NAMES,
    MARKS,
    OUTPUTS,
    REQUEST,
    RESULT,
    TRACES,
    LegRequest,
    ProtocolError,
    Trace,
    check_result,
    read_marks,
    read_outputs,
    read_request,
    read_traces,
    sha256,
)

SCHEMA = 1
STATUSES = ("ok", "void", "failed", "hung", "interrupted")
ROLES = ("ours", "pin", "older-release", "eager", "reduced-build")
MEASURED = ("memory", "performance")

T = TypeVar("T")
Fields = Mapping[str, type | tuple[type, ...]]
NUMBER = (int, float)
OPTIONAL = (str, type(None))

PLAN_FIELDS: Fields = {
    "schema": int, "name": str, "spec_sha256": str, "digest": str, "phases": dict, "arms": list, "blocks": list, "legs": list,
    "warmup": list, "workload": dict, "pairs": list, "verdict": dict, "leg_timeout_s": NUMBER, "correctness": (dict, type(None)),
}
ARM_FIELDS: Fields = {
    "name": str, "driver": str, "role_expected": str, "oracle": OPTIONAL, "options": dict, "environment": dict, "client": str,
    "depth": (int, type(None)),
}
WORKLOAD_FIELDS: Fields = {
    "corpus": str, "corpus_sha256": str, "requests": int, "prompt_tokens": int, "max_tokens": int, "output_tokens": int, "concurrency": int,
    "warmup_requests": int, "ignore_eos": bool, "min_tokens": int,
}
LEG_FIELDS: Fields = {
    "schema": int, "leg": str, "arm": str, "phase": str, "repetition": (int, type(None)), "attempt": int, "order": int, "status": str,
    "reasons": list, "role": OPTIONAL, "code_sha256": str, "environment": dict, "started_utc": str, "started_ns": int, "ended_ns": int,
    "since_previous_s": (int, float, type(None)),
}
BLOCK_FIELDS: Fields = {
    "schema": int, "phase": str, "repetition": (int, type(None)), "attempt": int, "order": list, "status": str, "reasons": list,
}
GATE_FIELDS: Fields = {
    "schema": int, "ok": bool, "cases": int, "passed": int, "skipped": int, "failures": list, "reference_sha256": OPTIONAL,
    "on_off_identical": (bool, type(None)),
}
TEXT_LISTS = ("reasons", "order", "notes")
SERIES_FIELDS: Fields = {"schema": int, "machine": dict, "repository": dict}
REPOSITORY_FIELDS: Fields = {"commit": OPTIONAL, "dirty": (bool, type(None))}


class EvidenceError(Exception):
    """The evidence cannot be read as a series; the message names file and field."""


@dataclass(frozen=True, kw_only=True)
class Leg:
    """One leg.  The streams are read for `ok` legs of measured blocks only; elsewhere they are empty and in no number."""

    arm: str
    phase: str
    repetition: int
    attempt: int
    record: dict[str, Any]
    request: LegRequest | None
    result: dict[str, Any] | None
    traces: tuple[Trace, ...] = ()
    outputs: tuple[tuple[int, ...], ...] = ()
    marks: tuple[dict[str, Any], ...] = ()
    memory: tuple[dict[str, Any], ...] = ()
    idle: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        return layout.leg_name(self.phase, self.repetition, self.arm)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One run of a block: all arms once, in `record["order"]`; an attempt that ended early holds fewer legs."""

    phase: str
    repetition: int
    number: int
    record: dict[str, Any]
    legs: dict[str, Leg]


@dataclass(frozen=True, kw_only=True)
class Series:
    """A series as evidence: the plan, who and where, the gate (None when there is none), every attempt, and the manifest's head.

    `ceiling` is the client's leg against the null engine, its first attempt that is ok; None when there is none.
    """

    plan: dict[str, Any]
    record: dict[str, Any]
    gate: dict[str, Any] | None
    attempts: tuple[Attempt, ...]
    head: str
    ceiling: Leg | None = None

    @property
    def arms(self) -> list[str]:
        return [arm["name"] for arm in self.plan["arms"]]

    def accepted(self, phase: str) -> list[Attempt]:
        """The block of each repetition that has one, in order: its first `ok` attempt."""
        first: dict[int, Attempt] = {}
        for attempt in self.attempts:
            if attempt.phase == phase and attempt.record["status"] == "ok":
                first.setdefault(attempt.repetition, attempt)
        return [first[repetition] for repetition in sorted(first)]

    def legs(self, arm: str) -> list[Leg]:
        """The arm's legs that count, memory before performance, by repetition."""
        return [block.legs[arm] for phase in MEASURED for block in self.accepted(phase)]


def load_series(path: Path) -> Series:
    """Read and check a series.  Does not prove its bytes: `store.check_seal` does.  Raises :class:`EvidenceError`, BrokenSeal."""
    if not path.is_dir():
        raise EvidenceError(f"{path}: there is no such series")
    plan = _load_plan(path)
    record = _json(path, path / layout.SERIES, SERIES_FIELDS)
    _check(record["repository"], REPOSITORY_FIELDS, f"{layout.SERIES}: repository")
    gate_path = path / layout.CORRECTNESS / layout.GATE
    gate = _json(path, gate_path, GATE_FIELDS) if gate_path.exists() else None
    blocks = [(phase, 1, None) for phase in layout.SINGLE]
    blocks += [(block["phase"], block["repetition"], block["order"]) for block in plan["blocks"]]
    attempts = [
        _load_attempt(path, plan, phase, repetition, number, order)
        for phase, repetition, order in blocks
        for number in layout.attempts(path, phase, repetition)
    ]
    return Series(plan=plan, record=record, gate=gate, attempts=tuple(attempts), head=read_manifest(path).head,
                  ceiling=_load_ceiling(path, plan))


def _load_plan(series: Path) -> dict[str, Any]:
    plan = _json(series, series / layout.PLAN, PLAN_FIELDS)
    _check(plan["workload"], WORKLOAD_FIELDS, f"{layout.PLAN}: workload")
    for number, arm in enumerate(plan["arms"]):
        _check(arm, ARM_FIELDS, f"{layout.PLAN}: arms[{number}]")
        _need(arm["name"].isidentifier(), layout.PLAN, f"arms[{number}].name", arm["name"], "letters, digits and `_`: it names folders")
    for number, block in enumerate(plan["blocks"]):
        _check(block, {"phase": str, "repetition": int, "order": list}, f"{layout.PLAN}: blocks[{number}]")
        _need(block["phase"] in MEASURED, layout.PLAN, f"blocks[{number}].phase", block["phase"], f"one of {', '.join(MEASURED)}")
    _check(plan["verdict"], {"primary": str, "margin": NUMBER}, f"{layout.PLAN}: verdict")
    _check(plan["phases"], dict.fromkeys(MEASURED, int), f"{layout.PLAN}: phases")
    names = {arm["name"] for arm in plan["arms"]}
    _need(bool(plan["pairs"]), layout.PLAN, "pairs", plan["pairs"], "at least one pair")
    for pair in plan["pairs"]:
        _need(len(pair) == 2 and set(pair) <= names, layout.PLAN, "pairs", pair, "two names of arms")
    return plan


def _load_ceiling(series: Path, plan: dict[str, Any]) -> Leg | None:
    """The first attempt's leg of phase `ceiling` whose record is `ok`: the workload of the arms, run by the null engine."""
    for number in layout.attempts(series, layout.CEILING, 1):
        folder = layout.leg_folder(series, layout.CEILING, 1, number, NULL_ARM)
        if not (folder / layout.LEG).exists():
            continue
        leg = _load_leg(series, plan, layout.CEILING, 1, number, NULL_ARM)
        if leg.record["status"] == "ok":
            leg = _load_streams(series, plan, leg, folder)
            driver = leg.request.driver if leg.request else None
            _need(driver == NULL_ARM, _shown(series, folder / REQUEST), "driver", driver, f"`{NULL_ARM}`, which alone shows the ceiling")
            return leg
    return None


def _load_attempt(series: Path, plan: dict[str, Any], phase: str, repetition: int, number: int, order: list[str] | None) -> Attempt:
    folder = layout.block_folder(series, phase, repetition, number)
    path = folder / layout.BLOCK
    if not path.exists():  # killed before its record was written
        record: dict[str, Any] = {"status": "interrupted", "reasons": ["the attempt has no record"], "order": []}
    else:
        record = _json(series, path, BLOCK_FIELDS)
        name = path.relative_to(series).as_posix()
        _need(record["status"] in STATUSES, name, "status", record["status"], f"one of {', '.join(STATUSES)}")
        _need(record["phase"] == phase and record["attempt"] == number, name, "phase, attempt", (record["phase"], record["attempt"]),
              f"{phase}, {number} as its folder says")
        if phase in MEASURED:
            _need(record["repetition"] == repetition, name, "repetition", record["repetition"], f"{repetition} as its folder says")
        if order is not None and record["status"] == "ok":
            _need(record["order"] == order, name, "order", record["order"], f"the planned {order}")
    accepted = phase in MEASURED and record["status"] == "ok"
    known = [NULL_ARM] if phase == layout.CEILING else [arm["name"] for arm in plan["arms"]]
    arms = record["order"] if accepted else [arm for arm in known if (folder / arm / layout.LEG).exists()]
    legs = {arm: _load_leg(series, plan, phase, repetition, number, arm) for arm in arms}
    for arm, leg in legs.items():
        _need(not accepted or leg.record["status"] == "ok", _shown(series, folder / arm / layout.LEG), "status", leg.record["status"],
              "`ok` in a block that is `ok`")
    return Attempt(phase=phase, repetition=repetition, number=number, record=record, legs=legs)


def _load_leg(series: Path, plan: dict[str, Any], phase: str, repetition: int, attempt: int, arm: str) -> Leg:
    folder = layout.leg_folder(series, phase, repetition, attempt, arm)
    name = _shown(series, folder / layout.LEG)
    record = _json(series, folder / layout.LEG, LEG_FIELDS)
    _check({"notes": record.get("notes", [])}, {"notes": list}, name)
    _need(record["status"] in STATUSES, name, "status", record["status"], f"one of {', '.join(STATUSES)}")
    _need((record["arm"], record["phase"], record["attempt"]) == (arm, phase, attempt), name, "arm, phase, attempt",
          (record["arm"], record["phase"], record["attempt"]), f"{arm}, {phase}, {attempt} as its folder says")
    result = _json(series, folder / RESULT, {}) if (folder / RESULT).exists() else None
    request = _guarded(series, folder / REQUEST, lambda: read_request(folder)) if (folder / REQUEST).exists() else None
    leg = Leg(arm=arm, phase=phase, repetition=repetition, attempt=attempt, record=record, request=request, result=result)
    if record["status"] != "ok" or phase not in MEASURED:
        return leg
    _need(record["role"] in ROLES, name, "role", record["role"], f"one of {', '.join(ROLES)}")
    _need(record["repetition"] == repetition, name, "repetition", record["repetition"], f"{repetition} as its folder says")
    return _load_streams(series, plan, leg, folder)


def _load_streams(series: Path, plan: dict[str, Any], leg: Leg, folder: Path) -> Leg:
    """The streams of a leg that counts, checked against its request, its result and the plan."""
    if leg.request is None or leg.result is None:
        raise EvidenceError(f"{_shown(series, folder)}: an `ok` leg without {REQUEST} or {RESULT}")
    request, result = leg.request, leg.result
    _guarded(series, folder / RESULT, lambda: check_result(result, request))
    declared = next((arm["client"] for arm in plan["arms"] if arm["name"] == leg.arm), request.client)
    _need(request.client == result["client"] == declared, _shown(series, folder / RESULT), "client", result["client"],
          f"{declared!r} as planned, {request.client!r} as requested")
    for file in (TRACES, OUTPUTS):
        found = _guarded(series, folder / file, lambda file=file: sha256((folder / file).read_bytes()))  # type: ignore[misc]
        _need(result["files"].get(file) == found, _shown(series, folder / RESULT), f"files[{file}]", result["files"].get(file),
              f"{found}, the SHA-256 of the file beside it")
    traces = _guarded(series, folder / TRACES, lambda: read_traces(folder))
    outputs = _guarded(series, folder / OUTPUTS, lambda: read_outputs(folder))
    marks = _guarded(series, folder / MARKS, lambda: read_marks(folder))
    missing = [mark for mark in MARK_NAMES if mark not in {line.get("mark") for line in marks}]
    _need(not missing, _shown(series, folder / MARKS), "mark", missing, "every mark of the protocol")
    _check_counts(series, plan["workload"], folder, traces, outputs)
    memory: list[dict[str, Any]] = []
    if leg.phase == "memory":
        memory = _guarded(series, folder / layout.MEMORY, lambda: _lines(folder / layout.MEMORY))
    idle = _json(series, folder / layout.IDLE, {})
    return replace(leg, traces=tuple(traces), outputs=tuple(map(tuple, outputs)), marks=tuple(marks), memory=tuple(memory), idle=idle)


def _check_counts(series: Path, work: dict[str, Any], folder: Path, traces: list[Trace], outputs: list[list[int]]) -> None:
    """Exact counts: every request there once and in order, every id stamped, prompts and outputs as planned, time running forward."""
    name = _shown(series, folder / TRACES)
    _need(len(traces) == len(outputs) == work["requests"], name, "requests", (len(traces), len(outputs)), f"{work['requests']} as planned")
    prompts, ids = sum(trace.prompt_tokens for trace in traces), sum(map(len, outputs))
    _need(prompts == work["prompt_tokens"], name, "prompt_tokens", prompts, f"{work['prompt_tokens']} as planned")
    _need(ids == work["output_tokens"], _shown(series, folder / OUTPUTS), "output tokens", ids, f"{work['output_tokens']} as planned")
    for index, (trace, output) in enumerate(zip(traces, outputs, strict=True)):
        where = f"request {index}"
        _need(trace.index == index, name, where, trace.index, "requests in corpus order")
        _need(bool(trace.stamps) and all(n >= 1 for _, n in trace.stamps), name, where, trace.stamps, "stamps of at least one id each")
        _need(sum(n for _, n in trace.stamps) == len(output), name, where, sum(n for _, n in trace.stamps),
              f"a stamp for each of the {len(output)} output ids")
        times = [trace.submitted_ns, *(t for t, _ in trace.stamps)]
        _need(all(a < b for a, b in pairwise(times)), name, where, times[:4], "strictly increasing stamps after the submission")
        _need(trace.scheduled_ns <= trace.submitted_ns and trace.end_ns >= times[-1], name, where, (trace.scheduled_ns, trace.end_ns),
              "scheduled before submitted, ended after the last id")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().splitlines()]


def _json(series: Path, path: Path, fields: Fields) -> dict[str, Any]:
    value = _guarded(series, path, lambda: json.loads(path.read_bytes()))
    return _check(value, fields, _shown(series, path))


def _check(value: Any, fields: Fields, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise EvidenceError(f"{where}: is {type(value).__name__}, an object is needed")
    for name, kind in fields.items():
        if name not in value:
            raise EvidenceError(f"{where}: field `{name}` is missing")
        if not isinstance(value[name], kind) or (isinstance(value[name], bool) and kind in (int, NUMBER)):
            raise EvidenceError(f"{where}: field `{name}` is {value[name]!r}, expected {kind}")
        if kind is list and name in TEXT_LISTS and not all(isinstance(item, str) for item in value[name]):
            raise EvidenceError(f"{where}: field `{name}` is {value[name]!r}, expected a list of texts")
    if "schema" in fields and value["schema"] != SCHEMA:
        raise EvidenceError(f"{where}: field `schema` is {value['schema']}, this version reads {SCHEMA}")
    return value


def _need(condition: bool, where: str, field: str, value: object, expected: str) -> None:
    if not condition:
        raise EvidenceError(f"{where}: field `{field}` is {value!r}, expected {expected}")


def _guarded(series: Path, path: Path, read: Callable[[], T]) -> T:
    """Run a reader; whatever it stumbles over becomes an error that names the file."""
    try:
        return read()
    except FileNotFoundError:
        raise EvidenceError(f"{_shown(series, path)}: is missing") from None
    except (ProtocolError, ValueError, TypeError, KeyError, OSError, EOFError, zlib.error) as error:
        raise EvidenceError(f"{_shown(series, path)}: cannot be read: {error}") from None


def _shown(series: Path, path: Path) -> str:
    return path.relative_to(series).as_posix()
