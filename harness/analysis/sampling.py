"""How a memory leg was sampled, and what its stream says beside PSS.  Pure; `harness.leg.memory` describes the rows.

A peak between two passes is not seen, and a pass takes time of its own; so period, cost and gaps stand beside every peak.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

Row = Mapping[str, Any]


def sampling(rows: Sequence[Row]) -> dict[str, Any]:
    """Of the rows of one stream, oldest first:

    - `period_s`: the asked period, from the end row.
    - `interval_s`: the median time from one PSS pass to the next.
    - `mean_cost_s`, `max_cost_s`: of the PSS passes.
    - `cost_share`: cost of all passes, RSS and PSS, over the time from the first pass to the last: the sampler's share of one core.
    - `available_min`: the lowest MemAvailable of the machine, in bytes, of rows that tell `mem_available`.
    - `gpu_peak`: the largest sum of the processes' `gpu` bytes over whole PSS passes; None when it is never above 0, for then NVML did
      not know the arm's processes.
    - `cgroup_peak`: the largest memory.peak of a control group that the leg had to itself.

    A value that the stream does not tell, or that any row leaves unread, is None: it is never 0.
    """
    passes = [row for row in rows if row["kind"] in ("rss", "pss")]
    pss = [row for row in passes if row["kind"] == "pss"]
    gaps = [row["gap_s"] for row in pss if row["gap_s"] is not None]
    span = (passes[-1]["t_ns"] - passes[0]["t_ns"]) / 1e9 if passes else 0.0
    return {
        "period_s": next((row["period_s"] for row in rows if row["kind"] == "end"), None),
        "interval_s": median(gaps) if gaps else None,
        "mean_cost_s": fmean(row["cost_s"] for row in pss) if pss else None,
        "max_cost_s": max((row["cost_s"] for row in pss), default=None),
        "cost_share": sum(row["cost_s"] for row in passes) / span if span > 0 else None,
        "available_min": _least([row["mem_available"] for row in passes if "mem_available" in row]),
        "gpu_peak": _gpu_peak([row for row in pss if row["processes"] and not row["partial"]]),
        "cgroup_peak": max((group["peak"] for row in pss if (group := row.get("cgroup")) and group["peak"] is not None), default=None),
    }


def _least(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return min(known) if known and len(known) == len(values) else None


def _gpu_peak(whole: Sequence[Row]) -> int | None:
    totals = []
    for row in whole:
        parts = [process.get("gpu") for process in row["processes"]]
        if None in parts:
            return None
        totals.append(sum(parts))
    return max(totals, default=0) or None
