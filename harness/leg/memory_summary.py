"""What a memory leg's stream says: peak and stable PSS of the process tree, with the doubt that the sampling leaves."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

Row = Mapping[str, Any]

PARTS = ("pss_anon", "pss_file", "pss_shmem")
HWM_TOLERANCE = 0.05
"""A sampled peak may lie this far below the kernel's own record of a process (VmHWM) before that process's peak counts as missed ..."""
HWM_FLOOR = 0.01
"""... unless what was missed is below this share of the tree's peak, as with a tool that lived for a few milliseconds."""


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a memory.jsonl.gz.  Raises ValueError naming it when it is not whole."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as source:
            return [json.loads(line) for line in source]
    except (gzip.BadGzipFile, EOFError, zlib.error, ValueError) as error:
        raise ValueError(f"{path}: not a whole stream of the memory sampler: {error}") from None


def summarise_memory(rows: Sequence[Row], marks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Peak and stable PSS in bytes, from the rows of the sampler and the arm's marks ({"mark", "t_ns"}).

    - `peak_pss`: the largest total over complete passes, from the first row on; `peak` says when, in which `phase` (the mark before it)
      and of what parts it was.
    - `stable_pss`: the median total of complete passes between first_token and last_token.
    - `passes`, `partial_passes`, `mean_cost_s`, `max_gap_s` (the longest time without a complete PSS pass), `rss_passes`.
    - `peak_missed`: processes whose sampled peak RSS lies more than 5 % below their VmHWM (and whose gap could matter), with both.
    - `complete`: the stream has its end row.

    A value without a complete pass to stand on is None.
    """
    pss = [row for row in rows if row["kind"] == "pss"]
    complete = [row for row in pss if not row["partial"] and row["processes"]]
    totals = [(_total(row, "pss"), row) for row in complete]
    peak_pss, peak_row = max(totals, key=lambda pair: pair[0], default=(None, None))
    times = {mark["mark"]: mark["t_ns"] for mark in reversed(marks)}
    stable = [total for total, row in totals if _within(row["t_ns"], times.get("first_token"), times.get("last_token"))]
    starts = [row["t_ns"] for row in complete]
    rss = [row for row in rows if row["kind"] == "rss"]
    return {
        "peak_pss": peak_pss,
        "peak": None if peak_row is None else {
            "t_ns": peak_row["t_ns"],
            "phase": _phase(peak_row["t_ns"], marks),
            "processes": len(peak_row["processes"]),
            **{part: _total(peak_row, part) for part in PARTS},
        },
        "stable_pss": median(stable) if stable else None,
        "stable_passes": len(stable),
        "passes": len(complete),
        "partial_passes": len(pss) - len(complete),
        "rss_passes": len(rss),
        "mean_cost_s": fmean(row["cost_s"] for row in complete) if complete else None,
        "max_gap_s": max(((later - earlier) / 1e9 for earlier, later in pairwise(starts)), default=None),
        "peak_missed": _peak_missed(rss),
        "complete": any(row["kind"] == "end" for row in rows),
    }


def _total(row: Row, field: str) -> int:
    return sum(process[field] for process in row["processes"])


def _within(t_ns: int, first: int | None, last: int | None) -> bool:
    return first is not None and last is not None and first <= t_ns <= last


def _phase(t_ns: int, marks: Sequence[Mapping[str, Any]]) -> str | None:
    """The last mark at or before `t_ns`; progress marks are no phase."""
    before = [mark for mark in marks if mark["t_ns"] <= t_ns and mark["mark"] != "progress"]
    return max(before, key=lambda mark: mark["t_ns"])["mark"] if before else None


def _peak_missed(rss: Sequence[Row]) -> list[dict[str, Any]]:
    """Processes that once were larger than any sample of them shows."""
    sampled: dict[tuple[int, int], int] = {}
    recorded: dict[tuple[int, int], int] = {}
    names: dict[tuple[int, int], str] = {}
    tree_peak = 0
    for row in rss:
        tree = 0
        for process in row["processes"]:
            parts = [process[part] for part in ("rss_anon", "rss_file", "rss_shmem")]
            if None in parts or process["hwm"] is None:
                continue
            key = (process["pid"], process["start_ticks"])
            names[key] = process["name"]
            sampled[key] = max(sampled.get(key, 0), sum(parts))
            recorded[key] = max(recorded.get(key, 0), process["hwm"])
            tree += sum(parts)
        tree_peak = max(tree_peak, tree)
    return [
        {"pid": key[0], "name": names[key], "sampled_rss": sampled[key], "hwm": hwm}
        for key, hwm in recorded.items()
        if hwm - sampled[key] > HWM_TOLERANCE * hwm and hwm - sampled[key] > HWM_FLOOR * tree_peak
    ]
