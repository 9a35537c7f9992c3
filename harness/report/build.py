"""From a series directory to its derived files.  Only derived files are written; the evidence is proven first and never touched."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from harness.analysis.drift import compare_series
from harness.analysis.summary import summarize
from harness.evidence.layout import PLOTS, REPORT, SUMMARY
from harness.evidence.near_ties import find_record
from harness.evidence.schema import Series, load_series
from harness.evidence.store import BrokenSeal, check_seal
from harness.report.markdown import render
from harness.report.plots import in_flight_svg, latency_svg, memory_svg
from legs.protocol import to_json


def summarize_series(path: Path) -> dict[str, Any]:
    """The summary of a sealed series; writes nothing.  Raises BrokenSeal and EvidenceError."""
    return load_summary(path)[1]


def load_summary(path: Path) -> tuple[Series, dict[str, Any]]:
    """A sealed series and its summary, with the near-tie record beside it where there is one; writes nothing.

    Raises BrokenSeal and EvidenceError, also for a record that does not hold or is of another series.
    """
    check_seal(path)
    series = load_series(path)
    return series, summarize(series, find_record(path, series))


def compare_dirs(before: Path, after: Path) -> dict[str, Any]:
    """What moved between two sealed series (`analysis/drift.py`).  Raises BrokenSeal and EvidenceError."""
    (a, summary_a), (b, summary_b) = load_summary(before), load_summary(after)
    return compare_series(a, b, (summary_a, summary_b))


def build_report(path: Path) -> dict[str, Any]:
    """Prove the seal of a series, then write summary.json, report.md and plots/*.svg in it and return the summary.

    Raises BrokenSeal when the evidence is not what was recorded, EvidenceError when it cannot be read as a series, or when the near-tie
    record beside it does not hold or is of another series.
    """
    series, summary = load_summary(path)
    (path / PLOTS).mkdir(exist_ok=True)
    for name, figure in figures(series, summary).items():
        if figure is not None:
            _replace(path / PLOTS / name, figure.encode())
        else:
            (path / PLOTS / name).unlink(missing_ok=True)  # an earlier page's
    _replace(path / SUMMARY, to_json(summary))
    _replace(path / REPORT, render(summary).encode())
    return summary


def figures(series: Series, summary: dict[str, Any]) -> dict[str, str | None]:
    """The plots of a series by file name, each as SVG; None for one that this series does not have."""
    timed = not summary["contention"]["contended"]
    return {
        "latency.svg": latency_svg(series) if timed else None, "in_flight.svg": in_flight_svg(series) if timed else None,
        "memory.svg": memory_svg(series),
    }


def _replace(path: Path, data: bytes) -> None:
    """Overwrite a derived file whole; a symbolic link in its place, or above it, is refused and not followed."""
    if path.is_symlink() or path.parent.is_symlink():
        raise BrokenSeal(f"{path}: a symbolic link where a derived file belongs; remove it")
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_bytes(data)
    os.replace(scratch, path)
