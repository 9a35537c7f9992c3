"""A calibration as a table, and what a report quotes of the newest one of its machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.report.text import AXIS_NAMES, percent, short, table

Record = Mapping[str, Any]


def page(record: Record) -> str:
    """calibration.md: what the instrument sees, then every case."""
    word = "as expected, every case" if record["ok"] else f"NOT as expected: {', '.join(c['case'] for c in record['cases'] if not c['ok'])}"
    title = f"# Calibration of {record['machine']['host']}, {record['started_utc']}"
    note = ("Sizes of slowdowns are shares of the measured time, true as the arm counted its own waits; two-sided intervals of 95 %. "
            f"Intervals of {record['window']} neighbouring blocks overlap and share legs, so fewer are independent than are counted, and "
            "the true bound of their share is wider than the one shown.")
    return "\n".join([f"**{word}** · {sees(record)}", "", title, "", *cases(record), note]) + "\n"


def cases(record: Record) -> list[str]:
    """The table, a row a case."""
    rows = [[case[name] for name in ("case", "injected", "measured", "expected", "got")] + ["yes" if case["ok"] else "**NO**"]
            for case in record["cases"]]
    return table(["case", "injected, true size", "measured", "verdict expected", "verdict got", "as expected"], rows, text=6)


def sees(record: Record) -> str:
    """`this instrument, on this machine, sees x %`, with what it was shown."""
    if record["detectable"] is None:
        return "what this instrument sees on this machine is not known: its healthy arms gave no interval"
    shown = ", ".join(f"{percent(one['true'], 1)} {'seen' if one['seen'] else 'not seen'}" for one in record["slowdowns"])
    return (f"this instrument, on this machine, sees {percent(record['detectable'], 1)} of {AXIS_NAMES[record['axis']]} "
            f"({record['blocks']} blocks of two equal arms); slowdowns injected: {shown}")


def calibration_line(summary: Record) -> str:
    """What a report quotes; it was looked up when the series began, so that the report still follows from the series alone."""
    quote = summary["series"].get("calibration")
    if quote is None:
        return "- no calibration of this machine was on record when this series began: what this instrument sees here is not known"
    doubt = "" if quote["ok"] else "; not every case of it was as expected"
    return f"- {sees(quote)} ({quote['record']} {short(quote['head'])}{doubt})"
