"""Latency and throughput of one leg from its traces.  Pure; docs/METRICS.md gives every definition with its source.

Times come in as CLOCK_MONOTONIC nanoseconds and go out as seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy import stats

from legs.protocol import Trace

PERCENTILE_FLOORS = {90: 64, 95: 130, 99: 662}
"""Fewest samples that certify a percentile at 99 % confidence (MLPerf loadgen's rule); below them a percentile is null."""

BOUND_CONFIDENCE = 0.99


@dataclass(frozen=True)
class Gap:
    """The time between two neighbouring deltas of a request, and how many ids the later one brought."""

    seconds: float
    ids: int


@dataclass(frozen=True, kw_only=True)
class RequestMetrics:
    """One request, in seconds.  `tpot` and `worst_gap` are None for a request of one id or one delta: not applicable, never 0."""

    prompt_tokens: int
    output_tokens: int
    ttft: float
    """From submission to the first delta with at least one id."""
    ttft_scheduled: float
    """The same from the moment its slot was free."""
    tpot: float | None
    gaps: tuple[Gap, ...]
    worst_gap: float | None
    e2e: float
    """From submission to the last delta with an id."""


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Samples in seconds summed up: percentiles by linear interpolation between order statistics, null below their floor.

    `p90_upper` and its like are the one-sided 99 % upper bounds of those percentiles (:func:`percentile_bound`).
    """

    n: int
    mean: float
    median: float
    p90: float | None
    p95: float | None
    p99: float | None
    p90_upper: float | None
    p95_upper: float | None
    p99_upper: float | None
    maximum: float


@dataclass(frozen=True, kw_only=True)
class LegMetrics:
    """One leg.  Throughputs are per second of `window`, which runs from the first submission to the last id."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    window: float
    total_throughput: float
    output_throughput: float
    request_throughput: float
    ttft: Distribution
    ttft_scheduled: Distribution
    tpot: Distribution | None
    tpot_by_token: float | None
    """TPOT weighted by tokens: all decode time over all ids after the first."""
    itl: Distribution | None
    """Over ids: a gap of n ids counts as n samples of gap / n."""
    worst_gap: float | None
    e2e: Distribution


def request_metrics(trace: Trace) -> RequestMetrics:
    """The metrics of one request, whose trace has at least one stamp."""
    first, last = trace.stamps[0][0], trace.stamps[-1][0]
    ids = sum(n for _, n in trace.stamps)
    gaps = tuple(Gap(_seconds(t - before), n) for (before, _), (t, n) in pairwise(trace.stamps))
    return RequestMetrics(
        prompt_tokens=trace.prompt_tokens, output_tokens=ids,
        ttft=_seconds(first - trace.submitted_ns), ttft_scheduled=_seconds(first - trace.scheduled_ns),
        tpot=_seconds(last - first) / (ids - 1) if ids >= 2 else None,
        gaps=gaps, worst_gap=max((gap.seconds for gap in gaps), default=None), e2e=_seconds(last - trace.submitted_ns),
    )


def leg_metrics(traces: Sequence[Trace]) -> LegMetrics:
    """The metrics of a leg of at least one request."""
    requests = [request_metrics(trace) for trace in traces]
    window = window_seconds(traces)
    prompts, ids = sum(r.prompt_tokens for r in requests), sum(r.output_tokens for r in requests)
    tpot = [r.tpot for r in requests if r.tpot is not None]
    gaps = [gap for r in requests for gap in r.gaps]
    decoded = sum(gap.ids for gap in gaps)
    following = sum(r.output_tokens - 1 for r in requests)
    return LegMetrics(
        requests=len(requests), prompt_tokens=prompts, output_tokens=ids, window=window,
        total_throughput=(prompts + ids) / window, output_throughput=ids / window, request_throughput=len(requests) / window,
        ttft=distribution([r.ttft for r in requests]), ttft_scheduled=distribution([r.ttft_scheduled for r in requests]),
        tpot=distribution(tpot) if tpot else None,
        tpot_by_token=sum(gap.seconds for gap in gaps) / following if following else None,
        itl=distribution(np.repeat([g.seconds / g.ids for g in gaps], [g.ids for g in gaps]).tolist(), len(gaps)) if decoded else None,
        worst_gap=max((gap.seconds for gap in gaps), default=None), e2e=distribution([r.e2e for r in requests]),
    )


def window_seconds(traces: Sequence[Trace]) -> float:
    """W: from the first submission to the last id of the measured set, in seconds."""
    return _seconds(max(trace.stamps[-1][0] for trace in traces) - min(trace.submitted_ns for trace in traces))


def distribution(samples: Sequence[float], observed: int | None = None) -> Distribution:
    """Sum up at least one sample.

    `observed` is how many were really observed when `samples` repeat some of them: repeats lift no percentile over its floor, and an order
    statistic among them bounds nothing.
    """
    values = np.sort(np.asarray(samples, dtype=np.float64))
    known = len(values) if observed is None else observed

    def percentile(q: int) -> float | None:
        return float(np.percentile(values, q)) if known >= PERCENTILE_FLOORS[q] else None

    def upper(q: int) -> float | None:
        return percentile_bound(values.tolist(), q) if len(values) == known >= PERCENTILE_FLOORS[q] else None

    return Distribution(
        n=len(values), mean=float(values.mean()), median=float(np.median(values)),
        p90=percentile(90), p95=percentile(95), p99=percentile(99), p90_upper=upper(90), p95_upper=upper(95), p99_upper=upper(99),
        maximum=float(values[-1]),
    )


def percentile_bound(ordered: Sequence[float], q: int) -> float | None:
    """The one-sided 99 % upper confidence bound of the `q`-th percentile, from ascending samples; None when there are too few.

    Distribution-free: the k-th order statistic lies at or above the percentile unless k or more of n independent samples fall below it,
    so the smallest k with P(Binomial(n, q / 100) < k) >= 0.99 is taken (Hahn and Meeker, *Statistical Intervals*, order statistics).
    """
    k = int(stats.binom.ppf(BOUND_CONFIDENCE, len(ordered), q / 100)) + 1
    return ordered[k - 1] if k <= len(ordered) else None


def _seconds(ns: int) -> float:
    return ns / 1e9
