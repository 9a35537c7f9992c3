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


def row(label: str, request: int = 0, **changes: object) -> dict[str, object]:
    return {"request": request, "label": label, "position": 5, "ours": 7, "oracle": 8, "gap": 0.5, "worst_gap": 0.75, "worst_position": 9,
            **changes}


def test_only_wrong_voids() -> None:
    """The reason names the first wrong request, its position and both gaps, the band, and every leg with these ids."""
    arm = {"legs": ["memory-1-on", "memory-1-off"], "of": 16, "wrong": 0, "requests": [row("near-tie")]}
    record = {"band": 1.2e-4, "arms": [arm]}
    assert void_reasons(record) == []
    arm |= {"wrong": 2, "requests": [row("near-tie"), row("wrong", 3, gap=None), row("wrong", 4)]}
    assert void_reasons(record) == [
        "near-tie: 2 of 16 outputs of memory-1-on, memory-1-off are wrong by the oracle's own band (0.00012 nats), first request 3, "
        "position 5: 7 for 8, gap unknown, worst gap 0.75 at position 9"]


def costly(cost: float) -> Scored:
    """One id of the two likeliest, `cost` nats below the best: 10 positions, so the mean is the cost."""
    return scored([2] * 10, [{1: -0.5, 2: -0.5 - cost}] * 10 if cost else [{2: -0.5, 1: -0.5}] * 10)


def test_ours_beside_the_oracle_by_hand() -> None:
    """3 of 8 ours against 7 of 8: p = P(X <= 3) of the hypergeometric, (C(8,3) C(8,7) + C(8,2) C(8,8)) / C(16,10) = 476/8008.  Ranks: ours
    all above its own, U = 16 of 16, mean 8, variance 12 without ties: z = 7.5 / sqrt(12).
    """
    found = near_tie.beside(3, [costly(c) for c in (0.5, 0.6, 0.7, 0.8, 0, 0, 0, 0)], {"identical": 7, "of": 8}, [costly(0.1)] * 4, NONE)
    assert (found["exact"]["k"], found["exact"]["n"], found["oracle_exact"]["k"]) == (3, 8, 7)
    assert found["exact_p"] == pytest.approx(476 / 8008)
    assert found["cost"] == pytest.approx(2.6 / 8) and found["oracle_cost"] == pytest.approx(0.1)
    ours, own = ([costly(c) for c in costs] for costs in ((0.5, 0.6, 0.7, 0.8), (0, 0.1, 0.2, 0.3)))
    ranked = near_tie.beside(0, ours, {"identical": 4, "of": 4}, own, NONE)
    assert ranked["cost_p"] == pytest.approx(0.5 * math.erfc(7.5 / math.sqrt(12) / math.sqrt(2)))
    assert near_tie.beside(8, [costly(0)] * 8, {"identical": 8, "of": 8}, [costly(0)] * 8, NONE)["cost_p"] == 1.0, "nothing to tell apart"


def test_cheaper_ids_than_the_oracles_raise_no_doubt() -> None:
    found = near_tie.beside(8, [costly(0)] * 8, {"identical": 4, "of": 8}, [costly(0.3)] * 8, NONE)
    assert found["cost_p"] > 0.99 and found["exact_p"] > 0.95


def test_a_masked_id_has_no_cost_and_none_is_made_up() -> None:
    found = near_tie.beside(0, [costly(0.1)] * 4, {"identical": 4, "of": 4}, [costly(0.1)] * 4, Mask(ids=frozenset({2}), until=1))
    assert (found["cost"], found["oracle_cost"], found["cost_p"]) == (None, None, None)


def test_a_fault_below_the_band_shows_in_its_cost() -> None:
    """Every id of 32 requests 0.02 nats below the best or at it, where the oracle's own are so in one of ten: no gap leaves a band of 1."""
    generator = random.Random(1)

    def written(share: float) -> list[Scored]:
        costs = [[0.02 * (generator.random() < share) for _ in range(32)] for _ in range(32)]
        return [scored([2] * 32, [{1: -0.5, 2: -0.5 - cost} if cost else {2: -0.5, 1: -0.6} for cost in one]) for one in costs]

    own, healthy, faulty = written(0.1), written(0.1), written(0.3)
    assert near_tie.beside(20, healthy, {"identical": 20, "of": 32}, own, NONE)["cost_p"] > 0.05
    assert near_tie.beside(20, faulty, {"identical": 20, "of": 32}, own, NONE)["cost_p"] < 1e-6
    assert {judge([PROMPT], [[2] * 32], [[1] + [2] * 31], [one], 1.0, NONE)[0].label for one in faulty} == {"near-tie"}


def test_random_ids_are_never_a_near_tie() -> None:
    """Against a model that gives each id of 20 another probability, 0.05 nats apart, with a band of 0.04."""
    generator = random.Random(0)
    rows = [{100 + k: -0.05 * k for k in range(20)} for _ in range(8)]
    for _ in range(50):
        ours = [100 + generator.randrange(20) for _ in range(8)]
        assert (label(ours, [100] * 8, 0.04, rows=rows).label == "wrong") == any(token != 100 for token in ours)
