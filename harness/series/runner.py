"""A plan carried out: one lock, the client's ceiling, correctness, warm-ups, blocks with retries; sealed evidence and a report at last."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.evidence import layout, packed, store
from harness.evidence.calibrations import RESULTS, find_quote
from harness.machine.identity import machine_record, repository_record
from harness.machine.idle import check_idle
from harness.machine.idle_rule import IdleLimits, limits_from_environment
from harness.machine.lock import LockBusy, LockError, SeriesLock
from harness.oracle import Oracle, OracleError, load_oracle, oracle_python
from harness.oracle_env import refuse_unfit
from harness.report.build import build_report
from harness.series import checks, gate
from harness.series.leg import Context, LegPlace, run_leg
from harness.series.model import ModelError, check_model
from harness.series.plan import corpus_path, make_plan, read_reference
from harness.series.progress import Progress
from harness.series.spec import Spec, load_spec
from harness.series.stage import StageError, code_sha256, stage
from harness.strict import SpecError
from legs.protocol import ProtocolError, read_corpus, read_outputs, to_json, write_atomic

SCHEMA = 1


class Refused(Exception):
    """Nothing ran; the message says why and what to do."""


class CannotResume(Exception):
    """The series folder is not one that this plan can go on with."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A spec with everything it names found and checked."""

    spec: Spec
    spec_bytes: bytes
    plan: dict[str, Any]
    oracles: dict[str, Oracle]
    reference: dict[int, list[int]]


def prepare(root: Path, spec_path: Path) -> Prepared:
    """Read a spec, its oracles and its reference, and make the plan.  Runs nothing and needs no model and no lock."""
    spec = load_spec(spec_path)
    oracles = {arm.oracle: load_oracle(arm.oracle, root) for arm in spec.arms.values() if arm.oracle}
    reference = read_reference(root, spec, spec_path.name)
    spec_bytes = spec_path.read_bytes()
    try:
        limits = limits_from_environment()
    except ValueError as error:
        raise Refused(str(error)) from None
    plan = make_plan(spec, spec_bytes, {name: oracle.environment for name, oracle in oracles.items()}, len(reference), limits)
    return Prepared(spec=spec, spec_bytes=spec_bytes, plan=plan, oracles=oracles, reference=reference)


def run_series(
    root: Path, spec_path: Path, out: Path, resume: bool, lock_path: Path, lock_timeout_s: float | None, console: Console,
    calibration: bool = False,
) -> dict[str, Any]:
    """Carry a series out into `out` and return its summary; one whose arms may have faults only when `calibration` says so.

    Raises :class:`Refused` when nothing ran, :class:`SpecError` for a wrong spec, :class:`CannotResume`; KeyboardInterrupt leaves a series
    that `resume` continues at its first incomplete block.
    """
    prepared = prepare(root, spec_path)
    plan, spec = prepared.plan, prepared.spec
    if spec.calibration != calibration:
        raise SpecError(
            spec_path.name, "calibration", spec.calibration, "`parity calibrate` runs the series of a calibration, and no other")
    try:
        model, model_record = check_model(root, spec.model)
        lengths = _prompt_lengths(root, spec, spec_path.name)
        for oracle in prepared.oracles.values():
            oracle_python(oracle, root)
            refuse_unfit(oracle, root, os.environ)
    except (ModelError, OracleError, ProtocolError) as error:
        raise Refused(str(error)) from None
    if out.exists() != resume:
        problem = "exists already; choose another --out, or --resume it" if out.exists() else "there is no series to resume"
        raise Refused(f"{out}: {problem}")
    lock = SeriesLock(lock_path, f"parity run-series {spec_path.name}")
    try:
        lock.acquire(lock_timeout_s)
    except (LockBusy, LockError) as error:
        raise Refused(str(error)) from None
    try:
        idle = check_idle(IdleLimits(**plan["idle"]), {os.getpid()}, None, lock.path)
        if not idle["ok"]:
            raise Refused("the machine is not idle: " + "; ".join(idle["reasons"]))
        (_reopen if resume else _begin)(root, out, prepared, model_record)
        segment = _note_lock(out, None, "acquired", lock.record())
        corpus = corpus_path(spec.workload.corpus)
        try:
            stages = {driver: stage(root, driver, out, corpus) for driver in _drivers(plan)}
        except StageError as error:
            raise CannotResume(str(error)) from None
        legs = 1 + len(plan["legs"]) + len(plan["warmup"]) + len((plan["correctness"] or {"legs": []})["legs"])
        context = Context(
            root=root, series=out, plan=plan, model=model, model_files=model_record["files"], oracles=prepared.oracles, stages=stages,
            lock=lock, progress=Progress(console, legs), own_roots={os.getpid()}, prompt_lengths=lengths,
        )
        _carry_out(context, prepared)
        _note_lock(out, segment, "released", lock.record())
        store.seal(out)
        shutil.rmtree(out / layout.UNPACKED)
    finally:
        lock.release()
    return build_report(out)


