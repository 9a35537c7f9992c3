"""How often verdicts are false, on 10,000 synthetic series of each kind of noise; and k of n with its bound."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from harness.analysis.ab import neutrality
from harness.analysis.coverage import COVERAGE_FLOOR, coverage, false_alarms, sentence, share
from harness.analysis.ratios import compare, log_bounds

SERIES = 10_000
NOISE = 0.01
"""Scale of the noise of one leg, in log units."""


def heavy_tails(rng: np.random.Generator, blocks: int) -> np.ndarray:
    """Logs of both arms, shape [series, blocks, 2]: Student's t with three degrees of freedom."""
    return NOISE * rng.standard_t(3, (SERIES, blocks, 2))


def drift(rng: np.random.Generator, blocks: int) -> np.ndarray:
    """A machine that slows by some per cent a series and wanders as much: legs one after the other, arms in flipped order."""
    steps = rng.normal(0, NOISE, (SERIES, 2 * blocks)) + rng.normal(0, NOISE, (SERIES, 1))
    path = np.cumsum(steps, axis=1).reshape(SERIES, blocks, 2)
    path[:, 1::2] = path[:, 1::2, ::-1]
    return path + rng.normal(0, NOISE, path.shape)


def two_modes(rng: np.random.Generator, blocks: int) -> np.ndarray:
    """Each process has its luck: three in ten are slower by three times the noise."""
    return 3 * NOISE * (rng.random((SERIES, blocks, 2)) < 0.3) + rng.normal(0, NOISE, (SERIES, blocks, 2))


KINDS = [heavy_tails, drift, two_modes]


@pytest.mark.parametrize("blocks", [3, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_false_alarms_are_as_rare_as_they_claim(kind: object, blocks: int) -> None:
    """Between 3 and 7 % at nominal 5: of a difference where none is, of a PASS and of a FAIL with the true ratio just on the floor."""
    arms = kind(np.random.default_rng(20260101), blocks)  # type: ignore[operator]
    found = log_bounds(arms[..., 0] - arms[..., 1])
    assert 0.03 < np.mean((found.interval_low > 0) | (found.interval_high < 0)) < 0.07, "differs from 1"
    assert 0.03 < np.mean(found.lower > 0) < 0.07, "PASS"
    assert 0.03 < np.mean(found.upper < 0) < 0.07, "FAIL"


@pytest.mark.parametrize("kind", KINDS)
def test_the_verdict_is_made_of_those_bounds(kind: object) -> None:
    """The same series one by one, through the verdict itself: a true ratio on the floor passes and fails as often as the bounds say."""
    arms = kind(np.random.default_rng(5), 5)[:500]  # type: ignore[operator]
    floor = 0.98
    found = log_bounds(arms[..., 0] - arms[..., 1])
    for axis, sign in (("total_throughput", 1), ("tpot_mean", -1)):
        verdicts = [compare(axis, (floor**sign * np.exp(sign * one[:, 0])).tolist(), np.exp(sign * one[:, 1]).tolist(), 1 - floor).verdict
                    for one in arms]
        assert [verdict == "PASS" for verdict in verdicts] == (found.lower > 0).tolist()
        assert [verdict == "FAIL" for verdict in verdicts] == (found.upper < 0).tolist()


@pytest.mark.parametrize("side", [1, -1])
@pytest.mark.parametrize("kind", KINDS)
def test_equivalence_is_as_rarely_wrong(kind: object, side: int) -> None:
    """With the true ratio on either edge of a wide margin, EQUIVALENT comes up in 3 to 7 % of series, and is said by those bounds."""
    edge = 0.2
    arms = kind(np.random.default_rng(8), 5)  # type: ignore[operator]
    ratios = np.exp(arms[..., 0] - arms[..., 1] - side * np.log1p(-edge))
    found = log_bounds(np.log(ratios))
    equivalent = (found.lower > np.log1p(-edge)) & (found.upper < -np.log1p(-edge))
    assert 0.03 < equivalent.mean() < 0.07
    said = [neutrality(compare("tpot_mean", one.tolist(), [1.0] * 5, edge), edge) for one in ratios[:300]]
    assert [noise is not None and noise.equivalent for noise in said] == equivalent[:300].tolist()


@pytest.mark.parametrize("blocks", [3, 5])
def test_without_pairing_drift_would_alarm(blocks: int) -> None:
    """What the order flip and the pairing are for: run one arm after the other and compare means, and the machine's drift is an effect."""
    rng = np.random.default_rng(3)
    path = np.cumsum(rng.normal(0, NOISE, (SERIES, 2 * blocks)), axis=1)
    first, second = path[:, :blocks], path[:, blocks:]
    alarms = stats.ttest_ind(first, second, axis=1).pvalue < 0.05
    assert alarms.mean() > 0.2


def test_clopper_and_pearson_by_hand() -> None:
    """k = 0 of n: the upper bound is 1 - (alpha / 2)^(1 / n); k = n mirrors it.  9 of 10 from the published table: 0.555 to 0.9975."""
    none, all_, most = share(0, 20), share(20, 20), share(9, 10)
    assert (none.lower, none.upper) == (0.0, pytest.approx(1 - 0.025 ** (1 / 20)))
    assert (all_.lower, all_.upper) == (pytest.approx(0.025 ** (1 / 20)), 1.0)
    assert (round(most.lower, 3), round(most.upper, 4)) == (0.555, 0.9975)
    assert sentence(none, "intervals leave out 1") == "0 of 20 intervals leave out 1 (0.0%; the true share lies between 0.0% and 16.8%)"


@pytest.mark.parametrize(("k", "n"), [(0, 0), (3, 2), (-1, 5)])
def test_no_share_of_nothing(k: int, n: int) -> None:
    with pytest.raises(ValueError, match=f"{k} of {n} is no share"):
        share(k, n)


def test_coverage_counts_intervals_that_hold_the_truth() -> None:
    found = coverage([(0.9, 1.1), (0.9, 0.95), (1.0, 1.2)], [1.0, 1.0, 1.0])
    assert (found.k, found.n) == (2, 3) and found.value < COVERAGE_FLOOR
    with pytest.raises(ValueError, match="zip"):
        coverage([(0.9, 1.1)], [])
    with pytest.raises(ValueError, match="0 of 0"):
        coverage([], [])


def test_false_alarms_of_an_aa() -> None:
    quiet, loud = [1.01, 0.99, 1.0], [1.01, 1.011, 1.012]
    found = false_alarms([*quiet, *loud, *quiet, 5.0], 3)
    assert (found.k, found.n) == (1, 3), "the tenth block is in no group"
    below = [1 / ratio for ratio in loud]
    assert false_alarms(below, 3).k == 1, "a ratio below 1 alarms as one above does"
    for blocks in (1, 4):
        with pytest.raises(ValueError, match=f"3 blocks make no group of {blocks}"):
            false_alarms(quiet, blocks)


def test_the_share_of_alarms_of_equal_arms_is_nominal() -> None:
    rng = np.random.default_rng(9)
    found = false_alarms(np.exp(rng.normal(0, NOISE, 5 * 2000)).tolist(), 5)
    assert found.lower < 0.05 < found.upper
