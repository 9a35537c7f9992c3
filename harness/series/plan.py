"""The plan: everything a series will do, as data, before any of it is done.  Written to plan.json; a changed plan is a new series."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.evidence.layout import CEILING, NULL_ARM, leg_name
from harness.machine.idle_rule import IdleLimits
from harness.series.spec import ArmSpec, Spec
from harness.strict import SpecError
from legs.protocol import sha256, to_json

SCHEMA = 1
PHASES = ("memory", "performance")
RETRIES = 2
"""How often a block whose leg was void, failed or hung is repeated."""


def block_order(arms: Sequence[str], repetition: int) -> list[str]:
    """The order of arms in repetition 1, 2, …: two arms swap on even repetitions, more rotate (ABC, BCA, CAB)."""
    if len(arms) == 2:
        return list(arms) if repetition % 2 else list(reversed(arms))
    shift = (repetition - 1) % len(arms)
    return [*arms[shift:], *arms[:shift]]


def arm_environment(options: Mapping[str, Any], oracle_environment: Mapping[str, str]) -> dict[str, str]:
    """What an arm's environment has on top of the few variables every process gets (`series/arms.py`): exactly this, nothing else."""
    threads = {"OMP_NUM_THREADS": str(options["threads"])} if "threads" in options else {}
    return {**threads, **oracle_environment}


def make_plan(
    spec: Spec, spec_bytes: bytes, environments: Mapping[str, Mapping[str, str]], reference_cases: int, limits: IdleLimits
) -> dict[str, Any]:
    """Turn a spec into its plan.

    `environments` maps each oracle's name to the variables its file declares; `reference_cases` is how many prompts the correctness
    reference holds (0 without one), `limits` what the idle gate allows.  Pure: equal input gives an equal plan and an equal `digest`.
    """
    names = list(spec.arms)
    arms = [_arm(name, spec.arms[name], spec.options, environments) for name in names]
    blocks: list[dict[str, Any]] = [
        {"phase": phase, "repetition": repetition, "order": block_order(names, repetition)}
        for phase in PHASES
        for repetition in range(1, getattr(spec.phases, phase) + 1)
    ]
    legs = [
        {"name": leg_name(block["phase"], block["repetition"], arm), "phase": block["phase"], "repetition": block["repetition"],
         "arm": arm, "order": position}
        for block in blocks
        for position, arm in enumerate(block["order"])
    ]
    plan: dict[str, Any] = {
        "schema": SCHEMA,
        "name": spec.name,
        "title": spec.title,
        "spec_sha256": sha256(spec_bytes),
        "model": dataclasses.asdict(spec.model),
        "workload": {**dataclasses.asdict(spec.workload), "output_tokens": spec.workload.requests * spec.workload.max_tokens},
        "phases": dataclasses.asdict(spec.phases),
        "arms": arms,
        "ceiling": _ceiling(spec),
        "correctness": _correctness(spec, reference_cases),
        "warmup": [{"name": f"warmup-{arm}", "arm": arm} for arm in names],
        "blocks": blocks,
        "legs": legs,
        "pairs": [list(pair) for pair in spec.verdict.pairs],
        "verdict": {"primary": spec.verdict.primary, "margin": spec.verdict.margin},
        "idle": dataclasses.asdict(dataclasses.replace(limits, waived=tuple(waiver.check for waiver in spec.waivers))),
        "waivers": [dataclasses.asdict(waiver) for waiver in spec.waivers],
        "calibration": spec.calibration,
        "leg_timeout_s": spec.limits.leg_timeout_s,
        "retries": RETRIES,
    }
    plan["digest"] = hashlib.sha256(to_json(plan)).hexdigest()
    return plan


def _arm(name: str, arm: ArmSpec, shared: Mapping[str, Any], environments: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    options = {**shared, **arm.options}
    return {
        "name": name,
        "driver": arm.driver,
        "oracle": arm.oracle,
        "role_expected": "pin" if arm.oracle else "ours",
        "client": arm.client,
        "depth": options.get("depth"),
        "options": options,
        "environment": arm_environment(options, environments[arm.oracle] if arm.oracle else {}),
    }


def _ceiling(spec: Spec) -> dict[str, Any]:
    """The leg against the null engine, with what a leg needs of its arm: called through the client of the arm that the verdict is on."""
    return {
        "leg": leg_name(CEILING, 1, NULL_ARM), "name": NULL_ARM, "driver": NULL_ARM, "oracle": None,
        "client": spec.arms[spec.verdict.pairs[0][0]].client, "options": {}, "environment": {},
    }


def _correctness(spec: Spec, cases: int) -> dict[str, Any] | None:
    if spec.correctness is None:
        return None
    return {
        "reference": spec.correctness.reference,
        "reference_sha256": spec.correctness.reference_sha256,
        "cases": cases,
        "arms": list(spec.correctness.arms),
        "legs": [{"name": f"correctness-{arm}", "arm": arm} for arm in spec.correctness.arms],
    }


def corpus_path(name: str) -> str:
    """A corpus by name, relative to the root of the (staged) code."""
    return f"legs/corpora/{name}.json.gz"


def read_reference(root: Path, spec: Spec, file: str) -> dict[int, list[int]]:
    """The reference's greedy ids by prompt index; {} when the spec names none.  Raises :class:`SpecError` when it is another file."""
    if spec.correctness is None:
        return {}
    path = root / "legs" / "references" / f"{spec.correctness.reference}.json.gz"
    if not path.is_file():
        raise SpecError(file, "correctness.reference", spec.correctness.reference, f"there is no {path.relative_to(root)}")
    data = path.read_bytes()
    if sha256(data) != spec.correctness.reference_sha256:
        raise SpecError(file, "correctness.reference_sha256", spec.correctness.reference_sha256,
                        f"the file's is {sha256(data)}; restore the reference or declare the new one")
    reference = json.loads(gzip.decompress(data))
    for field, wanted in (("corpus_sha256", spec.workload.corpus_sha256), ("checkpoint_sha256", spec.model.sha256)):
        if reference[field] != wanted:
            raise SpecError(file, "correctness.reference", spec.correctness.reference,
                            f"it was made for {field} {reference[field]}, this series has {wanted}; make it anew")
    return {int(index): ids for index, ids in reference["ids"].items()}