def _prompt_lengths(root: Path, spec: Spec, file: str) -> list[int]:
    corpus = read_corpus(root / corpus_path(spec.workload.corpus), spec.workload.corpus_sha256)
    lengths = [len(prompt) for prompt in corpus.prompts]
    total = sum(lengths[: spec.workload.requests])
    if len(lengths) < spec.workload.requests or total != spec.workload.prompt_tokens:
        raise SpecError(file, "workload.prompt_tokens", spec.workload.prompt_tokens,
                        f"the first {spec.workload.requests} of {len(lengths)} prompts hold {total} ids")
    return lengths


def _begin(root: Path, out: Path, prepared: Prepared, model_record: dict[str, Any]) -> None:
    drivers, machine = _drivers(prepared.plan), machine_record()
    quote = find_quote(root / RESULTS, machine["host"])
    store.create_series(out)
    write_atomic(out / "spec.toml", prepared.spec_bytes)
    write_atomic(out / "plan.json", to_json(prepared.plan))
    write_atomic(out / "series.json", to_json({
        "schema": SCHEMA, "name": prepared.spec.name, "plan_digest": prepared.plan["digest"], "machine": machine,
        "repository": repository_record(root), "model": model_record, "python": sys.version.split()[0],
        "code_sha256": {driver: code_sha256(root, driver) for driver in drivers},
        "harness_sha256": code_sha256(root, "harness"), "calibration": quote,
    }))
    store.record(out, ["spec.toml", "plan.json", "series.json"])
    corpus = corpus_path(prepared.spec.workload.corpus)
    codes = {stage(root, driver, out, corpus)[1] for driver in drivers}  # two drivers of the same files share their copy
    store.record(out, sorted(str(packed.archive(out, code).relative_to(out)) for code in codes))


def _drivers(plan: dict[str, Any]) -> list[str]:
    return sorted({arm["driver"] for arm in (*plan["arms"], plan["ceiling"])})


def _reopen(root: Path, out: Path, prepared: Prepared, model_record: dict[str, Any]) -> None:
    """Check that `out` is this plan's series, unsealed and unharmed, on this boot of this machine, with this code."""
    try:
        if store.is_sealed(out):
            raise CannotResume(f"{out}: this series is complete and sealed; read it with `parity report`")
        _adopt(out)
        store.check_seal(out, require_sealed=False)
        plan = json.loads((out / "plan.json").read_bytes())
        series = json.loads((out / "series.json").read_bytes())
    except (store.BrokenSeal, OSError, ValueError) as error:
        raise CannotResume(f"{out}: {error}") from None
    if plan["digest"] != prepared.plan["digest"]:
        raise CannotResume(f"{out}: was begun under plan {plan['digest'][:12]}, the spec now gives {prepared.plan['digest'][:12]}; "
                           "begin a new series")
    now = machine_record()
    for name in ("host", "boot_id"):
        if series["machine"][name] != now[name]:
            raise CannotResume(f"{out}: was begun on {name} {series['machine'][name]}, this is {now[name]}; begin a new series")
    for driver, wanted in series["code_sha256"].items():
        if (found := code_sha256(root, driver)) != wanted:
            raise CannotResume(f"{out}: was begun with code {wanted[:12]} for {driver}, the tree now holds {found[:12]}; "
                               "begin a new series")
    if series["model"] != model_record:
        raise CannotResume(f"{out}: was begun with another checkpoint; begin a new series")


def _adopt(out: Path) -> None:
    """Close what a killed runner left open: an attempt without its record is interrupted, and every stray file joins the evidence."""
    for name in store.unrecorded(out):
        parts = Path(name).parts
        depth = 3 if parts[0] == layout.BLOCKS else 2
        if parts[0] not in (layout.BLOCKS, *layout.SINGLE) or len(parts) <= depth:
            continue
        folder = out.joinpath(*parts[:depth])
        if not (folder / layout.BLOCK).exists():
            phase, repetition = parts[1].rsplit("-", 1) if depth == 3 else (parts[0], "1")
            attempt = int(folder.name.removeprefix(layout.ATTEMPT))
            order = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
            _write_block(folder, phase, int(repetition), attempt, order, "interrupted", ["the runner was killed"])
    store.record(out, store.unrecorded(out))


