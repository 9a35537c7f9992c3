"""The near-tie rule on scores written by hand, each figure worked out beside it."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest

from harness.analysis import near_tie
from harness.analysis.near_tie import Mask, NearTieError, band_of, check_control, jitter, judge, void_reasons, worst_gap
from legs.protocol import Scored, anchor

PROMPT = (7, 8, 9)
NONE = Mask(ids=frozenset(), until=0)


def scored(ids: list[int], rows: list[dict[int, float]], own: list[float] | None = None, prompt: tuple[int, ...] = PROMPT) -> Scored:
    """Scores of `ids` whose positions name `rows`; `own` where an id is not among them."""
    return Scored(
        anchor=anchor(prompt, ids), ids=tuple(ids), logprobs=tuple(own or [row[token] for token, row in zip(ids, rows, strict=True)]),
        top=tuple(tuple(sorted(row.items(), key=lambda pair: -pair[1])) for row in rows))


ROWS = [{1: -0.1, 2: -3.0}, {3: -0.70, 4: -0.7004, 5: -4.0}, {6: -0.2, 7: -0.2003}]


def label(ours: list[int], theirs: list[int], band: float, mask: Mask = NONE, rows: list[dict[int, float]] = ROWS) -> near_tie.Judgement:
    return judge([PROMPT], [ours], [theirs], [scored(ours, rows)], band, mask)[0]


def test_equal_ids_are_identical_whatever_the_gap() -> None:
    found = label([2, 3, 6], [2, 3, 6], 0.0)
    assert (found.label, found.position, found.gap) == ("identical", None, None)
    assert found.worst_gap == pytest.approx(2.9) and found.worst_position == 0


def test_a_gap_inside_the_band_is_a_near_tie_at_its_first_divergence() -> None:
    """-0.70 - -0.7004 = 4e-4 at position 1; later positions are in our own context and judged against their best: 3e-4."""
    found = label([1, 4, 7], [1, 3, 6], 0.0005)
    assert (found.label, found.position, found.ours, found.oracle) == ("near-tie", 1, 4, 3)
    assert found.gap == pytest.approx(4e-4)
    assert found.worst_gap == pytest.approx(4e-4) and found.worst_position == 1


def test_a_gap_outside_the_band_is_wrong() -> None:
    assert label([1, 4, 6], [1, 3, 6], 0.0003).label == "wrong"
    assert label([2, 3, 6], [1, 3, 6], 0.0005).label == "wrong"


def test_a_fault_after_a_near_tie_is_wrong() -> None:
    """The divergence itself is a tie; only our whole sequence shows the fault two ids later."""
    rows = [*ROWS[:2], {6: -0.2, 7: -1.4}]
    found = label([1, 4, 7], [1, 3, 6], 0.0005, rows=rows)
    assert (found.label, found.position, found.worst_position) == ("wrong", 1, 2)
    assert found.gap == pytest.approx(4e-4) and found.worst_gap == pytest.approx(1.2)


def test_with_a_band_of_zero_only_identity_passes() -> None:
    rows = [{1: -0.5, 2: -0.5}]
    assert label([2], [1], 0.0, rows=rows).label == "wrong"
    assert label([2], [1], 1e-9, rows=rows).label == "near-tie"
    assert label([1], [1], 0.0, rows=rows).label == "identical"


def test_an_id_that_the_oracle_does_not_name_is_wrong() -> None:
    """The oracle's own id is not among its likeliest in our context."""
    found = judge([PROMPT], [[1]], [[9]], [scored([1], [{1: -0.1, 2: -3.0}])], 5.0, NONE)[0]
    assert (found.label, found.gap) == ("wrong", None)


def test_an_id_outside_the_likeliest_keeps_its_gap() -> None:
    """Our id 9 at -8, the best at -0.1."""
    found = judge([PROMPT], [[9]], [[1]], [scored([9], [{1: -0.1, 2: -3.0}], own=[-8.0])], 0.5, NONE)[0]
    assert found.label == "wrong" and found.gap == pytest.approx(7.9) and found.worst_gap == pytest.approx(7.9)


def test_masked_ids_are_no_best_id_until_they_may_be_chosen() -> None:
    """Id 2 ends the sequence: masked before two ids are out, so only at position 2 does it make a gap."""
    mask = Mask(ids=frozenset({2}), until=2)
    rows = [{2: -0.1, 1: -3.0}, {2: -0.1, 3: -3.0}, {2: -0.1, 6: -3.0}]
    assert worst_gap(scored([1, 3, 6], rows), mask) == (pytest.approx(2.9), 2)
    assert worst_gap(scored([1, 3], rows[:2]), mask)[0] == 0.0
    assert worst_gap(scored([1, 2], rows[:2]), mask) == (None, 1), "a masked id that came out is no tie"
    assert label([1, 2], [1, 3], 9.0, mask, rows[:2]).label == "wrong"


def test_scores_are_bound_to_our_exact_ids_and_prompt() -> None:
    mine = scored([1, 4, 7], ROWS)
    for ours, scores, prompt in (
        ([1, 4, 6], mine, PROMPT), ([1, 4, 7], mine, (7, 8, 10)), ([1, 4, 7], dataclasses.replace(mine, ids=(1, 4, 6)), PROMPT),
        ([1, 4, 7], dataclasses.replace(mine, anchor=anchor(PROMPT, [1, 4, 6])), PROMPT),
    ):
        with pytest.raises(NearTieError, match="request 0: the scores are of other ids"):
            judge([prompt], [ours], [[1, 3, 6]], [scores], 1.0, NONE)


