"""A nightly as one page for the summary of a CI job."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.nightly import Night, worst
from harness.report.text import AXIS_NAMES, NONE, Markup, cell, interval, label, percent, ratio, short, table
from harness.verdict import Exit

WORDS = {
    Exit.PASS: "all passed", Exit.INCONCLUSIVE: "not all decided", Exit.VOID: "not all known: conditions were broken",
    Exit.REFUSED: "not all known: something did not run", Exit.FAIL: "a regression", Exit.ERROR: "something is broken",
}
PAGE = "nightly.md"
SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"
"""Where GitHub's runner names the file whose Markdown it shows on a job's page."""


def page(title: str, nights: Sequence[Night]) -> str:
    """The nightly in Markdown: the worst first, a row a series, then why any of them did not pass."""
    code = worst(list(nights))
    lines = [f"## {cell(title)}: {code.name}, {WORDS[code]}", "", *table(
        ["series", "says", "ours / base", "axis", "ratio", "95 % interval", "blocks", "detectable", "seal"],
        [_row(night) for night in nights], text=4)]
    for night in nights:
        if reasons := _reasons(night):
            lines += [f"**{cell(night.name)}**: {says(night)}", "", *(f"- {cell(reason)}" for reason in reasons), ""]
    return "\n".join(lines)


def says(night: Night) -> str:
    """One series in a few words.  What ran in company is unknown, whatever its ratios."""
    if night.summary is None:
        return "not run"
    summary = night.summary
    if summary["correctness"] is not None and not summary["correctness"]["ok"]:
        return f"{summary['verdict']}: wrong tokens"
    if summary["contention"]["contended"]:
        return "unknown: contended" if night.code != Exit.ERROR else "ERROR"
    if night.code == Exit.VOID:
        return "unknown: VOID"
    return str(summary["verdict"]) + (f" ({summary['qualifier']})" if summary["qualifier"] else "")


def publish(folder: Path, title: str, nights: Sequence[Night]) -> str:
    """Write the page beside the evidence and, where the variable is set, append it to the job's summary; returns it."""
    text = page(title, nights)
    folder.mkdir(parents=True, exist_ok=True)  # not there yet when every series was refused
    (folder / PAGE).write_text(text, encoding="utf-8")
    if target := os.environ.get(SUMMARY_VARIABLE):
        with Path(target).open("a", encoding="utf-8") as sink:  # other steps write to it as well
            sink.write(text + "\n")
    return text


def _row(night: Night) -> list[Any]:
    state = Markup(f"**{cell(says(night))}**")
    if night.summary is None:
        return [night.name, state, *[NONE] * 7]
    primary = night.summary["primary"]
    pair = next(pair for pair in night.summary["pairs"] if (pair["ours"], pair["base"]) == (primary["ours"], primary["base"]))
    axis = pair["axes"].get(primary["axis"])
    known = axis is not None and axis["ratio"] is not None and not night.summary["contention"]["contended"]
    numbers = [ratio(axis["ratio"]), interval(axis["interval"]), len(axis["per_block"]), percent(axis["detectable"], 1)] if known \
        else [NONE] * 4
    return [night.name, state, label(pair), AXIS_NAMES[primary["axis"]], *numbers, short(night.summary["manifest_head"])]


def _reasons(night: Night) -> list[str]:
    if night.summary is None:
        return [night.refused or "no reason given"]
    if night.code == Exit.PASS:
        return []
    return [*night.summary["reasons"], *night.summary["contention"]["lines"]]
