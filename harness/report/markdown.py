"""summary.json to report.md.  A pure function of the summary: the same evidence gives the same bytes.

What a reader needs in two minutes stands open and first; harness/report/sections.py folds the rest away below it.
"""

from __future__ import annotations

from typing import Any

from harness.analysis.ratios import AXES, GPU_MEMORY, THROUGHPUT
from harness.report import sections
from harness.report.ab import ab_section
from harness.report.calibration import calibration_line
from harness.report.text import (
    AXIS_NAMES,
    NONE,
    Markup,
    absolute,
    arms_in_order,
    cell,
    folded,
    interval,
    label,
    percent,
    ratio,
    short,
    side,
    table,
    whole,
)

Summary = dict[str, Any]

HEADLINE = ("total_throughput", "ttft_mean", "tpot_mean", "peak_pss")
"""The axes of the table under the verdict."""


def render(summary: Summary) -> str:
    """The whole report as Markdown."""
    parts = (_verdict, _headline, ab_section, _arms, _plots, _absolutes, _ratios, *sections.ALL)
    lines = [line for part in parts for line in part(summary)]
    kept = [line for line, following in zip(lines, [*lines[1:], ""], strict=True) if line or following]
    return "\n".join(kept) + "\n"


def verdict_line(summary: Summary) -> str:
    """The verdict in one line: what, by how much, how sure, against which role."""
    primary = summary["primary"]
    pair = _pair(summary, primary["ours"], primary["base"])
    axis = pair["axes"].get(primary["axis"])
    word = summary["verdict"] + (f" ({summary['qualifier']})" if summary["qualifier"] else "")
    text = f"**{word}** · {AXIS_NAMES[primary['axis']]}, {label(pair)}: "
    if axis is None or axis["ratio"] is None:
        return text + "no ratio"
    blocks = len(axis["per_block"])
    doubt = "one block, no interval" if axis["interval"] is None else f"95 % interval {interval(axis['interval'])} over {blocks} blocks"
    company = "; within one contended series" if summary["contention"]["contended"] else ""
    return text + f"{ratio(axis['ratio'])}x, {doubt}; margin {percent(primary['margin'], 1)}{company}"


def _verdict(summary: Summary) -> list[str]:
    lines = [verdict_line(summary), "", f"# {cell(summary['title'] or summary['name'])}", ""]
    lines += [f"- {_plain(reason)}" for reason in summary["reasons"]]
    lines += [f"- {cell(line)}" for line in summary["contention"]["lines"]]
    if not summary["binding"]:
        lines.append("- not binding: the working tree was changed, or could not be read, so its commit does not name the code that ran")
    lines.append(calibration_line(summary))
    return [*lines, ""]


def _headline(summary: Summary) -> list[str]:
    """The pairs at a glance: one row each, with the role of both arms beside every ratio."""
    axes = summary["pairs"][0]["axes"]
    primary = summary["primary"]["axis"]
    shown = HEADLINE if primary in HEADLINE else (primary, *HEADLINE)
    rows = [
        [Markup(f"**{label(pair)}**"), *(_with_interval(pair["axes"].get(axis)) for axis in shown), _word(pair, pair["axes"].get(primary))]
        for pair in summary["pairs"]
    ]
    arrows = {axis: "↑" if axis in THROUGHPUT else "↓" for axis in shown}
    header = ["ours / base", *(whole(f"{AXIS_NAMES[axis]} {arrows[axis]}") for axis in shown), "verdict"]
    blocks = ", ".join(f"{len(axes[axis]['per_block'])} {phase}" for axis, phase in
                       (("total_throughput", "performance"), ("peak_pss", "memory")) if axis in axes)
    return [
        *table(header, rows),
        f"Ours over base, geometric mean over blocks ({blocks or 'none'}); below it the 95 % interval. ↑: 1 and above passes; ↓: 1 and "
        f"below. The verdict is on {AXIS_NAMES[primary]}.", "",
    ]


def _with_interval(axis: Summary | None) -> str:
    if axis is None or axis["ratio"] is None:
        return NONE
    return Markup(f"**{ratio(axis['ratio'])}**<br>{interval(axis['interval']) if axis['interval'] else whole('no interval')}")


def _word(pair: Summary, axis: Summary | None) -> str:
    """The verdict of one axis in a few words."""
    if axis is None:
        return "refused"
    if axis["verdict"] == "VOID":
        return "VOID"
    if pair["withheld"]:
        brief = str(pair["withheld"][0]).partition(" (")[0]
        return whole(brief if len(brief) < 40 else "no verdict, see below")
    return whole(axis["verdict"] + (f" ({axis['qualifier']})" if axis["qualifier"] else ""))


