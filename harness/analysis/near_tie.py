"""Whether another id than the oracle's is a tie or a fault: gaps in nats against a band from the oracle's own jitter.

Teacher forcing: the oracle scores our own ids after the prompt, so that each position is judged in our own context.  With p the oracle's
probability given the prompt and our ids before position t, masked ids (end of sequence until min_tokens are out) left out,

    gap(t)   = max over ids v of log p(v) - log p(our id)                         worst gap = max over t
    gap      = log p(the oracle's id) - log p(our id) at the first divergence, where both have written the same ids so far
    jitter   = max over comparisons of the 99.9th percentile (linear between order statistics) of |log p_a(v) - log p_b(v)|
    band     = 3 * jitter

over the positions at which two scorings of the oracle's own ids have the same context, and the ids v that both name there (its TOP
likeliest).  The comparisons are prefill against decode at one batch size, and batch 1 against several in one form.  One request is
`identical`; else a `near-tie` when neither gap exceeds a band above 0; else `wrong`.  With a jitter of 0 nothing but identity passes.

The method is that of vllm.cpp's near-tie scripts, whose fixed limit of 0.5 nats is replaced by the oracle's own jitter.

The band cannot see a fault whose every id costs less than the band.  So our ids are also shown beside the oracle's own, reported and not
judged, since another rounding is no fault and moves both figures:

    exact share   requests that equal the oracle's outputs: ours, and those of the oracle run one by one; each with its Clopper-Pearson
                  interval, and p of Fisher's exact test (one-sided) that ours is no lower
    cost          mean gap(t) of an id, in nats, under one and the same scorer: of ours, and of the ids the oracle wrote at the series' own
                  batch size; p of the rank sum test over requests (Mann and Whitney 1947, one-sided, ties corrected) that ours is no higher
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy import stats

from harness.analysis.coverage import share
from harness.analysis.tokens import Outputs, diff_tokens
from harness.evidence.schema import EvidenceError
from legs.protocol import Scored, anchor

FACTOR, PERCENTILE = 3, 99.9
FLOOR = 1000
"""Fewest differences a 99.9th percentile is taken of: below, it would say less than their maximum."""
IDENTICAL, NEAR_TIE, WRONG = "identical", "near-tie", "wrong"


class NearTieError(EvidenceError):
    """Scores that cannot be judged: of other ids, too few, or of an oracle that does not stand by its own ids."""


@dataclass(frozen=True, kw_only=True)
class Jitter:
    """How far two scorings of the same ids by one engine lie apart, in nats; `values` differences over `positions`."""

    what: str
    a: str
    b: str
    positions: int
    values: int
    percentile: float
    worst: float


@dataclass(frozen=True, kw_only=True)
class Mask:
    """Ids that greedy decoding cannot choose before `until` ids are out."""

    ids: frozenset[int]
    until: int

    def at(self, position: int) -> Collection[int]:
        return self.ids if position < self.until else ()


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """One request.  Gaps in nats; `gap` is None for identical ids, and None in a `wrong` one when the oracle does not name an id."""

    request: int
    label: str
    position: int | None
    ours: int | None
    oracle: int | None
    gap: float | None
    worst_gap: float | None
    worst_position: int
    anchor: str
    """Binds the judgement to our exact ids after this prompt."""


def jitter(what: str, scores: Mapping[str, Sequence[Scored]], a: str, b: str) -> Jitter:
    """Compare jobs `a` and `b` over the positions where both have the same context.

    Raises :class:`NearTieError` under :data:`FLOOR` differences, and for one that is no number.
    """
    differences: list[float] = []
    positions = 0
    for x, y in zip(scores[a], scores[b], strict=True):
        for t in range(min(len(x.ids), len(y.ids))):
            if x.ids[:t] != y.ids[:t]:
                break
            one, other = dict(x.top[t]), dict(y.top[t])
            positions += 1
            differences += [abs(one[token] - other[token]) for token in one.keys() & other.keys()]
    if len(differences) < FLOOR:
        raise NearTieError(f"{a} against {b}: {len(differences)} differences of log-probabilities, the {PERCENTILE}th percentile needs "
                           f"{FLOOR}; score more requests or more ids")
    if not all(map(math.isfinite, differences)):
        raise NearTieError(f"{a} against {b}: a log-probability is not finite")
    return Jitter(what=what, a=a, b=b, positions=positions, values=len(differences),
                  percentile=float(np.percentile(differences, PERCENTILE)), worst=max(differences))


def band_of(found: Sequence[Jitter]) -> float:
    """The band in nats."""
    return FACTOR * max(one.percentile for one in found)


def worst_gap(scored: Scored, mask: Mask) -> tuple[float | None, int]:
    """(the worst gap, its position); (None, position) at the first id that was masked where it stands."""
    found = gaps(scored, mask)
    if None in found:
        return None, found.index(None)
    where = max(range(len(found)), key=lambda t: found[t] or 0.0)
    return found[where], where


def gaps(scored: Scored, mask: Mask) -> list[float | None]:
    """gap(t) at each position in nats; None for an id that was masked where it stands."""
    found: list[float | None] = []
    for t, (token, own) in enumerate(zip(scored.ids, scored.logprobs, strict=True)):
        best = max((value for other, value in scored.top[t] if other not in mask.at(t)), default=own)
        found.append(None if token in mask.at(t) else best - own)
    return found


def judge(prompts: Outputs, ours: Outputs, oracle: Outputs, scores: Sequence[Scored], band: float, mask: Mask) -> list[Judgement]:
    """Judge our ids request by request; `scores` are the oracle's of exactly our ids after exactly these prompts.

    Raises :class:`NearTieError` when one of them is of other ids, TokensError when the outputs cannot be compared.
    """
    first = {one.request: one for one in diff_tokens(ours, oracle).divergences}
    found = []
    at: tuple[int | None, int | None, int | None]
    for request, (prompt, ids, scored) in enumerate(zip(prompts, ours, scores, strict=True)):
        bound = anchor(prompt, ids)
        if scored.anchor != bound or list(scored.ids) != list(ids):
            raise NearTieError(f"request {request}: the scores are of other ids than ours, or after another prompt; score them anew")
        worst, where = worst_gap(scored, mask)
        divergence = first.get(request)
        if divergence is None:
            at, label, gap = (None, None, None), IDENTICAL, None
        else:
            at = (divergence.position, divergence.a, divergence.b)
            theirs = dict(scored.top[divergence.position]).get(divergence.b)
            gap = None if theirs is None else theirs - scored.logprobs[divergence.position]
            tie = band > 0 and gap is not None and worst is not None and max(gap, worst) <= band
            label = NEAR_TIE if tie else WRONG
        found.append(Judgement(
            request=request, label=label, position=at[0], ours=at[1], oracle=at[2], gap=gap, worst_gap=worst, worst_position=where,
            anchor=bound,
        ))
    return found


def check_control(own: Sequence[Scored], band: float, mask: Mask) -> float:
    """The oracle's worst gap on its own ids.  Raises :class:`NearTieError` when it exceeds the band: then the band, or what the
    scores are thought to mask, is not the oracle's.
    """
    gaps = [worst_gap(scored, mask) for scored in own]
    for request, (gap, position) in enumerate(gaps):
        if gap is None or gap > max(band, 0.0):
            raise NearTieError(f"the oracle does not stand by its own ids: request {request}, position {position}: gap {gap} nats, "
                               f"band {band:.3g}; nothing can be judged by it")
    return max(gap for gap, _ in gaps if gap is not None)


def agreement(a: str, b: str, first: Outputs, second: Outputs) -> dict[str, Any]:
    """One row of the oracle's self-agreement: how many requests two of its runs answer with the same ids."""
    diff = diff_tokens(first, second)
    return {"a": a, "b": b, "identical": diff.identical, "of": diff.of}


