"""Why a series, or one pair of arms in it, gets no verdict.  Pure: evidence in, reasons out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.analysis import near_tie
from harness.analysis.ceiling import CLIENT_BOUND, ClientShare
from harness.analysis.tokens import LegDiff
from harness.evidence import layout
from harness.evidence.schema import MEASURED, Leg, Series
from harness.verdict import Exit

Reasons = list[str]
Record = Mapping[str, Any] | None
"""The near-tie record of a series, as `evidence/near_ties.py` gives it."""

NOT_JUDGED = ("the plan has no correctness gate and no near-tie record lies beside the series, so nobody judged our ids; have its oracle "
              "judge them: `parity near-tie DIR`")

NOT_THE_PIN = {
    "eager": "ran without compilation or graphs, slower than in production, so the ratio flatters the other arm",
    "older-release": "is an older release than the pinned one",
    "reduced-build": "is the pinned release with production features missing or switched off",
}
"""What a role other than ours and pin means for a reader."""


def series_failures(series: Series, record: Record = None) -> tuple[Exit | None, Reasons]:
    """ERROR or VOID with its reasons when the series as a whole cannot count, else (None, []).  Ids that its near-tie record calls wrong
    void it."""
    errors = _changed_arms(series)
    voids: Reasons = []
    not_run: Reasons = []
    before = [(layout.CORRECTNESS, 1)] if series.plan["correctness"] else []
    for phase, repetition in [*before, (layout.WARMUP, 1), *((block["phase"], block["repetition"]) for block in series.plan["blocks"])]:
        if repetition in {block.repetition for block in series.accepted(phase)}:
            continue
        name = layout.block_name(phase, repetition) if phase in MEASURED else phase
        ended = [a for a in series.attempts if (a.phase, a.repetition) == (phase, repetition) and a.record["status"] != "interrupted"]
        if not ended:
            not_run.append(name)
            continue
        last = ended[-1].record
        why = "; ".join(last["reasons"]) or "no reason given"
        text = f"{name}: none of {len(ended)} attempts is ok, the last is {last['status']}: {why}"
        (voids if last["status"] == "void" else errors).append(text)
    if series.gate is not None and not series.gate["ok"] and not_run:
        voids += [f"no timing on wrong tokens: {reason}" for reason in _correctness(series, record)]
    if not_run and not (errors or voids):
        errors.append("the series did not run to its end; go on with `--resume`")
    voids += near_tie.void_reasons(record) if record is not None else []
    tail = [f"not run: {', '.join(not_run)}"] if not_run else []
    if errors:
        return Exit.ERROR, [*errors, *voids, *tail]
    return (Exit.VOID, [*voids, *tail]) if voids else (None, [])


def _changed_arms(series: Series) -> Reasons:
    """An arm is one sealed tuple: role, identity, resolved settings and code stay the same over its legs; our arms run one code."""
    reasons = []
    ours: dict[str, str] = {}
    for arm in series.arms:
        legs = series.legs(arm)
        for field, values in (
            ("role", [leg.record["role"] for leg in legs]),
            ("code_sha256", [leg.record["code_sha256"] for leg in legs]),
            ("who", [leg.result["who"] for leg in legs if leg.result]),
            ("device", [leg.result["device"] for leg in legs if leg.result]),
            ("resolved", [leg.result["resolved"] for leg in legs if leg.result]),
        ):
            changed = next((leg for leg, value in zip(legs, values, strict=True) if value != values[0]), None)
            if changed is not None:
                reasons.append(f"{changed.name}: field `{field}` differs from that of {legs[0].name}; an arm is one sealed tuple")
        if legs and legs[0].record["role"] == "ours":
            ours[arm] = legs[0].record["code_sha256"]
    if len(set(ours.values())) > 1:
        reasons.append(f"our arms ran different code: {', '.join(f'{arm} {code[:12]}' for arm, code in ours.items())}")
    return reasons


def refusal(ours: Leg, base: Leg) -> str | None:
    """Why no ratio may be formed at all: the arms were called through different clients."""
    a, b = (leg.request.client if leg.request else None for leg in (ours, base))
    return None if a == b else f"refused: clients differ, {ours.arm} is {a} and {base.arm} is {b}; a ratio over two clients is none"


def withheld(
    series: Series, record: Record, diffs: list[LegDiff], shares: Mapping[str, ClientShare], ours: Leg, base: Leg
) -> Reasons:
    """Why the numbers of a pair are shown without a verdict; empty when they may have one."""
    roles = {leg.arm: leg.record["role"] for leg in (ours, base)}
    reasons = [f"no verdict: {role} ({arm} {NOT_THE_PIN[role]})" for arm, role in roles.items() if role in NOT_THE_PIN]
    reasons += [f"no verdict: CLIENT-BOUND ({arm} ran at up to {share.share:.0%} of the client's ceiling, {CLIENT_BOUND:.0%} is the limit: "
                "the client's own time pulls the ratio towards 1)" for arm, share in shares.items() if arm in roles and share.bound]
    if "ours" in roles.values():
        reasons += [f"no verdict: {reason}" for reason in (*_correctness(series, record), *_wrong_tokens(diffs))]
    return reasons


def _wrong_tokens(diffs: list[LegDiff]) -> Reasons:
    reasons = []
    for leg_diff in diffs:
        if leg_diff.gated and leg_diff.kind != "ab" and not leg_diff.diff.same:  # an A/B has a reason of its own
            first = leg_diff.diff.divergences[0]
            reasons.append(f"wrong tokens: {leg_diff.a} against {leg_diff.b} {leg_diff.diff.identical}/{leg_diff.diff.of}, "
                           f"first at request {first.request}, position {first.position}")
    return reasons


def _correctness(series: Series, record: Record) -> Reasons:
    """The gate must be there, be the planned one, and have passed every case; a skipped case is not a passed one.

    A plan without one, whose workload has no stored reference, is judged by its near-tie record instead: by the oracle's own band.
    """
    gate, planned = series.gate, series.plan["correctness"]
    if planned is None and record is not None:
        return []  # what it calls wrong has voided the series; our arms must agree with each other as ever
    if planned is None:
        judges = any(arm["oracle"] is not None for arm in series.plan["arms"])
        return [NOT_JUDGED if judges else "the plan has no correctness gate"]
    if gate is None:
        return ["the correctness gate did not run"]
    reasons = []
    if gate["reference_sha256"] != planned.get("reference_sha256"):
        reasons.append("the correctness gate used another reference than planned")
    if gate["cases"] < 1 or gate["passed"] != gate["cases"] or gate["skipped"] or gate["failures"] or not gate["ok"]:
        reasons.append(f"the correctness gate passed {gate['passed']} of {gate['cases']} cases, {gate['skipped']} skipped{_failure(gate)}")
    if gate["on_off_identical"] is False:
        reasons.append("the correctness gate found our arms' tokens different from each other")
    return reasons


def _failure(gate: dict[str, Any]) -> str:
    if not gate["failures"]:
        return ""
    first = gate["failures"][0]
    return f"; first: {first.get('arm')} request {first.get('request')}, position {first.get('position')}"
