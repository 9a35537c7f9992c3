"""A series to one JSON-able summary: numbers, their doubt, the verdict and its reasons.  Pure: equal evidence gives an equal summary."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from harness.analysis import ab, gates, near_tie
from harness.analysis.ceiling import CLIENT_BOUND, Ceiling, ClientShare, client_ceiling, client_share
from harness.analysis.contention import contention, mark
from harness.analysis.metrics import LegMetrics, leg_metrics
from harness.analysis.occupancy import occupancy
from harness.analysis.ratios import AXES, GPU_MEMORY, MEMORY, THROUGHPUT, Axis, ConsistencyError, check_throughputs, compare, mean
from harness.analysis.sampling import sampling
from harness.analysis.tokens import LegDiff, TokensError, describe, series_diffs
from harness.analysis.vllm_bench import vllm_bench
from harness.evidence.layout import PLAN
from harness.evidence.schema import MEASURED, EvidenceError, Leg, Series
from harness.leg.memory_summary import summarise_memory
from harness.verdict import Exit
from legs.protocol import to_json

SCHEMA = 1

Values = dict[str, dict[str, list[float | None]]]
"""arm -> axis -> one value per accepted block."""

Shares = dict[str, ClientShare]
"""arm -> how near it came to the client's ceiling."""

OCCUPANCY_TOLERANCE = 0.01
"""Arms whose mean in-flight counts differ by more than this share are not equally loaded, and the summary says so."""


