"""Intervals by hand, the verdict table, and what must hold for any numbers.  The published figures: test_source_checks.py."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from harness.analysis.ratios import AXES, LATENCY, MEMORY, THROUGHPUT, ConsistencyError, check_throughputs, compare, spread


def test_the_interval_by_hand() -> None:
    found = compare("total_throughput", [110.0, 100.0, 105.0], [100.0, 100.0, 100.0], margin=0.0)
    logs = [math.log(1.1), 0.0, math.log(1.05)]
    mean = sum(logs) / 3
    error = math.sqrt(sum((x - mean) ** 2 for x in logs) / 2 / 3)
    assert found.ratio == pytest.approx(math.exp(mean))
    assert found.interval == pytest.approx((math.exp(mean - 4.302653 * error), math.exp(mean + 4.302653 * error)))
    assert found.lower == pytest.approx(math.exp(mean - 2.919986 * error))
    assert found.upper == pytest.approx(math.exp(mean + 2.919986 * error))
    assert found.detectable == pytest.approx(math.expm1((4.302653 + 1.060660) * error))
    assert found.mean_ours == pytest.approx(105.0)


@pytest.mark.parametrize(
    ("axis", "centre", "verdict", "qualifier"),
    [
        ("total_throughput", 1.05, "PASS", "FASTER"), ("total_throughput", 0.99, "PASS", None), ("total_throughput", 0.95, "FAIL", None),
        ("total_throughput", 0.98, "INCONCLUSIVE", None),
        ("ttft_mean", 0.95, "PASS", "FASTER"), ("ttft_mean", 1.01, "PASS", None), ("ttft_mean", 1.05, "FAIL", None),
        ("ttft_mean", 1 / 0.98, "INCONCLUSIVE", None),
        ("peak_pss", 0.5, "PASS", "SMALLER"), ("peak_pss", 2.0, "FAIL", None),
    ],
)
def test_verdict_table(axis: str, centre: float, verdict: str, qualifier: str | None) -> None:
    found = compare(axis, [centre * k for k in (0.999, 1.0, 1.001)], [1.0] * 3, margin=0.02)
    assert (found.verdict, found.qualifier) == (verdict, qualifier)


def test_a_wide_scatter_is_inconclusive_however_good_its_mean() -> None:
    assert compare("total_throughput", [2.0, 0.9, 1.4], [1.0] * 3, margin=0.02).verdict == "INCONCLUSIVE"


@pytest.mark.parametrize("bad", [None, 0.0, -1.0])
def test_an_unreadable_value_voids_the_axis_and_never_counts_as_zero(bad: float | None) -> None:
    for ours, base in (([1.0, bad], [1.0, 1.0]), ([1.0, 1.0], [1.0, bad])):
        found = compare("peak_pss", ours, base, margin=0.02)
        assert (found.verdict, found.ratio, found.interval) == ("VOID", None, None)
        assert "block 2" in found.reasons[0]


def test_no_block_is_void() -> None:
    assert compare("peak_pss", [], [], margin=0.02).verdict == "VOID"


def test_spread_is_the_range_over_the_mean() -> None:
    assert spread([1.0, 2.0, 6.0]) == pytest.approx(5 / 3)


def test_spread_needs_two_values_and_all_of_them() -> None:
    assert spread([5.0]) is None
    assert spread([5.0, None, 6.0]) is None


def test_unequal_numbers_of_blocks_are_an_error() -> None:
    with pytest.raises(ConsistencyError, match="2 values of one arm, 1 of the other"):
        compare("ttft_mean", [1.0, 2.0], [1.0], margin=0.0)


def test_throughputs_that_disagree_are_an_error() -> None:
    good = {axis: [0.9969123, 1.01] for axis in THROUGHPUT}
    check_throughputs(good)
    check_throughputs({**good, "request_throughput": [0.9969123 * (1 + 1e-10), 1.01]})
    for broken in (0.9969123 * (1 + 1e-8), 0.9970, None):
        with pytest.raises(ConsistencyError, match="block 1"):
            check_throughputs({**good, "request_throughput": [broken, 1.01]})


positive = st.floats(1e-3, 1e6)
blocks = st.lists(st.tuples(positive, positive), min_size=2, max_size=8).map(lambda rows: ([a for a, _ in rows], [b for _, b in rows]))


@given(blocks, st.sampled_from(AXES))
def test_swapping_the_arms_inverts_everything(pair: tuple[list[float], list[float]], axis: str) -> None:
    a, b = compare(axis, pair[0], pair[1], 0.02), compare(axis, pair[1], pair[0], 0.02)
    assert a.ratio is not None and b.ratio is not None and a.interval is not None and b.interval is not None
    assert math.isclose(a.ratio * b.ratio, 1, rel_tol=1e-9)
    assert math.isclose(a.interval[0] * b.interval[1], 1, rel_tol=1e-9)
    assert a.lower is not None and b.upper is not None and math.isclose(a.lower * b.upper, 1, rel_tol=1e-9)
    assert (a.spread_ours, a.mean_ours) == (b.spread_base, b.mean_base)
    assert math.isclose(a.detectable or 0, b.detectable or 0, rel_tol=1e-6, abs_tol=1e-9)


@given(blocks)
def test_the_bounds_lie_in_order(pair: tuple[list[float], list[float]]) -> None:
    found = compare("total_throughput", *pair, 0.02)
    assert found.interval is not None and found.lower is not None and found.upper is not None and found.ratio is not None
    assert found.interval[0] <= found.lower <= found.ratio * (1 + 1e-12)
    assert found.ratio <= found.upper * (1 + 1e-12) and found.upper <= found.interval[1]


@given(blocks, st.floats(0, 0.5))
def test_a_cost_axis_judges_as_the_inverse_throughput_does(pair: tuple[list[float], list[float]], margin: float) -> None:
    """One rule on the normalized ratio: time per token and tokens per time must never get different verdicts."""
    time = compare("tpot_mean", pair[0], pair[1], margin)
    rate = compare("total_throughput", [1 / x for x in pair[0]], [1 / x for x in pair[1]], margin)
    assert time.lower is not None and time.upper is not None
    assume(all(abs(bound - 1 / (1 - margin)) > 1e-9 and abs(bound - 1) > 1e-9 for bound in (time.lower, time.upper)))
    assert (time.verdict, time.qualifier) == (rate.verdict, rate.qualifier)
    assert time.normalized is not None and rate.normalized is not None and math.isclose(time.normalized, rate.normalized, rel_tol=1e-9)


@given(blocks, st.floats(0.01, 100))
def test_units_do_not_matter(pair: tuple[list[float], list[float]], scale: float) -> None:
    a = compare("e2e_mean", *pair, 0.02)
    b = compare("e2e_mean", [scale * x for x in pair[0]], [scale * x for x in pair[1]], 0.02)
    assert a.ratio is not None and b.ratio is not None and math.isclose(a.ratio, b.ratio, rel_tol=1e-9)


def test_false_verdicts_are_as_rare_as_they_claim() -> None:
    """At a true ratio just on the floor, PASS and FAIL each come up in about 5 % of series: the exact binomial test allows 0.1 %."""
    rng = random.Random(7)
    passed = failed = 0
    runs = 2000
    for _ in range(runs):
        ours = [0.98 * math.exp(rng.gauss(0, 0.01)) for _ in range(5)]
        verdict = compare("total_throughput", ours, [1.0] * 5, 0.02).verdict
        passed += verdict == "PASS"
        failed += verdict == "FAIL"
    for count in (passed, failed):
        assert stats.binomtest(count, runs, 0.05).pvalue > 0.001


def test_the_detectable_effect_is_seen_four_times_in_five() -> None:
    """Two-sided at 5 %: an effect of the mean `detectable` is found in about 80 % of series; the approximation may be off by 7."""
    rng = random.Random(11)
    sizes = [compare("total_throughput", [math.exp(rng.gauss(0, 0.01)) for _ in range(6)], [1.0] * 6, 0.0).detectable for _ in range(500)]
    effect = sum(size for size in sizes if size is not None) / len(sizes)
    seen = 0
    for _ in range(1000):
        interval = compare("total_throughput", [(1 + effect) * math.exp(rng.gauss(0, 0.01)) for _ in range(6)], [1.0] * 6, 0.0).interval
        assert interval is not None
        seen += interval[0] > 1
    assert 0.73 < seen / 1000 < 0.87


def test_the_axes_are_all_there() -> None:
    assert set(AXES) == set(THROUGHPUT) | set(LATENCY) | set(MEMORY) and len(AXES) == 10