def _note_lock(out: Path, segment: int | None, event: str, record: dict[str, Any]) -> int:
    """Write lock/<n>-<event>.json, n being the next free segment unless given; returns n."""
    folder = out / layout.LOCK
    folder.mkdir(exist_ok=True)
    if segment is None:
        segment = 1 + len(list(folder.glob("*-acquired.json")))
    write_atomic(folder / f"{segment}-{event}.json", to_json({"event": event, **record}))
    store.record(out, f"{layout.LOCK}/{segment}-{event}.json")
    return segment


def _carry_out(context: Context, prepared: Prepared) -> None:
    plan = context.plan
    _block(context, layout.CEILING, 1, [plan["ceiling"]["name"]])  # one that cannot be had is told in the report and blocks nothing
    if plan["correctness"] is not None:
        gate_folder = _block(context, layout.CORRECTNESS, 1, plan["correctness"]["arms"])
        if gate_folder is None or not _gate(context, prepared, gate_folder):
            return
    if _block(context, layout.WARMUP, 1, [leg["arm"] for leg in plan["warmup"]]) is None:
        return
    for block in plan["blocks"]:
        if _block(context, block["phase"], block["repetition"], block["order"]) is None:
            return


def _gate(context: Context, prepared: Prepared, folder: Path) -> bool:
    name = f"{layout.CORRECTNESS}/{layout.GATE}"
    path = context.series / name
    if not path.exists():
        outputs = {arm: read_outputs(folder / arm) for arm in context.plan["correctness"]["arms"]}
        decision = gate.decide(prepared.reference, outputs, context.plan["correctness"]["reference_sha256"])
        write_atomic(path, to_json(decision))
        store.record(context.series, name)
    decision = json.loads(path.read_bytes())
    context.progress.say(gate.sentence(decision))
    return bool(decision["ok"])


def _block(context: Context, phase: str, repetition: int, order: list[str]) -> Path | None:
    """Run a block until an attempt is ok, at most `retries` times again; None when none was.  A block already there is kept."""
    tries = context.plan["retries"] + 1
    used = attempt = 0
    while True:
        attempt += 1
        folder = layout.block_folder(context.series, phase, repetition, attempt)
        if not folder.exists():
            if used == tries:
                context.progress.say(f"block {layout.block_name(phase, repetition)}: given up after {tries} attempts")
                return None
            if used:
                context.progress.more(len(order))
            status = _attempt(context, phase, repetition, attempt, order, folder)
        else:
            status = _past_attempt(context, order, folder)
        if status == "ok":
            return folder
        used += status != "interrupted"


def _attempt(context: Context, phase: str, repetition: int, attempt: int, order: list[str], folder: Path) -> str:
    status, reasons = "interrupted", ["the runner was interrupted"]
    telemetry: dict[str, Any] = {}
    try:
        for position, arm in enumerate(order):
            name = layout.leg_name(phase, repetition, arm)
            place = LegPlace(name=name, phase=phase, repetition=repetition, attempt=attempt, order=position, arm=arm)
            record = run_leg(context, place, folder / arm)
            telemetry[arm] = record.get("telemetry")
            status, reasons = record["status"], [f"{name}: {reason}" for reason in record["reasons"]]
            if status != "ok":
                context.progress.drop(len(order) - position - 1)
                break
        else:
            reasons = checks.clock_offsets(telemetry)
            status = "void" if reasons else "ok"
    except BaseException:
        status, reasons = "interrupted", ["the runner was interrupted"]
        raise
    finally:
        run = [arm for arm in order if (folder / arm).exists()]
        _write_block(folder, phase, repetition, attempt, run, status, reasons)
        store.record_tree(context.series, str(folder.relative_to(context.series)))
    return status


def _past_attempt(context: Context, order: list[str], folder: Path) -> str:
    """The status of an attempt of an earlier run."""
    status: str = json.loads((folder / layout.BLOCK).read_bytes())["status"]
    if status == "ok":
        context.progress.skip(len(order))
    return status


def _write_block(folder: Path, phase: str, repetition: int, attempt: int, order: list[str], status: str, reasons: list[str]) -> None:
    write_atomic(folder / layout.BLOCK, to_json({
        "schema": SCHEMA, "phase": phase, "repetition": repetition, "attempt": attempt, "order": order, "status": status,
        "reasons": reasons,
    }))
