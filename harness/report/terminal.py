"""What a person reads in a terminal: the plan before a series, the verdict and the ratios after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from harness.analysis.ratios import AXES
from harness.report.ab import ab_lines
from harness.report.markdown import verdict_line
from harness.report.near_tie import headlines
from harness.report.text import AXIS_NAMES, interval, percent, ratio

SAME_AS_TOTAL = ("output_throughput", "request_throughput")
"""At fixed counts these ratios equal that of total throughput; the report has them."""


def print_plan(plan: dict[str, Any], console: Console) -> None:
    """Who runs with what, then the legs in the order they run, a block a row."""
    work = plan["workload"]
    console.print(f"{plan['name']}: {plan['title']}", markup=False, highlight=False)
    console.print(f"{work['requests']} requests, {work['prompt_tokens']:,} prompt ids, {work['max_tokens']} outputs each, "
                  f"{work['concurrency']} in flight; {len(plan['legs'])} legs; plan {plan['digest'][:12]}", highlight=False)
    for arm in plan["arms"]:
        console.print(f"\n{arm['name']}: {arm['driver']}" + (f", oracle {arm['oracle']}" if arm["oracle"] else ""), highlight=False)
        for title in ("options", "environment"):
            console.print(f"  {title}: {' '.join(f'{name}={value}' for name, value in arm[title].items())}", highlight=False)
    table = Table(show_edge=False)
    for column in ("block", "arms, in this order"):
        table.add_column(column)
    table.add_row("ceiling, in no number", plan["ceiling"]["name"])
    if plan["correctness"]:
        table.add_row(f"correctness, {plan['correctness']['cases']} cases an arm", " ".join(plan["correctness"]["arms"]))
    table.add_row("warmup, in no number", " ".join(leg["arm"] for leg in plan["warmup"]))
    for block in plan["blocks"]:
        table.add_row(f"{block['phase']}-{block['repetition']}", " ".join(block["order"]))
    console.print()
    console.print(table)


def print_summary(summary: dict[str, Any], series: Path, console: Console) -> None:
    """The verdict line, its reasons, and a table of ratios for each pair."""
    console.print(verdict_line(summary).replace("**", ""), markup=False, highlight=False, soft_wrap=True)
    for reason in [*summary["reasons"], *summary["contention"]["lines"], *headlines(summary)]:
        console.print(f"  {reason}", markup=False, highlight=False, soft_wrap=True)
    for pair in summary["pairs"]:
        if pair["refused"] or not pair["axes"]:
            continue
        table = Table(title=f"{pair['ours']} / {pair['base']} ({pair['roles'][1]})", title_justify="left")
        for column in ("axis, and what passes", "ratio", "95 % interval", "detectable", "spread", "verdict"):
            table.add_column(column, no_wrap=True)
        for name in (axis for axis in AXES if axis in pair["axes"] and axis not in SAME_AS_TOTAL):
            axis = pair["axes"][name]
            spreads = " / ".join(percent(axis[side], 1) for side in ("spread_ours", "spread_base"))
            named = f"{AXIS_NAMES[name]} {'≥ 1' if axis['higher_passes'] else '≤ 1'}"
            word = axis["verdict"] + (f" ({axis['qualifier']})" if axis["qualifier"] else "")
            table.add_row(named, ratio(axis["ratio"]), interval(axis["interval"]), percent(axis["detectable"], 1), spreads, word)
        console.print(table)
        for line in ab_lines(pair):
            console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"report: {series / 'report.md'}", markup=False, highlight=False, soft_wrap=True)