def noisy(ids: list[int], sizes: list[float], parted_at: int | None = None) -> Scored:
    """One row of 20 likeliest ids per id; every value is moved by `sizes[t]`.  From `parted_at` on the ids are others."""
    rows = [{100 + k: -float(k) - sizes[t] for k in range(20)} for t in range(len(ids))]
    parted = [100 + t % 3 if parted_at is not None and t >= parted_at else token for t, token in enumerate(ids)]
    return scored(parted, rows)


def test_jitter_is_the_percentile_over_all_named_ids_of_common_positions() -> None:
    """2,000 differences: positions 0 to 99 with 20 ids each, moved by 1e-6 * t.  Rank 0.999 * 1999 = 1997.001: among the last 20."""
    ids = [105] * 100
    scores = {"a": [noisy(ids, [0.0] * 100)], "b": [noisy(ids, [1e-6 * t for t in range(100)])]}
    found = jitter("prefill against decode", scores, "a", "b")
    assert (found.positions, found.values) == (100, 2000)
    assert found.percentile == pytest.approx(99e-6) and found.worst == pytest.approx(99e-6)
    assert band_of([found]) == pytest.approx(3 * 99e-6)
    assert jitter("x", scores, "b", "a").percentile == found.percentile, "the difference, whichever is larger"


def test_jitter_looks_at_the_tail_and_not_at_the_worst() -> None:
    """10,000 differences of 1e-5 but for one position in 500 with 20 of 1: the percentile is in the tail, so it is 1; one id of 1 alone
    is above it.
    """
    ids = [105] * 500
    flat = noisy(ids, [0.0] * 500)
    tail = noisy(ids, [1e-5] * 499 + [1.0])
    one = dataclasses.replace(tail, top=(*tail.top[:499], tuple((k, v + 1.0 - (k != 100) * 1e-5 - (k == 100)) for k, v in tail.top[499])))
    assert jitter("x", {"a": [flat], "b": [tail]}, "a", "b").percentile == pytest.approx(1.0)
    found = jitter("x", {"a": [flat], "b": [one]}, "a", "b")
    assert found.percentile == pytest.approx(1e-5) and found.worst == pytest.approx(1.0)


def test_positions_after_the_ids_part_are_not_compared() -> None:
    """The ids part at position 60: that position still has a common context, the next has not."""
    ids = [105] * 100
    scores = {"a": [noisy(ids, [0.0] * 100)], "b": [noisy(ids, [1e-6] * 61 + [5.0] * 39, parted_at=60)]}
    found = jitter("x", scores, "a", "b")
    assert found.positions == 61 and found.worst == pytest.approx(1e-6)


def test_the_band_is_that_of_the_noisier_comparison() -> None:
    ids = [105] * 100
    scores = {"a": [noisy(ids, [0.0] * 100)], "b": [noisy(ids, [0.0] * 100)], "c": [noisy(ids, [2e-5] * 100)]}
    assert band_of([jitter("x", scores, "a", "b"), jitter("y", scores, "a", "c")]) == pytest.approx(6e-5)
    assert band_of([jitter("x", scores, "a", "b")]) == 0.0


def test_too_few_differences_or_no_numbers_are_refused() -> None:
    few = {"a": [noisy([105] * 49, [0.0] * 49)], "b": [noisy([105] * 49, [0.0] * 49)]}
    with pytest.raises(NearTieError, match=r"a against b: 980 differences .* needs 1000"):
        jitter("x", few, "a", "b")
    bad = {"a": [noisy([105] * 100, [0.0] * 100)], "b": [noisy([105] * 100, [math.nan] * 100)]}
    with pytest.raises(NearTieError, match="not finite"):
        jitter("x", bad, "a", "b")


def test_an_oracle_that_does_not_stand_by_its_own_ids_judges_nothing() -> None:
    own = [scored([1, 4, 7], ROWS)]
    assert check_control(own, 0.0005, NONE) == pytest.approx(4e-4)
    with pytest.raises(NearTieError, match=r"request 0, position 1: gap 0\.0004"):
        check_control(own, 0.0003, NONE)
    with pytest.raises(NearTieError, match="does not stand by its own ids"):
        check_control(own, 1.0, Mask(ids=frozenset({4}), until=3))


def test_self_agreement_counts_requests() -> None:
    assert near_tie.agreement("x", "y", [[1, 2], [3, 4]], [[1, 2], [3, 5]]) == {"a": "x", "b": "y", "identical": 1, "of": 2}


def test_only_wrong_voids() -> None:
    record = {"band": 1.2e-4, "arms": [{"legs": ["performance-1-on"], "of": 16, "near_ties": 3, "wrong": 0}]}
    assert void_reasons(record) == []
    record["arms"][0]["wrong"] = 2  # type: ignore[index]
    assert void_reasons(record) == [
        "near-tie: 2 of 16 outputs of performance-1-on are wrong by the oracle's own band (0.00012 nats)"]


def test_random_ids_are_never_a_near_tie() -> None:
    """Against a model that gives each id of 20 another probability, 0.05 nats apart, with a band of 0.04."""
    generator = random.Random(0)
    rows = [{100 + k: -0.05 * k for k in range(20)} for _ in range(8)]
    for _ in range(50):
        ours = [100 + generator.randrange(20) for _ in range(8)]
        assert (label(ours, [100] * 8, 0.04, rows=rows).label == "wrong") == any(token != 100 for token in ours)