def _plain(reason: str) -> str:
    """A reason with the axis called by its name."""
    axis, colon, rest = reason.partition(": ")
    return cell(f"{AXIS_NAMES[axis]}{colon}{rest}" if axis in AXIS_NAMES else reason)


def _arms(summary: Summary) -> list[str]:
    work = summary["workload"]
    rows = []
    for name, arm in arms_in_order(summary):
        who, resolved = arm["who"] or {}, arm["resolved"] or {}
        engine = whole(f"{who.get('name') or NONE} {who.get('version') or NONE}")
        rows.append([
            f"**{name}**", arm["role"], engine, (arm["device"] or {}).get("kind"), resolved.get("dtype"), resolved.get("load"),
            arm["client"], arm["depth"], resolved.get("threads"), resolved.get("enforce_eager"),
        ])
    return [
        "## What against what", "",
        f"{work['requests']} requests, {work['prompt_tokens']:,} prompt ids in all, {work['max_tokens']} outputs each, "
        f"{work['concurrency']} in flight, greedy; corpus `{work['corpus']}` {short(work['corpus_sha256'])}. "
        f"Begun {whole(cell(summary['started_utc']))}.", "",
        *table(["arm", "role", "engine", "device", "dtype", "load", "client", "depth", "threads", "eager"], rows, text=7),
        *(f"- **{name}**: {cell(reason)}" for name, arm in arms_in_order(summary) for reason in arm["role_reasons"]), "",
    ]


def _plots(summary: Summary) -> list[str]:
    arms = summary["arms"].values()
    figures = []
    if any(arm["performance"] for arm in arms):
        figures += ["![Time to first token and time per output token of each request, by arm](plots/latency.svg)", ""]
    if any(arm["memory"] for arm in arms):
        figures += ["![PSS of the process tree over time, by arm](plots/memory.svg)", ""]
    return figures


def _absolutes(summary: Summary) -> list[str]:
    arms = dict(arms_in_order(summary))
    rows = [[AXIS_NAMES[axis], *(whole(absolute(axis, arm["means"][axis])) for arm in arms.values())] for axis in AXES
            if any(axis in pair["axes"] for pair in summary["pairs"]) or axis != GPU_MEMORY]
    header = ["mean over blocks", *(whole(f"{name} [{cell(arm['role'])}]") for name, arm in arms.items())]
    return ["## Absolute numbers", "", *table(header, rows)]


def _ratios(summary: Summary) -> list[str]:
    """Every axis of every pair; the first pair, which decides, stands open."""
    lines = [
        "## Every ratio", "", "Beside each ratio: its 95 % interval, every block, the smallest effect this series could have seen, and the "
        "spread, (max - min) / mean, of either arm.", "",
    ]
    header = ["axis", "against", "ratio", "95 % interval", "every block", "detectable", whole("spread, ours / base"), "verdict"]
    for number, pair in enumerate(summary["pairs"]):
        if pair["refused"]:
            lines += [f"### {label(pair)}", "", cell(pair["refused"]), ""]
            continue
        body = [
            *table(header, _ratio_rows(pair), text=2),
            *(f"- {cell(reason)}" for reason in [*pair["withheld"], *pair["errors"]]), "",
        ]
        lines += [f"### {label(pair)}", "", *body] if number == 0 else folded(f"<b>{label(pair)}</b>", body)
    return lines


def _ratio_rows(pair: Summary) -> list[list[str]]:
    """A row an axis; throughputs that give one and the same ratio, as they must at fixed counts, share theirs."""
    axes = pair["axes"]
    same = not pair["errors"]
    rows = [_ratio_row(pair, whole("throughput, all three") if same else AXIS_NAMES[THROUGHPUT[0]], axes[THROUGHPUT[0]])]
    rest = [axis for axis in AXES if axis in axes and axis not in (THROUGHPUT if same else THROUGHPUT[:1])]
    return rows + [_ratio_row(pair, AXIS_NAMES[axis], axes[axis]) for axis in rest]


def _ratio_row(pair: Summary, name: str, axis: Summary) -> list[str]:
    arrow = "↑" if axis["higher_passes"] else "↓"
    blocks = whole(" ".join(ratio(value) for value in axis["per_block"][:3]))
    blocks = " ".join([blocks, *(ratio(value) for value in axis["per_block"][3:])]) or NONE
    spreads = NONE if axis["spread_ours"] is None and axis["spread_base"] is None else \
        whole(f"{percent(axis['spread_ours'], 1)} / {percent(axis['spread_base'], 1)}")
    return [
        f"{name} {arrow}", side(pair, 1), ratio(axis["ratio"]), interval(axis["interval"]), blocks, percent(axis["detectable"], 1), spreads,
        _word(pair, axis),
    ]


def _pair(summary: Summary, ours: str, base: str) -> Summary:
    return next(pair for pair in summary["pairs"] if (pair["ours"], pair["base"]) == (ours, base))
