"""A/B and A/A: two arms of one build that differ in one option, or in none.  Pure; docs/METRICS.md gives the rules.

A plan is an A/B by what it says, not by the command that ran it: two arms of one driver, oracle and client whose options differ in at most
one key.  With one build on both sides there is more to ask than of two engines: the outputs must be equal in every block, and equality
itself can be shown (two one-sided tests, Schuirmann 1987).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from harness.analysis.coverage import Share, false_alarms
from harness.analysis.ratios import Axis
from harness.analysis.tokens import LegDiff, diff_legs
from harness.evidence.schema import Leg, Series

ONE_BUILD = ("driver", "oracle", "client")
ALARM_GROUP = 5
"""Blocks of one interval when the false alarms of an A/A are counted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """What sets the two arms apart: an option and its value in each; `option` is None for an A/A."""

    option: str | None
    values: tuple[Any, Any]

    @property
    def kind(self) -> str:
        return "A/A" if self.option is None else "A/B"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Neutrality:
    """How large a gap is beside the noise of the arms that show it."""

    gap: float
    """|ratio - 1|."""
    over_spread: tuple[float | None, float | None]
    """The gap over the spread of ours and of base; None where that spread is 0 or unknown."""
    signs: str
    """One of `+`, `-`, `=` a block: ours above, below or equal to base."""
    inside: bool
    """The gap is no larger than the larger of the two spreads."""
    neutral: bool
    """Inside, and the blocks do not tell its direction: the signs are mixed, or the 95 % interval holds 1."""
    equivalent: bool
    """Both one-sided 95 % bounds lie within the margin around 1."""


def why_no_ab(plan: Mapping[str, Any]) -> list[str]:
    """Why a plan is no A/B; empty when it is one."""
    arms = plan["arms"]
    if len(arms) != 2:
        return [f"field `arms`: {len(arms)} arms ({', '.join(arm['name'] for arm in arms)}); an A/B has exactly two"]
    a, b = arms
    reasons = [f"field `arms.*.{field}`: {a['name']} has {a[field]!r}, {b['name']} has {b[field]!r}; one build, called one way, is needed"
               for field in ONE_BUILD if a[field] != b[field]]
    if len(unlike := _unlike(a["options"], b["options"])) > 1:
        reasons.append(f"field `arms.*.options`: {a['name']} and {b['name']} differ in {', '.join(unlike)}; an A/B has one difference")
    if len(plan["pairs"]) != 1:
        reasons.append(f"field `verdict.pairs`: {plan['pairs']}; an A/B has one pair")
    return reasons


def difference(plan: Mapping[str, Any]) -> Difference | None:
    """What an A/B plan's pair differs in, ours first; None when the plan is no A/B."""
    if why_no_ab(plan):
        return None
    options = {arm["name"]: arm["options"] for arm in plan["arms"]}
    ours, base = (options[name] for name in plan["pairs"][0])
    option = next(iter(_unlike(ours, base)), None)
    return Difference(option=option, values=(ours.get(option), base.get(option)) if option else (None, None))


def block_diffs(series: Series, pair: Sequence[str]) -> list[LegDiff]:
    """The outputs of both arms compared in every block.  Raises TokensError when a block's cannot be compared."""
    ours, base = (series.legs(arm) for arm in pair)
    return [diff_legs("ab", a, b, gated=True) for a, b in zip(ours, base, strict=True)]


def withheld(found: Difference, diffs: Sequence[LegDiff], ours: Leg, base: Leg) -> list[str]:
    """Why an A/B's numbers are shown without a verdict, beside the reasons that any pair may have."""
    changed = [leg_diff for leg_diff in diffs if not leg_diff.diff.same]
    reasons = []
    if changed:
        first = changed[0].diff.divergences[0]
        reasons.append(f"OUTPUT CHANGED ({len(changed)} of {len(diffs)} blocks; {changed[0].a} against {changed[0].b}: "
                       f"{changed[0].diff.identical}/{changed[0].diff.of} outputs identical, first at request {first.request}, position "
                       f"{first.position}; a speed over other work is none)")
    for field, a, b in _one_build(ours, base):
        if a != b:
            reasons.append(f"no verdict: not one build ({ours.arm} and {base.arm} differ in `{field}`)")
    if found.option is None and (unlike := resolved_unlike(found, ours, base)):
        reasons.append(f"no verdict: no A/A (asked for the same, the arms resolved {', '.join(unlike)} differently)")
    return reasons


def resolved_unlike(found: Difference, ours: Leg, base: Leg) -> list[str]:
    """Settings, beside the one asked to differ, that the two arms resolved differently."""
    a, b = (leg.result["resolved"] if leg.result else {} for leg in (ours, base))
    return [name for name in _unlike(a, b) if name != found.option]