def beside(identical: int, ours: Sequence[Scored], own_agreement: Mapping[str, Any], own: Sequence[Scored], mask: Mask) -> dict[str, Any]:
    """Our ids beside the oracle's own, as the module's head says; `own_agreement` is the row of the oracle run one by one.

    A cost is None, and so is its p, where an id was masked: it has none.
    """
    k, n, of = identical, len(ours), int(own_agreement["of"])
    costs, own_costs = ([_cost(one, mask) for one in side] for side in (ours, own))
    known = [[cost for cost in side if cost is not None] for side in (costs, own_costs)]
    whole = len(known[0]) == len(costs) and len(known[1]) == len(own_costs)
    return {
        "exact": asdict(share(k, n)), "oracle_exact": asdict(share(own_agreement["identical"], of)),
        "exact_p": float(stats.hypergeom.cdf(k, n + of, k + own_agreement["identical"], n)),
        "cost": float(np.mean(known[0])) if whole else None, "oracle_cost": float(np.mean(known[1])) if whole else None,
        "cost_p": _rank_sum(*known) if whole else None,
    }


def _cost(scored: Scored, mask: Mask) -> float | None:
    found = [gap for gap in gaps(scored, mask) if gap is not None]
    return float(np.mean(found)) if len(found) == len(scored.ids) else None


def _rank_sum(ours: Sequence[float], own: Sequence[float]) -> float:
    """p that ours is no higher; 1 where all values are one and nothing can be told apart."""
    return float(stats.mannwhitneyu(ours, own, alternative="greater", method="asymptotic").pvalue)


def brief(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record as a summary holds it: of the requests only those that are not identical."""
    arms = [{**arm, "requests": [row for row in arm["requests"] if row["label"] != IDENTICAL]} for arm in record["arms"]]
    return {**record, "arms": arms}


def void_reasons(record: Mapping[str, Any]) -> list[str]:
    """Why a near-tie record voids its series: one reason for each of our outputs with wrong ids, which names the first of them; none when
    all differences are near-ties.
    """
    reasons = []
    for arm in record["arms"]:
        if not arm["wrong"]:
            continue
        first = next(row for row in arm["requests"] if row["label"] == WRONG)
        reasons.append(
            f"near-tie: {arm['wrong']} of {arm['of']} outputs of {', '.join(arm['legs'])} are wrong by the oracle's own band "
            f"({record['band']:.3g} nats), first request {first['request']}, position {first['position']}: {first['ours']} for "
            f"{first['oracle']}, gap {nats(first['gap'])}, worst gap {nats(first['worst_gap'])} at position {first['worst_position']}")
    return reasons


def nats(value: float | None) -> str:
    """A gap for people; `unknown` where the oracle does not name the id."""
    return "unknown" if value is None else f"{value:.3g}"