def summarize(series: Series, record: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Sum up a loaded series, with the near-tie `record` of it (`evidence/near_ties.py`) where there is one.

    What the evidence says becomes the verdict and its reasons; only an unknown axis raises EvidenceError.
    """
    if (axis := series.plan["verdict"]["primary"]) not in AXES:
        raise EvidenceError(f"{PLAN}: field `verdict.primary` is {axis!r}, expected one of {', '.join(AXES)}")
    arms = {arm: _arm(series, arm) for arm in series.arms}
    values: Values = {arm: {axis: axis_values(arms[arm], axis) for axis in AXES} for arm in series.arms}
    for arm, axes in values.items():
        arms[arm]["means"] = {name: mean(axes[name]) for name in AXES}
    failed, reasons = gates.series_failures(series, record)
    try:
        diffs = series_diffs(series)
        if ab.difference(series.plan) is not None:
            diffs += ab.block_diffs(series, series.plan["pairs"][0])
    except TokensError as error:
        diffs, failed, reasons = [], Exit.ERROR, [str(error), *reasons]
    ceiling = client_ceiling(series.ceiling.traces) if series.ceiling else None
    shares = _client_shares(series, ceiling)
    pairs = [_pair(series, record, diffs, values, shares, pair, failed) for pair in series.plan["pairs"]]
    primary = pairs[0]
    if failed is None and (broken := [reason for pair in pairs for reason in pair["errors"]]):
        failed, reasons = Exit.ERROR, broken
    if failed is None and primary["refused"]:
        failed, reasons = Exit.ERROR, [primary["refused"]]
    decided = primary["axes"].get(axis) or {"verdict": "VOID", "reasons": [f"{axis}: neither arm ran on a GPU"]}
    verdict = failed if failed is not None else Exit[decided["verdict"]]
    dirty = series.record["repository"]["dirty"]
    summary = {
        "schema": SCHEMA,
        "name": series.plan["name"],
        "title": series.plan.get("title"),
        "verdict": verdict.name,
        "qualifier": decided.get("qualifier") if failed is None else None,
        "exit_code": int(verdict),
        "binding": dirty is False,
        "reasons": reasons or decided["reasons"],
        "primary": {"ours": primary["ours"], "base": primary["base"], "axis": axis, "margin": series.plan["verdict"]["margin"]},
        "pairs": pairs,
        "arm_order": series.arms,
        "arms": arms,
        "tokens": [_token_row(leg_diff) for leg_diff in diffs],
        "ceiling": _ceiling_row(series, ceiling, shares),
        "occupancy_warnings": _occupancy_warnings(series, arms),
        "correctness": series.gate,
        "near_tie": None if record is None else near_tie.brief(record),
        "notes": [f"{leg.name}: {note}" for arm in series.arms for leg in series.legs(arm) for note in leg.record.get("notes", [])],
        "attempts": [_attempt_row(attempt) for attempt in series.attempts],
        "started_utc": min((leg.record["started_utc"] for attempt in series.attempts for leg in attempt.legs.values()), default=None),
        "workload": series.plan["workload"],
        "model": series.plan.get("model"),
        "plan_digest": series.plan["digest"],
        "spec_sha256": series.plan["spec_sha256"],
        "series": series.record,
        "manifest_head": series.head,
    }
    summary = mark(summary, contention(series))
    return dict(json.loads(to_json(summary)))  # as a reader of summary.json sees it, whoever calls


def _client_shares(series: Series, ceiling: Ceiling | None) -> Shares:
    """For each arm called through the ceiling's client, its performance leg that came nearest to the ceiling."""
    if ceiling is None or series.ceiling is None or series.ceiling.request is None:
        return {}
    client = series.ceiling.request.client
    shares: Shares = {}
    for arm in series.arms:
        legs = [leg for leg in series.legs(arm) if leg.phase == "performance" and leg.request and leg.request.client == client]
        if legs:
            shares[arm] = max((client_share(leg.traces, ceiling) for leg in legs), key=lambda found: found.share)
    return shares


def _ceiling_row(series: Series, ceiling: Ceiling | None, shares: Shares) -> dict[str, Any] | None:
    """The client's ceiling and how near each arm came to it; None when no ceiling was measured."""
    if ceiling is None or series.ceiling is None or series.ceiling.request is None:
        return None
    return {
        "client": series.ceiling.request.client, "limit": CLIENT_BOUND, **dataclasses.asdict(ceiling),
        "arms": {arm: dataclasses.asdict(shares[arm]) if arm in shares else None for arm in series.arms},
    }


def _arm(series: Series, arm: str) -> dict[str, Any]:
    """Who an arm is, and every number of each of its accepted legs."""
    planned = next(entry for entry in series.plan["arms"] if entry["name"] == arm)
    legs = series.legs(arm)
    result = legs[0].result if legs else None
    work = series.plan["workload"]
    performance = [leg for leg in legs if leg.phase == "performance"]
    return {
        "role": legs[0].record["role"] if legs else None,
        "role_expected": planned["role_expected"],
        "role_reasons": legs[0].record["reasons"] if legs else [],
        "driver": planned["driver"],
        "oracle": planned["oracle"],
        "client": legs[0].request.client if legs and legs[0].request else None,
        "depth": result["resolved"].get("depth") if result else None,
        "options": planned["options"],
        "environment": planned["environment"],
        "resolved": result["resolved"] if result else None,
        "who": result["who"] if result else None,
        "device": result["device"] if result else None,
        "code_sha256": legs[0].record["code_sha256"] if legs else None,
        "performance": [_performance(leg, work["concurrency"]) for leg in performance],
        "memory": [_memory(leg) for leg in legs if leg.phase == "memory"],
    }


def _performance(leg: Leg, concurrency: int) -> dict[str, Any]:
    metrics: LegMetrics = leg_metrics(leg.traces)
    assert leg.result is not None
    return {
        "leg": leg.name, "repetition": leg.repetition, **dataclasses.asdict(metrics),
        "occupancy": dataclasses.asdict(occupancy(leg.traces, concurrency)), "counters": leg.result["counters"],
        "telemetry": leg.record.get("telemetry"),
        "vllm_bench": {name: row and dataclasses.asdict(row) for name, row in vllm_bench(leg.traces).items()},
    }


def _memory(leg: Leg) -> dict[str, Any]:
    """A memory leg's summary.  A peak the sampler missed, or a stream cut short, is no reading: both become null."""
    read = summarise_memory(leg.memory, leg.marks)
    if not read["complete"]:
        read |= {"peak_pss": None, "stable_pss": None}
    if read["peak_missed"]:
        read["peak_pss"] = None
    how = sampling(leg.memory)
    read["peak_gpu"] = how["gpu_peak"] if read["complete"] else None
    return {"leg": leg.name, "repetition": leg.repetition, **read, "sampling": how}


def axis_values(arm: dict[str, Any], axis: str) -> list[float | None]:
    """One value per accepted block; None where it could not be read."""
    if axis in MEMORY:
        return [leg.get(axis) for leg in arm["memory"]]
    if axis in THROUGHPUT:
        return [leg[axis] for leg in arm["performance"]]
    name, statistic = {"itl_p50": ("itl", "median")}.get(axis, tuple(axis.split("_", 1)))
    return [leg[name][statistic] if leg[name] is not None else None for leg in arm["performance"]]


def _pair(
    series: Series, record: Mapping[str, Any] | None, diffs: list[LegDiff], values: Values, shares: Shares, pair: list[str],
    failed: Exit | None,
) -> dict[str, Any]:
    """All axes of one pair.  `refused`: no ratios at all; `withheld`: ratios without a verdict; `errors`: the arithmetic does not hold."""
    ours, base = (series.legs(arm) for arm in pair)
    out: dict[str, Any] = {
        "ours": pair[0], "base": pair[1], "refused": None, "withheld": [], "errors": [], "axes": {}, "ab": None,
        "roles": [legs[0].record["role"] if legs else None for legs in (ours, base)],
    }
    if not ours or not base:
        return {**out, "refused": f"refused: no accepted block of {pair[0]} and {pair[1]}"}
    if refused := gates.refusal(ours[0], base[0]):
        return {**out, "refused": refused}
    out["withheld"] = gates.withheld(series, record, diffs, shares, ours[0], base[0])
    difference = ab.difference(series.plan)
    blocks = [leg_diff for leg_diff in diffs if leg_diff.kind == "ab"]
    if difference is not None:
        out["withheld"] = [*ab.withheld(difference, blocks, ours[0], base[0]), *out["withheld"]]
    if failed is not None:
        out["withheld"].append(f"no verdict: the series is {failed.name}")
    margin = series.plan["verdict"]["margin"]
    axes = {axis: compare(axis, values[pair[0]][axis], values[pair[1]][axis], margin) for axis in AXES
            if axis != GPU_MEMORY or _on_gpu(ours[0]) or _on_gpu(base[0])}
    if difference is not None:
        judged = {name: ab.judge(axis, difference, margin) for name, axis in axes.items()}
        axes = {name: axis for name, (axis, _) in judged.items()}
        out["ab"] = _ab_row(difference, blocks, judged, ours[0], base[0])
    try:
        check_throughputs({axis: axes[axis].per_block for axis in THROUGHPUT})
    except ConsistencyError as error:
        out["errors"] = [f"{pair[0]}/{pair[1]}: {error}"]
    out["axes"] = {name: _axis_row(axis, out["withheld"]) for name, axis in axes.items()}
    return out


def _on_gpu(leg: Leg) -> bool:
    return leg.result is not None and leg.result["device"]["kind"] != "cpu"


def _ab_row(
    difference: ab.Difference, diffs: list[LegDiff], judged: dict[str, tuple[Axis, ab.Neutrality | None]], ours: Leg, base: Leg
) -> dict[str, Any]:
    """What an A/B tells beside its axes: the one difference, tokens of each block, each gap beside the noise, false alarms of an A/A."""
    alarms = {name: ab.alarms(axis) if difference.option is None else None for name, (axis, _) in judged.items()}
    return {
        "kind": difference.kind, "option": difference.option, "values": list(difference.values),
        "also_resolved": ab.resolved_unlike(difference, ours, base),
        "blocks": [{"a": d.a, "b": d.b, "identical": d.diff.identical, "of": d.diff.of} for d in diffs],
        "axes": {name: None if noise is None else dataclasses.asdict(noise) for name, (_, noise) in judged.items()},
        "alarms": {name: None if found is None else dataclasses.asdict(found) for name, found in alarms.items()},
    }


def _axis_row(axis: Axis, withheld: list[str]) -> dict[str, Any]:
    """An axis as JSON.  What is withheld keeps its numbers and loses its verdict; what is void stays void."""
    row = dataclasses.asdict(axis)
    row["direction"] = "ours / base, 1 and above passes" if axis.higher_passes else "ours / base, 1 and below passes"
    if withheld and axis.verdict != "VOID":
        row |= {"verdict": "INCONCLUSIVE", "qualifier": None, "reasons": withheld}
    return row


def _token_row(leg_diff: LegDiff) -> dict[str, Any]:
    return {
        "kind": leg_diff.kind, "a": leg_diff.a, "b": leg_diff.b, "arms": list(leg_diff.arms), "gated": leg_diff.gated,
        "identical": leg_diff.diff.identical, "of": leg_diff.diff.of, "lines": describe(leg_diff),
    }


def _occupancy_warnings(series: Series, arms: dict[str, Any]) -> list[str]:
    """Pairs whose arms were not equally full: their whole-run throughputs also compare how the last requests drained."""
    warnings = []
    for ours, base in series.plan["pairs"]:
        a, b = (mean([leg["occupancy"]["mean_in_flight"] for leg in arms[arm]["performance"]]) for arm in (ours, base))
        if a is not None and b is not None and abs(a / b - 1) > OCCUPANCY_TOLERANCE:
            warnings.append(f"{ours}/{base}: mean in flight {a:.2f} against {b:.2f}; the whole-run throughput ratio also compares "
                            "occupancy, so read the steady-window throughput and the latencies beside it")
    return warnings


def _attempt_row(attempt: Any) -> dict[str, Any]:
    return {
        "phase": attempt.phase, "repetition": attempt.repetition if attempt.phase in MEASURED else None, "attempt": attempt.number,
        "status": attempt.record["status"], "reasons": attempt.record["reasons"], "order": attempt.record["order"],
        "legs": {arm: {"status": leg.record["status"], "reasons": leg.record["reasons"]} for arm, leg in attempt.legs.items()},
    }
