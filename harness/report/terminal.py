"""What a person reads in a terminal: the plan before a series, the verdict and the ratios after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from harness.analysis.ratios import AXES
from harness.report.markdown import verdict_line
from harness.report.text import AXIS_NAMES, interval, percent, ratio


def plan_table(plan: dict[str, Any]) -> Table:
    """One row a leg, in the order they run."""
    table = Table(title=f"{plan['name']}: {plan['title']}", caption=f"plan {plan['digest'][:12]}", show_lines=False)
    for column in ("#", "leg", "phase", "driver", "oracle", "options", "environment"):
        table.add_column(column)
    arms = {arm["name"]: arm for arm in plan["arms"]}
    before = (plan["correctness"] or {"legs": []})["legs"] + plan["warmup"]
    for number, leg in enumerate(before + plan["legs"], 1):
        arm = arms[leg["arm"]]
        table.add_row(
            str(number), leg["name"], leg.get("phase") or leg["name"].split("-")[0], arm["driver"], arm["oracle"] or "",
            _pairs(arm["options"]), _pairs(arm["environment"]),
        )
    return table


def print_summary(summary: dict[str, Any], series: Path, console: Console) -> None:
    """The verdict line, its reasons, and a table of ratios for each pair."""
    console.print(verdict_line(summary).replace("**", ""), markup=False, highlight=False, soft_wrap=True)
    for reason in summary["reasons"]:
        console.print(f"  {reason}", markup=False, highlight=False, soft_wrap=True)
    for pair in summary["pairs"]:
        if pair["refused"] or not pair["axes"]:
            continue
        table = Table(title=f"{pair['ours']} / {pair['base']} ({pair['roles'][1]})", title_justify="left")
        for column in ("axis", "ratio", "95 % interval", "spread", "verdict"):
            table.add_column(column)
        for name in AXES:
            axis = pair["axes"][name]
            spreads = " / ".join(percent(axis[side], 1) for side in ("spread_ours", "spread_base"))
            table.add_row(AXIS_NAMES[name], ratio(axis["ratio"]), interval(axis["interval"]), spreads, axis["verdict"])
        console.print(table)
    console.print(f"report: {series / 'report.md'}", markup=False, highlight=False, soft_wrap=True)


def _pairs(values: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())
