"""What an A/B or A/A tells beside its ratios: the one difference, tokens block by block, each gap beside the noise of the arms."""

from __future__ import annotations

from typing import Any

from harness.analysis.coverage import Share, sentence
from harness.analysis.ratios import AXES
from harness.report.text import AXIS_NAMES, NONE, cell, number, percent, table, whole

Summary = dict[str, Any]


def ab_lines(pair: Summary) -> list[str]:
    """The same in lines of plain text; empty for a pair that is no A/B."""
    found = pair["ab"]
    if found is None:
        return []
    if found["option"] is None:
        lines = [f"A/A: {pair['ours']} and {pair['base']} are one build under one set of options"]
    else:
        a, b = found["values"]
        lines = [f"A/B over one difference: {found['option']} is {cell(a)} in {pair['ours']}, {cell(b)} in {pair['base']}"]
    if found["also_resolved"]:
        lines.append(f"resolved differently because of it: {', '.join(found['also_resolved'])}")
    same = sum(block["identical"] == block["of"] for block in found["blocks"])
    lines.append(f"outputs identical in {same} of {len(found['blocks'])} blocks"
                 + "".join(f"; OUTPUT CHANGED {b['a']} / {b['b']} {b['identical']}/{b['of']}"
                           for b in found["blocks"] if b["identical"] < b["of"]))
    lines += [f"{AXIS_NAMES[axis]}: {sentence(Share(**share), 'intervals leave out 1')}"
              for axis, share in ((axis, found["alarms"].get(axis)) for axis in AXES) if share is not None]
    return lines


def ab_section(summary: Summary) -> list[str]:
    """A section of the report for each pair that is an A/B; nothing without one."""
    lines = []
    for pair in summary["pairs"]:
        if pair["ab"] is None:
            continue
        rows = [_row(axis, pair["axes"][axis], pair["ab"]["axes"][axis]) for axis in AXES if axis in pair["axes"]]
        header = ["axis", "gap", "spread, ours / base", "gap over spread", "block by block", "so", "equivalent"]
        lines += [
            f"## {pair['ab']['kind']}", "", *(f"- {cell(line)}" for line in ab_lines(pair)), "", *table(header, rows),
            "Neutral: the gap is inside the larger spread, and the blocks or the 95 % interval do not tell its direction. Equivalent: both "
            f"one-sided 95 % bounds lie within {percent(summary['primary']['margin'], 1)} of 1.", "",
        ]
    return lines


def _row(name: str, axis: Summary, noise: Summary | None) -> list[str]:
    if noise is None:
        return [AXIS_NAMES[name], *[NONE] * 6]
    so = "neutral" if noise["neutral"] else "inside the spread" if noise["inside"] else "beyond the spread"
    over = " / ".join(number(share) for share in noise["over_spread"])
    spreads = f"{percent(axis['spread_ours'], 3)} / {percent(axis['spread_base'], 3)}"
    return [AXIS_NAMES[name], percent(noise["gap"], 3), whole(spreads), whole(over), whole(" ".join(noise["signs"])), so,
            "yes" if noise["equivalent"] else "no"]
