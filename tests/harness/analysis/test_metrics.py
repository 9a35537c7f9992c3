"""Every metric against hand-made stamps, and its identities over random ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.analysis.metrics import PERCENTILE_FLOORS, distribution, leg_metrics, percentile_bound, request_metrics
from legs.protocol import Trace

MS = 1_000_000


def trace(stamps: list[tuple[int, int]], submitted: int = 0, scheduled: int = 0, prompt: int = 10, index: int = 0) -> Trace:
    """A trace whose times are given in milliseconds."""
    shifted = tuple((t * MS, n) for t, n in stamps)
    return Trace(index=index, prompt_tokens=prompt, scheduled_ns=scheduled * MS, submitted_ns=submitted * MS, stamps=shifted,
                 end_ns=shifted[-1][0], finish="length")


def test_one_request_by_hand() -> None:
    found = request_metrics(trace([(30, 1), (40, 1), (70, 2)], submitted=10, scheduled=5))
    assert found.ttft == pytest.approx(0.020)
    assert found.ttft_scheduled == pytest.approx(0.025)
    assert found.e2e == pytest.approx(0.060)
    assert found.output_tokens == 4
    assert found.tpot == pytest.approx(0.040 / 3)
    assert [(gap.seconds, gap.ids) for gap in found.gaps] == [(pytest.approx(0.010), 1), (pytest.approx(0.030), 2)]
    assert found.worst_gap == pytest.approx(0.030)


def test_a_single_id_has_no_tpot_and_no_gap() -> None:
    found = request_metrics(trace([(30, 1)]))
    assert (found.tpot, found.worst_gap, found.gaps) == (None, None, ())
    leg = leg_metrics([trace([(30, 1)])])
    assert (leg.tpot, leg.itl, leg.tpot_by_token, leg.worst_gap) == (None, None, None, None)


def test_a_single_id_is_left_out_of_the_mean_and_is_not_zero() -> None:
    leg = leg_metrics([trace([(30, 1)]), trace([(30, 1), (50, 1)], index=1)])
    assert leg.tpot is not None and (leg.tpot.n, leg.tpot.mean) == (1, pytest.approx(0.020))


def test_one_leg_by_hand() -> None:
    early, late = trace([(20, 1), (30, 1)], submitted=10, scheduled=5), trace([(40, 1), (110, 1)], submitted=20, scheduled=20, index=1)
    leg = leg_metrics([early, late])
    assert leg.window == pytest.approx(0.100)  # first submission at 10 ms, last id at 110 ms
    assert leg.total_throughput == pytest.approx(24 / 0.1)
    assert leg.output_throughput == pytest.approx(4 / 0.1)
    assert leg.request_throughput == pytest.approx(2 / 0.1)
    assert leg.ttft.mean == pytest.approx(0.015)
    assert leg.ttft_scheduled.mean == pytest.approx(0.0175)
    assert leg.tpot is not None and leg.tpot.mean == pytest.approx(0.040)
    assert leg.tpot_by_token == pytest.approx(0.080 / 2)
    assert leg.e2e.mean == pytest.approx(0.055)
    assert leg.worst_gap == pytest.approx(0.070)


def test_tpot_weights_requests_equally_and_says_the_other_weighting_beside_it() -> None:
    leg = leg_metrics([trace([(10, 1), (20, 1)]), trace([(10, 1), *((10 + 2 * i, 1) for i in range(1, 10))], index=1)])
    assert leg.tpot is not None and leg.tpot.mean == pytest.approx((0.010 + 0.002) / 2)
    assert leg.tpot_by_token == pytest.approx((0.010 + 0.018) / 10)


def test_itl_counts_a_gap_once_for_each_id_it_brought() -> None:
    leg = leg_metrics([trace([(10, 1), (40, 3), (60, 1)])])
    assert leg.itl is not None
    assert (leg.itl.n, leg.itl.median, leg.itl.mean) == (4, pytest.approx(0.010), pytest.approx(0.0125))


@pytest.mark.parametrize(("q", "floor"), PERCENTILE_FLOORS.items())
def test_percentiles_are_null_below_their_floor(q: int, floor: int) -> None:
    assert getattr(distribution([1.0] * (floor - 1)), f"p{q}") is None
    assert getattr(distribution([1.0] * floor), f"p{q}") == 1.0


def test_percentiles_interpolate() -> None:
    assert distribution([float(i) for i in range(101)]).p90 == pytest.approx(90.0)
    assert distribution([float(i) for i in range(1, 65)]).p90 == pytest.approx(57.7)


@pytest.mark.parametrize(("q", "n"), [(90, 64), (90, 128), (95, 130), (95, 700), (99, 662), (99, 900)])
def test_the_bound_is_the_order_statistic_that_the_binomial_names(q: int, n: int) -> None:
    """Of n samples, each below the percentile with chance q %, fewer than k are so 99 times in 100; for the next smaller k they are not."""
    def fewer(than: int) -> float:
        return sum(math.comb(n, i) * (q / 100) ** i * (1 - q / 100) ** (n - i) for i in range(than))

    bound = percentile_bound([float(i) for i in range(1, n + 1)], q)
    assert bound is not None and fewer(int(bound)) >= 0.99 > fewer(int(bound) - 1)


@pytest.mark.parametrize(("q", "least"), [(90, 44), (95, 90), (99, 459)])
def test_too_few_samples_bound_nothing(q: int, least: int) -> None:
    """With all n samples below the percentile at a chance of 1 % or more, not even the largest is above it."""
    assert percentile_bound([1.0] * (least - 1), q) is None and percentile_bound([1.0] * least, q) == 1.0


def test_the_bound_holds_in_99_series_of_100() -> None:
    rng = np.random.default_rng(7)
    bounds = [distribution(rng.exponential(size=200).tolist()).p90_upper for _ in range(2000)]
    held = sum(bound is not None and bound >= -math.log(0.1) for bound in bounds)
    assert 0.985 < held / 2000 <= 1.0


@pytest.mark.parametrize(("q", "floor"), PERCENTILE_FLOORS.items())
def test_a_bound_stands_beside_every_percentile_and_beside_no_null(q: int, floor: int) -> None:
    below, at = distribution([1.0] * (floor - 1)), distribution([float(i) for i in range(floor)])
    assert getattr(below, f"p{q}_upper") is None
    assert getattr(at, f"p{q}_upper") > getattr(at, f"p{q}")


def test_samples_that_repeat_one_observation_lift_no_percentile_over_its_floor() -> None:
    leg = leg_metrics([trace([(10 * (i + 1), 4) for i in range(40)])])  # 39 gaps of 4 ids: 156 samples, 39 observations
    assert leg.itl is not None and leg.itl.n == 156
    assert (leg.itl.p90, leg.itl.p95, leg.itl.p90_upper) == (None, None, None)
    enough = leg_metrics([trace([(10 * (i + 1), 4) for i in range(65)])])
    assert enough.itl is not None and enough.itl.p90 is not None and enough.itl.p90_upper is None


@st.composite
def traces(draw: st.DrawFn) -> list[Trace]:
    found = []
    for index in range(draw(st.integers(1, 6))):
        scheduled = draw(st.integers(0, 10**6))
        submitted = scheduled + draw(st.integers(0, 1000))
        steps = draw(st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 4)), min_size=1, max_size=12))
        t, stamps = submitted, []
        for step, ids in steps:
            t += step
            stamps.append((t, ids))
        found.append(Trace(index=index, prompt_tokens=draw(st.integers(1, 50)), scheduled_ns=scheduled, submitted_ns=submitted,
                           stamps=tuple(stamps), end_ns=t, finish="length"))
    return found


@given(traces())
def test_latency_adds_up(found: list[Trace]) -> None:
    for metrics in map(request_metrics, found):
        if metrics.tpot is not None:
            assert math.isclose(metrics.e2e, metrics.ttft + metrics.tpot * (metrics.output_tokens - 1), rel_tol=1e-9)
        assert math.isclose(metrics.e2e, metrics.ttft + sum(gap.seconds for gap in metrics.gaps), rel_tol=1e-9)
        assert metrics.ttft_scheduled >= metrics.ttft > 0


@given(traces())
def test_throughputs_are_counts_over_one_window(found: list[Trace]) -> None:
    leg = leg_metrics(found)
    assert math.isclose(leg.total_throughput * leg.window, leg.prompt_tokens + leg.output_tokens, rel_tol=1e-9)
    assert math.isclose(leg.output_throughput / leg.request_throughput, leg.output_tokens / leg.requests, rel_tol=1e-9)
    if leg.itl is not None:
        assert leg.itl.n == sum(n for t in found for _, n in t.stamps[1:])


@given(traces(), st.integers(2, 9))
def test_a_slower_clock_scales_every_latency(found: list[Trace], k: int) -> None:
    slow = [Trace(index=t.index, prompt_tokens=t.prompt_tokens, scheduled_ns=k * t.scheduled_ns, submitted_ns=k * t.submitted_ns,
                  stamps=tuple((k * s, n) for s, n in t.stamps), end_ns=k * t.end_ns, finish=t.finish) for t in found]
    a, b = leg_metrics(found), leg_metrics(slow)
    assert math.isclose(b.ttft.mean, k * a.ttft.mean, rel_tol=1e-9)
    assert math.isclose(b.e2e.median, k * a.e2e.median, rel_tol=1e-9)
    assert math.isclose(b.total_throughput, a.total_throughput / k, rel_tol=1e-9)