def _one_build(ours: Leg, base: Leg) -> list[tuple[str, Any, Any]]:
    pairs = [("code_sha256", ours.record["code_sha256"], base.record["code_sha256"])]
    if ours.result and base.result:
        pairs += [(field, ours.result[field], base.result[field]) for field in ("who", "device")]
    return pairs


def judge(axis: Axis, found: Difference, margin: float) -> tuple[Axis, Neutrality | None]:
    """An axis by the rules of an A/B; its neutrality is None without an interval.

    A/B: the verdict of any pair; EQUIVALENT joins a PASS within the margin to both sides, and a neutral gap is never FASTER.  A/A: only
    equivalence passes, and a difference beyond the margin to either side fails.
    """
    noise = neutrality(axis, margin)
    if noise is None:
        return axis, None
    verdict, qualifier = axis.verdict, axis.qualifier
    reasons = list(axis.reasons)
    if found.option is None:
        verdict, reasons = _verdict_aa(axis, noise, margin)
        qualifier = None
    elif noise.neutral:
        qualifier = None
    if verdict == "PASS" and qualifier is None and noise.equivalent:
        qualifier = "EQUIVALENT"
    return dataclasses.replace(axis, verdict=verdict, qualifier=qualifier, reasons=(*reasons, *_noise_lines(axis, noise))), noise


def neutrality(axis: Axis, margin: float) -> Neutrality | None:
    """The gap of an axis beside its noise; None when the axis has no interval or an arm's spread is not known."""
    if axis.interval is None or axis.ratio is None or axis.lower is None or axis.upper is None:
        return None
    spreads = axis.spread_ours, axis.spread_base
    if spreads[0] is None or spreads[1] is None:
        return None
    gap = abs(axis.ratio - 1)
    ratios = [ratio for ratio in axis.per_block if ratio is not None]
    inside = gap <= max(spreads[0], spreads[1])
    mixed = any(ratio > 1 for ratio in ratios) and any(ratio < 1 for ratio in ratios)
    return Neutrality(
        gap=gap, over_spread=(_over(gap, spreads[0]), _over(gap, spreads[1])),
        signs="".join("+" if ratio > 1 else "-" if ratio < 1 else "=" for ratio in ratios), inside=inside,
        neutral=inside and (mixed or axis.interval[0] <= 1 <= axis.interval[1]),
        equivalent=axis.lower > 1 - margin and axis.upper < 1 / (1 - margin),
    )


def alarms(axis: Axis) -> Share | None:
    """False alarms of an A/A over groups of :data:`ALARM_GROUP` blocks; None when there is no whole group, or a value is missing."""
    ratios = [ratio for ratio in axis.per_block if ratio is not None]
    if len(ratios) < max(ALARM_GROUP, len(axis.per_block)):
        return None
    return false_alarms(ratios, ALARM_GROUP)


def _verdict_aa(axis: Axis, noise: Neutrality, margin: float) -> tuple[str, list[str]]:
    assert axis.lower is not None and axis.upper is not None
    bounds = f"{axis.axis}: the ratio of two equal arms lies between {axis.lower:.4f} and {axis.upper:.4f} (95 % confidence to either side)"
    asked = f"{1 - margin:.4f} to {1 / (1 - margin):.4f} is asked"
    if noise.equivalent:
        return "PASS", [f"{bounds}; {asked}"]
    if axis.upper < 1 - margin or axis.lower > 1 / (1 - margin):
        return "FAIL", [f"{bounds}; {asked}: this instrument sees a difference where there is none"]
    return "INCONCLUSIVE", [f"{bounds}; {asked}, so these blocks do not show them equal"]


def _noise_lines(axis: Axis, noise: Neutrality) -> list[str]:
    if not noise.inside:
        return []
    word = "NEUTRAL: the gap" if noise.neutral else "the gap"
    shares = " and ".join("n/a" if over is None else f"{over:.2f}" for over in noise.over_spread)
    spreads = " and ".join("n/a" if spread is None else f"{100 * spread:.3f} %" for spread in (axis.spread_ours, axis.spread_base))
    return [f"{axis.axis}: {word} of {100 * noise.gap:.3f} % is inside the spread of the arms ({spreads}: {shares} of it); "
            f"block by block {' '.join(noise.signs)}"]


def _over(gap: float, spread: float | None) -> float | None:
    return gap / spread if spread else None


def _unlike(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Names whose values differ, type included: True is not 1."""
    missing = object()
    return [name for name in sorted(a.keys() | b.keys())
            if (type(a.get(name, missing)), a.get(name, missing)) != (type(b.get(name, missing)), b.get(name, missing))]
