"""How often an interval was right: k of n with its exact binomial bound.  Pure; docs/METRICS.md gives the formulas with their source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from harness.analysis.ratios import CONFIDENCE, log_bounds

COVERAGE_FLOOR = 0.85
"""An instrument whose 95 % intervals hold the truth less often than this is out of order."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """k of n, and the two-sided 95 % Clopper-Pearson interval of the true share."""

    k: int
    n: int
    lower: float
    upper: float

    @property
    def value(self) -> float:
        return self.k / self.n


def share(k: int, n: int) -> Share:
    """The exact interval of a share seen k times in n (Clopper and Pearson 1934).  Raises ValueError unless 0 <= k <= n and n >= 1."""
    if not 0 <= k <= n or n < 1:
        raise ValueError(f"{k} of {n} is no share: 0 <= k <= n and n >= 1 are needed")
    found = stats.binomtest(k, n).proportion_ci(CONFIDENCE, method="exact")
    return Share(k=k, n=n, lower=float(found.low), upper=float(found.high))


def coverage(intervals: Sequence[tuple[float, float]], truths: Sequence[float]) -> Share:
    """How many of the intervals hold the true value that was injected.  Raises ValueError when a truth is missing, or all are."""
    return share(sum(low <= truth <= high for (low, high), truth in zip(intervals, truths, strict=True)), len(intervals))


def false_alarms(per_block: Sequence[float], blocks: int) -> Share:
    """Of an A/A: how many two-sided 95 % intervals over `blocks` consecutive blocks leave out a ratio of 1.

    The groups do not overlap, so they are independent; blocks left over are in none.  Raises ValueError with fewer than one group, or for
    `blocks` below two: one block has no interval.
    """
    groups = len(per_block) // blocks if blocks >= 2 else 0
    if groups == 0:
        raise ValueError(f"{len(per_block)} blocks make no group of {blocks}; a group has at least two")
    found = log_bounds(np.log(np.asarray(per_block[: groups * blocks], dtype=np.float64).reshape(groups, blocks)))
    return share(int(np.sum((found.interval_low > 0) | (found.interval_high < 0))), groups)


def sentence(found: Share, what: str) -> str:
    """`k of n` with its bound, for people."""
    return f"{found.k} of {found.n} {what} ({found.value:.1%}; the true share lies between {found.lower:.1%} and {found.upper:.1%})"
