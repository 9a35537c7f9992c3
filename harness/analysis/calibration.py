"""What the series of a calibration showed: for each fault that was injected, whether it got exactly its verdict.  Pure.

The rules are fixed before anything runs; docs/METRICS.md states them.  A fault that did not fire, or whose size cannot be read, is not as
expected, whatever the verdict: nothing was shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from harness.analysis.ab import Difference, judge
from harness.analysis.coverage import COVERAGE_FLOOR, Share, coverage, sentence
from harness.analysis.metrics import window_seconds
from harness.analysis.ratios import Axis, compare, log_bounds
from harness.analysis.summary import axis_values
from harness.evidence.schema import EvidenceError, Series

SCHEMA = 1
PRIMARY, TAIL, MEMORY = "total_throughput", "itl_p99", "peak_pss"
MUST_SEE = 0.09
"""A slowdown of this true size fails, whatever the noise: an instrument that misses it is of no use."""
WINDOW = 3
"""Blocks of one interval when coverage is counted: as many as a small series has."""
INTERVALS_MIN = 40
FIRED = 0.8
"""Of the size that was asked for: what must really have been injected."""
COMPANY = "parity-company"
"""The name of the foreign process as the kernel has it (harness/leg/company.py)."""
MIB = 2**20


class Evidence(NamedTuple):
    """One series of a calibration and its summary."""

    series: Series
    summary: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table."""

    case: str
    injected: str
    measured: str
    expected: str
    got: str
    ok: bool


@dataclass(frozen=True, kw_only=True)
class Slowdown:
    """An injected slowdown: sizes are shares of the measured time, `true` as the arm counted it, `measured` 1 - ratio."""

    arm: str
    asked: float
    true: float
    measured: float
    interval: tuple[float, float]
    """Of the ratio, two-sided, 95 %."""
    seen: bool
    """The interval lies below 1."""
    verdict: str


class Unfit(Exception):
    """A series gives no numbers to judge a case by; the message says why."""


def judge_calibration(evidence: Mapping[str, Evidence]) -> dict[str, Any]:
    """The record of a calibration as JSON, from its series by name.  Raises :class:`EvidenceError` when they are of different machines."""
    hosts = {name: one.series.record["machine"]["host"] for name, one in evidence.items()}
    if len(set(hosts.values())) != 1:
        raise EvidenceError(f"the series of one calibration ran on different machines or boots: {hosts}; calibrate anew")
    cases: list[Case] = []
    times = evidence["times"]
    try:
        healthy = compare_arms(times, PRIMARY, *healthy_arms(times.series)[1::-1])
        slow = slowdowns(times)
        held = held_intervals(times)
    except Unfit as unfit:
        healthy, slow, held = None, [], None
        cases.append(Case(case="slowdowns", injected="busy waits", measured="nothing", expected="numbers", got=str(unfit), ok=False))
    detectable = healthy.detectable if healthy is not None else None
    if healthy is not None:
        cases += [_healthy(healthy, times), *(_slowdown(one, detectable, _margin(times)) for one in slow), _coverage(held)]
    for name, rule in RULES.items():
        try:
            cases.append(rule(evidence[name]))
        except Unfit as unfit:
            cases.append(Case(case=name, injected="yes", measured="nothing", expected="numbers", got=str(unfit), ok=False))
    return {
        "schema": SCHEMA, "machine": times.series.record["machine"], "repository": times.series.record["repository"],
        "started_utc": times.summary["started_utc"], "series": {name: one.series.head for name, one in evidence.items()},
        "axis": PRIMARY, "detectable": detectable, "blocks": len(healthy.per_block) if healthy is not None else 0,
        "slowdowns": [asdict(one) for one in slow], "coverage": None if held is None else asdict(held), "window": WINDOW,
        "cases": [asdict(case) for case in cases], "ok": all(case.ok for case in cases),
    }


def fault_of(series: Series, arm: str) -> dict[str, Any]:
    """The fault that the plan gives an arm; empty for a healthy one."""
    options = next(entry["options"] for entry in series.plan["arms"] if entry["name"] == arm)
    return dict(options.get("inject") or {})


def healthy_arms(series: Series) -> list[str]:
    return [arm for arm in series.arms if not fault_of(series, arm)]


def faulty_arm(series: Series) -> str:
    return next(arm for arm in series.arms if fault_of(series, arm))


