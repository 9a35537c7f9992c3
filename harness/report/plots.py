"""The report's figures as SVG.  Equal evidence gives equal bytes: fixed ids, no date, text kept as text.

Each figure has a transparent ground and mid-grey text and axes, so that it can be read on a light page and on a dark one.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from harness.analysis.metrics import request_metrics, window_seconds
from harness.analysis.occupancy import mean_in_flight_over_time
from harness.evidence.schema import Leg, Series

INK = "#7d8590"
COLOURS = ("#2f81f7", "#db6d28", "#2da44e", "#a475f9", "#d29922", "#e5534b")
"""One for each arm, in the plan's order; each has a contrast of 3 or more on white and on GitHub's dark ground."""

STYLE = {
    "svg.hashsalt": "vllm-parity", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10, "text.color": INK,
    "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.titlecolor": INK,
    "path.simplify": False,  # every vertex is drawn, so that a plot can be checked by its data
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": INK, "grid.alpha": 0.25, "grid.linewidth": 0.6,
}
SHOWN_MARKS = {"loaded": "right", "ready": "left", "first_submit": "right", "last_token": "left"}
"""Marks drawn in the memory figure, and the side of its line at which a label ends or begins: neighbours turn away from each other."""
BINS = 120
"""Of the in-flight figure: a count dips at each finish, for the microseconds until the next submission; a mean over a bin weighs that."""
MIB = 2**20


def latency_svg(series: Series) -> str | None:
    """TTFT and TPOT of every request of every accepted performance leg, as one cumulative curve per arm; None without such legs."""
    legs = {arm: [leg for leg in series.legs(arm) if leg.phase == "performance"] for arm in series.arms}
    if not any(legs.values()):
        return None
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 3.2), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        for colour, (arm, runs) in zip(_colours(), legs.items(), strict=False):
            requests = [request_metrics(trace) for leg in runs for trace in leg.traces]
            _cumulative(left, [r.ttft * 1000 for r in requests], colour, _label(arm, runs))
            _cumulative(right, [r.tpot * 1000 for r in requests if r.tpot is not None], colour, None)
        left.set(xlabel="TTFT, ms", ylabel="share of requests", ylim=(0, 1.02))
        right.set(xlabel="TPOT, ms")
        for axes in (left, right):
            axes.set_xlim(left=0)
        figure.legend(loc="outside upper center", ncols=len(legs), frameon=False)
        return _svg(figure)


def in_flight_svg(series: Series) -> str | None:
    """Mean requests in flight over time: a row per arm, a line per accepted performance leg; None without such legs."""
    legs = {arm: [leg for leg in series.legs(arm) if leg.phase == "performance"] for arm in series.arms}
    if not any(legs.values()):
        return None
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 0.8 + 0.95 * len(legs)), layout="constrained")
        rows = figure.subplots(len(legs), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        for axes, colour, (arm, runs) in zip(rows, _colours(), legs.items(), strict=False):
            for leg in runs:
                bins = mean_in_flight_over_time(leg.traces, BINS)
                axes.stairs([count for _, count in bins], [t for t, _ in bins] + [window_seconds(leg.traces)], color=colour, alpha=0.75)
            axes.set_title(_label(arm, runs), loc="left", fontsize=10)
        rows[0].set_ylim(0, series.plan["workload"]["concurrency"] * 1.1)
        rows[0].set_xlim(left=0)
        rows[0].yaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
        rows[-1].set_xlabel("seconds since the leg's first submission")
        figure.supylabel("requests in flight", color=INK, fontsize=10)
        return _svg(figure)


def memory_svg(series: Series) -> str | None:
    """PSS of the process tree over time: one row per arm, its first accepted memory leg, with the leg's marks; None without one."""
    legs = [leg for arm in series.arms for leg in series.legs(arm) if leg.phase == "memory" and leg.repetition == _first(series)]
    if not legs:
        return None
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 0.9 + 1.35 * len(legs)), layout="constrained")
        rows = figure.subplots(len(legs), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        for axes, leg in zip(rows, legs, strict=True):
            _memory_row(axes, leg, COLOURS[series.arms.index(leg.arm) % len(COLOURS)])
        rows[0].set_ylim(0, rows[0].get_ylim()[1] * 1.6)
        rows[-1].set_xlabel("seconds since the leg's first sample")
        figure.supylabel("PSS, MiB", color=INK, fontsize=10)
        return _svg(figure)


def pss_over_time(rows: Sequence[dict[str, Any]]) -> list[tuple[int, int | None]]:
    """(t_ns, bytes) of each PSS pass; None where the pass is partial: a partial sum is no total."""
    points: list[tuple[int, int | None]] = []
    for row in rows:
        if row["kind"] == "pss":
            parts = [process["pss"] for process in row["processes"]]
            points.append((row["t_ns"], None if row["partial"] or None in parts else sum(parts)))
    return points


def _memory_row(axes: Axes, leg: Leg, colour: str) -> None:
    points = pss_over_time(leg.memory)
    start = points[0][0] if points else 0
    axes.plot([(t - start) / 1e9 for t, _ in points], [float("nan") if size is None else size / MIB for _, size in points],
              color=colour, linewidth=1.6)
    axes.set_title(_label(leg.arm, [leg]), loc="left", fontsize=10)
    for mark in leg.marks:
        if mark["mark"] in SHOWN_MARKS:
            at = (mark["t_ns"] - start) / 1e9
            axes.axvline(at, color=INK, linewidth=0.8, linestyle=":")
            axes.annotate(mark["mark"].replace("_", " "), (at, 0.97), xycoords=("data", "axes fraction"), rotation=90, fontsize=8,
                          ha=SHOWN_MARKS[mark["mark"]], va="top")


def _cumulative(axes: Axes, samples: list[float], colour: str, label: str | None) -> None:
    if samples:
        axes.ecdf(samples, color=colour, label=label, linewidth=1.8)


def _first(series: Series) -> int | None:
    blocks = series.accepted("memory")
    return blocks[0].repetition if blocks else None


def _label(arm: str, legs: Sequence[Leg]) -> str:
    return f"{arm} ({legs[0].record['role']})" if legs else arm


def _colours() -> Sequence[str]:
    return COLOURS * 8


def _svg(figure: Figure) -> str:
    sink = io.StringIO()
    figure.savefig(sink, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return sink.getvalue()
