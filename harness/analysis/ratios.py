"""Ratios of two arms over blocks, their doubt, and the verdict per axis.  Pure; docs/METRICS.md gives every formula with its source.

The unit of inference is the block: one log ratio, ours over base, for each repetition of all arms.  Requests inside a leg share a process
and are correlated, so they never enter an interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy import stats

THROUGHPUT = ("total_throughput", "output_throughput", "request_throughput")
LATENCY = ("ttft_mean", "tpot_mean", "itl_p50", "e2e_mean")
GPU_MEMORY = "peak_gpu"
"""An axis of a pair of which an arm ran on a GPU."""
MEMORY = ("peak_pss", "stable_pss", GPU_MEMORY)
AXES = (*THROUGHPUT, *LATENCY, *MEMORY)

CONFIDENCE = 0.95
POWER = 0.80
CONSISTENCY = 1e-9
"""How far the three throughput ratios may lie apart when both arms did exactly the same work."""


class ConsistencyError(Exception):
    """Numbers that must agree by construction do not: the evidence or the arithmetic is broken."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis of one pair of arms.

    `ratio` is the geometric mean of ours over base; `interval` the two-sided 95 % interval and `lower`, `upper` the one-sided 95 % bounds
    of that mean; `detectable` the smallest relative effect a series with this scatter would have shown four times in five.  All four
    are None for a single block.  `normalized` is the ratio turned so that 1 and above always passes.
    """

    axis: str
    higher_passes: bool
    per_block: tuple[float | None, ...]
    ratio: float | None
    normalized: float | None
    interval: tuple[float, float] | None
    lower: float | None
    upper: float | None
    detectable: float | None
    spread_ours: float | None
    spread_base: float | None
    mean_ours: float | None
    mean_base: float | None
    verdict: str
    qualifier: str | None = None
    """FASTER (SMALLER for memory) beside a PASS whose bound clears 1."""
    reasons: tuple[str, ...] = field(default=())


def spread(values: Sequence[float | None]) -> float | None:
    """(max - min) / mean over repetitions; None when a value is missing or not positive, or there is one only."""
    known = [value for value in values if value is not None and value > 0]
    if len(known) < max(2, len(values)):
        return None
    return (max(known) - min(known)) / (sum(known) / len(known))


def compare(axis: str, ours: Sequence[float | None], base: Sequence[float | None], margin: float) -> Axis:
    """Compare two arms on one axis, block by block.

    `ours` and `base` hold one value per block in the same order; None or a value that is not positive makes the axis VOID.
    `margin` is the share by which ours may fall short and still pass.
    """
    if len(ours) != len(base):
        raise ConsistencyError(f"{axis}: {len(ours)} values of one arm, {len(base)} of the other; a ratio needs both in each block")
    ratios = [a / b if a and b and a > 0 and b > 0 else None for a, b in zip(ours, base, strict=True)]
    known = [ratio for ratio in ratios if ratio is not None]
    spreads = spread(ours), spread(base)
    means = mean(ours), mean(base)
    void = _why_void(axis, ratios)
    logs = np.log(known)
    center = float(logs.mean()) if not void else None
    interval, lower, upper, detectable = _doubt(logs) if not void and len(known) > 1 else (None, None, None, None)
    higher = axis in THROUGHPUT
    verdict, qualifier, reasons = ("VOID", None, void) if void else _verdict(axis, higher, lower, upper, margin)
    ratio = math.exp(center) if center is not None else None
    return Axis(
        axis=axis, higher_passes=higher, per_block=tuple(ratios), ratio=ratio, normalized=_normalized(ratio, higher), interval=interval,
        lower=lower, upper=upper, detectable=detectable, spread_ours=spreads[0], spread_base=spreads[1], mean_ours=means[0],
        mean_base=means[1], verdict=verdict, qualifier=qualifier, reasons=tuple(reasons),
    )


def check_throughputs(per_axis: Mapping[str, Sequence[float | None]]) -> None:
    """Raise :class:`ConsistencyError` unless the throughput ratios of each block agree.  Call it when both arms did the same work."""
    for number, ratios in enumerate(zip(*(per_axis[axis] for axis in THROUGHPUT), strict=True), 1):
        known = [ratio for ratio in ratios if ratio is not None]
        if len(known) < len(ratios) or max(known) - min(known) > CONSISTENCY * max(known):
            shown = ", ".join(f"{axis} {ratio!r}" for axis, ratio in zip(THROUGHPUT, ratios, strict=True))
            raise ConsistencyError(f"block {number}: with equal counts the throughput ratios must agree to {CONSISTENCY:g}: {shown}")


def _why_void(axis: str, ratios: Sequence[float | None]) -> list[str]:
    if not ratios:
        return [f"{axis}: no block measured it"]
    missing = [str(number) for number, ratio in enumerate(ratios, 1) if ratio is None]
    return [f"{axis}: unreadable in block {', '.join(missing)}"] if missing else []


def _doubt(logs: np.ndarray) -> tuple[tuple[float, float], float, float, float]:
    """Back from logs: two-sided interval, one-sided lower and upper bound, smallest detectable effect."""
    found = log_bounds(logs)
    interval = (math.exp(found.interval_low), math.exp(found.interval_high))
    return interval, math.exp(found.lower), math.exp(found.upper), math.expm1(found.detectable)


@dataclass(frozen=True, kw_only=True)
class LogBounds:
    """Student's t bounds of a mean log ratio, each of the shape of the input without its last axis; see :func:`log_bounds`."""

    interval_low: np.ndarray
    interval_high: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    detectable: np.ndarray