def compare_arms(one: Evidence, axis: str, ours: str, base: str) -> Axis:
    """An axis of two arms over all blocks, by the rule of any series.  Raises :class:`Unfit` without an interval."""
    if one.summary["exit_code"] > 2 or one.summary["contention"]["contended"]:
        raise Unfit(_said(one))
    withheld = [reason for pair in one.summary["pairs"] if {pair["ours"], pair["base"]} == {ours, base} for reason in pair["withheld"]]
    if withheld:
        raise Unfit(withheld[0])
    arms = one.summary["arms"]
    found = compare(axis, _values(arms[ours], axis), _values(arms[base], axis), _margin(one))
    if found.interval is None:
        raise Unfit(found.reasons[0])
    return found


def injected_shares(series: Series, arm: str) -> list[float]:
    """Block by block the true size of a slowdown: injected over measured seconds.  Raises :class:`Unfit` when an arm does not tell."""
    shares = []
    for leg in (leg for leg in series.legs(arm) if leg.phase == "performance"):
        ns = leg.result["counters"].get("injected_ns") if leg.result else None
        if ns is None:
            raise Unfit(f"{leg.name}: field `counters.injected_ns` is {ns!r}: what was injected cannot be read")
        shares.append(ns / 1e9 / window_seconds(leg.traces))
    return shares


def slowdowns(one: Evidence) -> list[Slowdown]:
    """Every arm with a busy wait against the first healthy arm."""
    base = healthy_arms(one.series)[0]
    found = []
    for arm in one.series.arms:
        if (asked := fault_of(one.series, arm).get("busy")) is None:
            continue
        axis = compare_arms(one, PRIMARY, arm, base)
        assert axis.ratio is not None and axis.interval is not None
        true = -math.expm1(float(np.mean(np.log1p([-share for share in injected_shares(one.series, arm)]))))
        found.append(Slowdown(arm=arm, asked=asked, true=true, measured=1 - axis.ratio, interval=axis.interval,
                              seen=axis.interval[1] < 1, verdict=axis.verdict))
    return found


def held_intervals(one: Evidence) -> Share:
    """Of all intervals over :data:`WINDOW` neighbouring blocks, of every slowed arm against every healthy one: how many hold the truth."""
    intervals, truths = [], []
    for arm in (arm for arm in one.series.arms if "busy" in fault_of(one.series, arm)):
        true = np.log1p([-share for share in injected_shares(one.series, arm)])
        for base in healthy_arms(one.series):
            ratios = compare_arms(one, PRIMARY, arm, base).per_block
            logs = np.log([ratio for ratio in ratios if ratio is not None])
            for start in range(len(logs) - WINDOW + 1):
                bounds = log_bounds(logs[start: start + WINDOW])
                intervals.append((float(bounds.interval_low), float(bounds.interval_high)))
                truths.append(float(true[start: start + WINDOW].mean()))
    if not intervals:
        raise Unfit(f"fewer than {WINDOW} blocks: no interval")
    return coverage(intervals, truths)


def _healthy(axis: Axis, one: Evidence) -> Case:
    judged, _ = judge(axis, Difference(option=None, values=(None, None)), _margin(one))
    return Case(case="A/A", injected="nothing", measured=_change(axis), expected="no FAIL", got=judged.verdict,
                ok=judged.verdict in ("PASS", "INCONCLUSIVE"))


def _slowdown(one: Slowdown, detectable: float | None, margin: float) -> Case:
    """Beyond the margin by more than the instrument sees, FAIL; beyond it by less, never PASS; within it, never FAIL."""
    if one.true <= margin:
        expected: tuple[str, ...] = ("PASS", "INCONCLUSIVE")
    elif one.true >= MUST_SEE or (detectable is not None and one.true > margin + detectable):
        expected = ("FAIL",)
    else:
        expected = ("FAIL", "INCONCLUSIVE")
    low, high = (1 - bound for bound in reversed(one.interval))
    return Case(case=f"busy wait, {100 * one.asked:g} %", injected=f"{100 * one.true:.2f} % of the time",
                measured=f"{100 * one.measured:.2f} % ({100 * low:.2f} to {100 * high:.2f})", expected=" or ".join(expected),
                got=f"{one.verdict}, {'seen' if one.seen else 'not seen'}",
                ok=one.verdict in expected and one.true >= FIRED * one.asked)


