"""Which ids differ, where, and between whom."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.evidence.schema import EvidenceError, Leg, Series, load_series
from harness.evidence.store import check_seal

Outputs = Sequence[Sequence[int]]


class TokensError(EvidenceError):
    """Two token files that cannot be compared; the message says which and why.  Never a match, never a mismatch."""


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first place at which two outputs of one request part: request and position count from 0."""

    request: int
    position: int
    a: int
    b: int


@dataclass(frozen=True, kw_only=True)
class TokenDiff:
    identical: int
    of: int
    divergences: tuple[Divergence, ...]

    @property
    def same(self) -> bool:
        return self.identical == self.of


@dataclass(frozen=True, kw_only=True)
class LegDiff:
    """Two legs compared.  `gated`: a difference is a failure (ours against ours); otherwise it is reported only."""

    kind: str
    """`self` (one arm over repetitions), `ours` (two of our arms), `pin` (ours against another engine), `series` (a leg in two series),
    `ab` (two arms of an A/B in one block)."""
    a: str
    b: str
    arms: tuple[str, str]
    gated: bool
    diff: TokenDiff


def diff_tokens(a: Outputs, b: Outputs) -> TokenDiff:
    """Compare the output ids of two legs request by request.

    Raises :class:`TokensError` when there are no requests, or when the number of requests or the length of any output differs.
    """
    if not a or len(a) != len(b):
        raise TokensError(f"{len(a)} requests against {len(b)}; only whole, equally long token files are compared")
    divergences = []
    for request, (x, y) in enumerate(zip(a, b, strict=True)):
        if not x or len(x) != len(y):
            raise TokensError(f"request {request}: {len(x)} ids against {len(y)}; only equally long outputs are compared")
        position = next((i for i, (p, q) in enumerate(zip(x, y, strict=True)) if p != q), None)
        if position is not None:
            divergences.append(Divergence(request=request, position=position, a=x[position], b=y[position]))
    return TokenDiff(identical=len(a) - len(divergences), of=len(a), divergences=tuple(divergences))


def series_diffs(series: Series) -> list[LegDiff]:
    """Within one series: each arm's legs against its first, our arms against our first one, and our arms against the others."""
    firsts = {arm: legs[0] for arm in series.arms if (legs := series.legs(arm))}
    diffs = [
        diff_legs("self", firsts[arm], leg, gated=is_ours(firsts[arm]))
        for arm in firsts for leg in series.legs(arm)[1:]
    ]
    ours = [leg for leg in firsts.values() if is_ours(leg)]
    others = [leg for leg in firsts.values() if not is_ours(leg)]
    diffs += [diff_legs("ours", ours[0], leg, gated=True) for leg in ours[1:]]
    diffs += [diff_legs("pin", leg, other, gated=False) for leg in ours for other in others]
    return diffs


def diff_series(path: Path) -> dict[str, Any]:
    """:func:`series_diffs` of a series directory whose seal holds, as :func:`to_record` gives it.

    Raises BrokenSeal, EvidenceError, and :class:`TokensError` when there are no two legs to compare.
    """
    diffs = series_diffs(_load(path))
    if not diffs:
        raise TokensError(f"{path.name}: has no two accepted legs to compare")
    return to_record(diffs)


def diff_dirs(a: Path, b: Path) -> dict[str, Any]:
    """Compare two series leg by leg, by phase, repetition and arm.  A leg that only one of them has is an error naming it."""
    first, second = _load(a), _load(b)
    for name in ("corpus_sha256", "requests", "max_tokens"):
        x, y = first.plan["workload"][name], second.plan["workload"][name]
        if x != y:
            raise TokensError(f"workload.{name}: {x} in {a.name}, {y} in {b.name}; only one and the same work is compared")
    legs_a, legs_b = ({leg.name: leg for arm in series.arms for leg in series.legs(arm)} for series in (first, second))
    if lone := sorted(legs_a.keys() ^ legs_b.keys()):
        raise TokensError(f"only one of {a.name} and {b.name} has an accepted leg {', '.join(lone)}")
    if not legs_a:
        raise TokensError(f"neither {a.name} nor {b.name} has an accepted leg")
    return to_record([diff_legs("series", legs_a[name], legs_b[name], gated=is_ours(legs_a[name])) for name in legs_a])


def to_record(diffs: Sequence[LegDiff]) -> dict[str, Any]:
    """JSON for machines, `lines` for people.  `identical` is over what must agree; where nothing must, over everything."""
    gated = [leg_diff for leg_diff in diffs if leg_diff.gated]
    return {
        "identical": all(leg_diff.diff.same for leg_diff in gated or diffs),
        "diffs": [dataclasses.asdict(leg_diff) for leg_diff in diffs],
        "lines": [line for leg_diff in diffs for line in describe(leg_diff)],
    }


def describe(leg_diff: LegDiff, limit: int = 3) -> list[str]:
    """Lines for people: how many outputs agree, and the first divergences by request and position."""
    diff = leg_diff.diff
    note = "" if leg_diff.gated or diff.same else " (reported, not gated)"
    lines = [f"{leg_diff.a} against {leg_diff.b}: {diff.identical}/{diff.of} outputs identical{note}"]
    lines += [f"  request {d.request}, position {d.position}: {d.a} against {d.b}" for d in diff.divergences[:limit]]
    if len(diff.divergences) > limit:
        lines.append(f"  and {len(diff.divergences) - limit} more requests")
    return lines


def is_ours(leg: Leg) -> bool:
    return bool(leg.record["role"] == "ours")


def diff_legs(kind: str, a: Leg, b: Leg, gated: bool) -> LegDiff:
    """The outputs of two legs compared.  Raises :class:`TokensError` naming both when they cannot be."""
    try:
        diff = diff_tokens(a.outputs, b.outputs)
    except TokensError as error:
        raise TokensError(f"{a.name} against {b.name}: {error}") from None
    return LegDiff(kind=kind, a=a.name, b=b.name, arms=(a.arm, b.arm), gated=gated, diff=diff)


def _load(path: Path) -> Series:
    check_seal(path, require_sealed=False)
    return load_series(path)