def log_bounds(logs: np.ndarray) -> LogBounds:
    """Bounds of the mean over the last axis (the blocks, at least two) of log ratios, shape [..., blocks].

    `interval_low` and `interval_high` are two-sided at 95 %; `lower` and `upper` each one-sided at 95 %; `detectable` is the effect that
    the two-sided test finds four times in five (Bloom 1995).
    """
    n = logs.shape[-1]
    center, error = logs.mean(axis=-1), logs.std(axis=-1, ddof=1) / math.sqrt(n)
    two, one, power = (float(stats.t.ppf(q, n - 1)) for q in ((1 + CONFIDENCE) / 2, CONFIDENCE, POWER))
    return LogBounds(
        interval_low=center - two * error, interval_high=center + two * error, lower=center - one * error, upper=center + one * error,
        detectable=(two + power) * error,
    )


def _verdict(axis: str, higher: bool, lower: float | None, upper: float | None, margin: float) -> tuple[str, str | None, list[str]]:
    """One rule for all axes, on the pass-normalized ratio: its lower bound must clear 1 - margin, or its upper bound fails to reach it."""
    if lower is None or upper is None:
        return "INCONCLUSIVE", None, [f"{axis}: one block gives no interval"]
    worst, best = (lower, upper) if higher else (1 / upper, 1 / lower)
    floor = 1 - margin
    asked = f"above {floor:.4f} is asked"
    if worst > floor:
        better = "SMALLER" if axis in MEMORY else "FASTER"
        return "PASS", better if worst > 1 else None, [f"{axis}: the normalized ratio is at least {worst:.4f} at 95 % confidence; {asked}"]
    if best < floor:
        return "FAIL", None, [f"{axis}: the normalized ratio is at most {best:.4f} at 95 % confidence; {asked}"]
    return "INCONCLUSIVE", None, [
        f"{axis}: the normalized ratio may lie anywhere from {worst:.4f} to {best:.4f} (95 % confidence to either side); {asked}, so these "
        "blocks show neither pass nor fail"]


def _normalized(ratio: float | None, higher: bool) -> float | None:
    return ratio if ratio is None or higher else 1 / ratio


def mean(values: Sequence[float | None]) -> float | None:
    """The arithmetic mean; None when there is no value or one is missing."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None