def _coverage(held: Share | None) -> Case:
    assert held is not None
    return Case(case=f"intervals of {WINDOW} blocks", injected="the slowdowns above", measured=sentence(held, "hold the true size"),
                expected=f"{COVERAGE_FLOOR:.0%} or more of {INTERVALS_MIN} or more", got=f"{held.value:.1%} of {held.n}",
                ok=held.n >= INTERVALS_MIN and held.value >= COVERAGE_FLOOR)


def _tail(one: Evidence) -> Case:
    arm, base = faulty_arm(one.series), healthy_arms(one.series)[0]
    tail, whole = compare_arms(one, TAIL, arm, base), compare_arms(one, PRIMARY, arm, base)
    true = float(np.mean(injected_shares(one.series, arm)))
    return Case(case="tail stall", injected=f"{100 * true:.2f} % of the time, in {fault_of(one.series, arm)['stall']} steps a leg",
                measured=f"ITL p99 {_change(tail)}; throughput {_change(whole)}", expected="FAIL on ITL p99, no FAIL on throughput",
                got=f"{tail.verdict} on ITL p99, {whole.verdict} on throughput",
                ok=tail.verdict == "FAIL" and whole.verdict != "FAIL" and 0 < true <= _margin(one))


def _leak(one: Evidence) -> Case:
    arm, base = faulty_arm(one.series), healthy_arms(one.series)[0]
    axis = compare_arms(one, MEMORY, arm, base)
    assert axis.mean_ours is not None and axis.mean_base is not None
    return Case(case="leak", injected=f"{fault_of(one.series, arm)['leak_mib']} MiB",
                measured=f"peak PSS {(axis.mean_ours - axis.mean_base) / MIB:+.1f} MiB ({_change(axis)})", expected="FAIL on peak PSS",
                got=f"{axis.verdict} on peak PSS", ok=axis.verdict == "FAIL")


def _token(one: Evidence) -> Case:
    return _by_reason(one, "wrong token", "one id of one request", "INCONCLUSIVE", "OUTPUT CHANGED")


def _count(one: Evidence) -> Case:
    wanted = one.series.plan["workload"]["output_tokens"]
    claimed = wanted * fault_of(one.series, faulty_arm(one.series))["copies"]
    return _by_reason(one, "doubled count", f"{claimed} tokens claimed for {wanted}", "ERROR",
                      f"output_tokens: result.json counted {claimed}, the plan says {wanted}")


def _killed(one: Evidence) -> Case:
    return _by_reason(one, "killed arm", "SIGKILL in the measured window", "ERROR", "the arm exited with -9")


def _foreign(one: Evidence) -> Case:
    return _by_reason(one, "foreign process", "a busy loop beside the measured window", "VOID", "foreign cpu: ", f"({COMPANY}: ")


RULES: dict[str, Callable[[Evidence], Case]] = {
    "tail": _tail, "leak": _leak, "token": _token, "count": _count, "killed": _killed, "foreign": _foreign,
}
"""The cases that have a series of their own, by its name."""
SERIES = ("times", *RULES)
"""The series of a calibration, in the order they run."""


def _by_reason(one: Evidence, case: str, injected: str, verdict: str, *parts: str) -> Case:
    """A case that is told by the series' verdict and a reason that holds all `parts`."""
    reasons = [*one.summary["reasons"]]
    told = next((reason for reason in reasons if all(part in reason for part in parts)), None)
    return Case(case=case, injected=injected, measured=told or _said(one), expected=f"{verdict}: {' '.join(parts).strip()}",
                got=one.summary["verdict"], ok=one.summary["verdict"] == verdict and told is not None)


def _values(arm: Mapping[str, Any], axis: str) -> Sequence[float | None]:
    if axis == TAIL:
        return [leg["itl"]["p99"] if leg["itl"] is not None else None for leg in arm["performance"]]
    return axis_values(dict(arm), axis)


def _margin(one: Evidence) -> float:
    return float(one.series.plan["verdict"]["margin"])


def _change(axis: Axis) -> str:
    assert axis.ratio is not None and axis.interval is not None
    low, high = axis.interval
    return f"{100 * (axis.ratio - 1):+.2f} % ({100 * (low - 1):+.2f} to {100 * (high - 1):+.2f})"


def _said(one: Evidence) -> str:
    return f"{one.summary['verdict']}: {'; '.join([*one.summary['reasons'], *one.summary['contention']['lines']]) or 'no reason given'}"
