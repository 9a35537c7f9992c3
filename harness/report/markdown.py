"""summary.json to report.md.  A pure function of the summary: the same evidence gives the same bytes."""

from __future__ import annotations

from typing import Any

from harness.analysis.ratios import AXES
from harness.report.text import (
    AXIS_NAMES,
    MIB,
    NONE,
    absolute,
    cell,
    flatten,
    interval,
    milliseconds,
    number,
    percent,
    ratio,
    short,
    table,
)

Summary = dict[str, Any]


def render(summary: Summary) -> str:
    """The whole report as Markdown."""
    parts = (
        _verdict, _arms, _ratios, _plots, _absolutes, _tokens, _occupancy, _memory, _correctness, _attempts, _identities, _machine,
        _reproduce,
    )
    lines = [line for part in parts for line in part(summary)]
    kept = [line for line, following in zip(lines, [*lines[1:], ""], strict=True) if line or following]
    return "\n".join(kept) + "\n"


def verdict_line(summary: Summary) -> str:
    """The verdict in one line: what, by how much, how sure, against which role."""
    primary = summary["primary"]
    pair = _pair(summary, primary["ours"], primary["base"])
    axis = pair["axes"].get(primary["axis"])
    word = summary["verdict"] + (f" ({summary['qualifier']})" if summary["qualifier"] else "")
    text = f"**{word}** · {AXIS_NAMES[primary['axis']]}, {_label(pair)}: "
    if axis is None or axis["ratio"] is None:
        return text + "no ratio"
    blocks = len(axis["per_block"])
    doubt = "one block, no interval" if axis["interval"] is None else f"95 % interval {interval(axis['interval'])} over {blocks} blocks"
    return text + f"{ratio(axis['ratio'])}x, {doubt}; margin {percent(primary['margin'], 1)}"


def _verdict(summary: Summary) -> list[str]:
    lines = [verdict_line(summary), "", f"# {cell(summary['title'] or summary['name'])}", ""]
    lines += [f"- {cell(reason)}" for reason in summary["reasons"]]
    if not summary["binding"]:
        lines.append("- not binding: the working tree was changed, or could not be read, so its commit does not name the code that ran")
    return [*lines, ""]


def _arms(summary: Summary) -> list[str]:
    work = summary["workload"]
    rows = []
    for name, arm in _arms_in_order(summary):
        who, resolved = arm["who"] or {}, arm["resolved"] or {}
        threads = resolved.get("threads")
        rows.append([
            f"**{name}**", arm["role"], f"{who.get('name') or NONE} {who.get('version') or NONE}", arm["client"], arm["depth"],
            resolved.get("dtype"), (arm["device"] or {}).get("kind"), threads, resolved.get("load"), resolved.get("enforce_eager"),
        ])
    return [
        "## What against what", "",
        f"{work['requests']} requests, {work['prompt_tokens']:,} prompt ids in all, {work['max_tokens']} outputs each, "
        f"{work['concurrency']} in flight, greedy; corpus `{work['corpus']}` {short(work['corpus_sha256'])}. "
        f"Begun {cell(summary['started_utc'])}.", "",
        *table(["arm", "role", "engine", "client", "depth", "dtype", "device", "threads", "load", "eager"], rows),
        *(f"- **{name}**: {cell(reason)}" for name, arm in _arms_in_order(summary) for reason in arm["role_reasons"]), "",
    ]


def _ratios(summary: Summary) -> list[str]:
    lines = [
        "## Ratios", "", "Ours over base, one ratio a block: their geometric mean, its 95 % interval, every block, the smallest "
        "effect this series could have seen, and each arm's spread, (max - min) / mean. ↑: 1 and above passes; ↓: 1 and below.", "",
    ]
    for pair in summary["pairs"]:
        lines += [f"### {_label(pair)}", ""]
        if pair["refused"]:
            lines += [cell(pair["refused"]), ""]
            continue
        rows = [_ratio_row(pair, axis, pair["axes"][axis]) for axis in AXES]
        lines += table(["axis", "against", "ratio", "95 % interval", "blocks", "detectable", "spread ours", "spread base", "verdict"], rows)
        lines += [*(f"- {cell(reason)}" for reason in [*pair["withheld"], *pair["errors"]]), ""]
    return lines


def _ratio_row(pair: Summary, name: str, axis: Summary) -> list[str]:
    arrow = "↑" if axis["higher_passes"] else "↓"
    blocks = " ".join(ratio(value) for value in axis["per_block"]) or NONE
    if axis["verdict"] == "VOID":
        verdict = "VOID"
    elif pair["withheld"]:
        verdict = next(iter(pair["withheld"]))
        verdict = verdict if len(verdict) < 40 else verdict.split(":")[0] + ", see below"
    else:
        verdict = axis["verdict"] + (f" ({axis['qualifier']})" if axis["qualifier"] else "")
    return [
        f"{AXIS_NAMES[name]} {arrow}", f"{pair['base']} [{pair['roles'][1]}]", ratio(axis["ratio"]), interval(axis["interval"]), blocks,
        percent(axis["detectable"]), percent(axis["spread_ours"]), percent(axis["spread_base"]), verdict,
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
    arms = dict(_arms_in_order(summary))
    rows = [[AXIS_NAMES[axis], *(absolute(axis, arm["means"][axis]) for arm in arms.values())] for axis in AXES]
    lines = ["## Absolute numbers", "", "Means over blocks.", "", *table(["axis", *arms], rows)]
    legs = [(name, leg) for name, arm in arms.items() for leg in arm["performance"]]
    rows = [
        [leg["leg"], number(leg["window"], 3), number(leg["total_throughput"]), milliseconds(leg["ttft"]["mean"]),
         *(_percentile(leg["ttft"], q) for q in ("median", "p90", "p95", "p99")), *_tpot(leg), milliseconds(leg["worst_gap"])]
        for _, leg in legs
    ]
    header = ["leg", "window s", "total tok/s", "TTFT ms", "median", "p90", "p95", "p99", "TPOT ms", "by token", "ITL median", "worst gap"]
    return [*lines, "Each leg. A percentile below its sample floor (p90 64, p95 130, p99 662) is n/a.", "", *table(header, rows)]


def _tpot(leg: Summary) -> list[str]:
    return [_percentile(leg["tpot"], "mean"), milliseconds(leg["tpot_by_token"]), _percentile(leg["itl"], "median")]


def _percentile(distribution: Summary | None, name: str) -> str:
    return NONE if distribution is None else milliseconds(distribution[name])


def _tokens(summary: Summary) -> list[str]:
    names = {"self": "one arm over its legs", "ours": "our arms", "pin": "ours against the other engine"}
    rows = [
        [f"{row['a']} / {row['b']}", names[row["kind"]], f"{row['identical']}/{row['of']}", "must agree" if row["gated"] else "reported"]
        for row in summary["tokens"]
    ]
    details = [
        line.strip() for row in summary["tokens"] if row["identical"] < row["of"]
        for line in [f"{row['a']} / {row['b']}:", *row["lines"][1:]]
    ]
    lines = ["## Token agreement", "", *table(["legs", "what", "identical outputs", "rule"], rows)]
    return [*lines, *(f"- {cell(line)}" for line in details), ""] if details else lines


def _occupancy(summary: Summary) -> list[str]:
    rows = []
    for arm in dict(_arms_in_order(summary)).values():
        for leg in arm["performance"]:
            full = leg["occupancy"]
            rows.append([
                leg["leg"], f"{number(full['mean_in_flight'])} of {full['concurrency']}", percent(full["ramp"], 1),
                percent(full["drain"], 1), number(full["steady_throughput"]), number(leg["total_throughput"]),
                *(leg["counters"].get(name) for name in ("steps", "mixed_steps", "preemptions", "prefix_cache_hits")),
            ])
    return [
        "## Occupancy", "", "Mean in flight by Little's law; ramp and drain as shares of the window; total tok/s inside the steady window "
        "(from first to last full) beside the whole run; the engine's own counters.", "",
        *table(["leg", "in flight", "ramp", "drain", "steady tok/s", "whole tok/s", "steps", "mixed", "preemptions", "cache hits"], rows),
        *(f"- {cell(warning)}" for warning in summary["occupancy_warnings"]), "",
    ]


def _memory(summary: Summary) -> list[str]:
    rows = [
        [leg["leg"], *(number(leg[name], 1, 1 / MIB) for name in ("peak_pss", "stable_pss")), (leg["peak"] or {}).get("phase"),
         *(number((leg["peak"] or {}).get(part), 1, 1 / MIB) for part in ("pss_anon", "pss_file", "pss_shmem")),
         leg["passes"], leg["partial_passes"], number(leg["max_gap_s"], 2), len(leg["peak_missed"])]
        for arm in dict(_arms_in_order(summary)).values() for leg in arm["memory"]
    ]
    return [
        "## Memory", "", "PSS of the whole process tree, MiB: the peak, the phase it fell in and its parts; the median between first and "
        "last token; how it was sampled.", "",
        *table(["leg", "peak", "stable", "phase", "anonymous", "file", "shared", "passes", "partial", "longest gap s", "missed"], rows),
    ]


def _correctness(summary: Summary) -> list[str]:
    gate = summary["correctness"]
    if gate is None:
        return ["## Correctness gate", "", "Not run.", ""]
    lines = [
        "## Correctness gate", "",
        f"{'Passed' if gate['ok'] else 'FAILED'}: {gate['passed']} of {gate['cases']} cases, {gate['skipped']} skipped; our arms "
        f"identical: {cell(gate['on_off_identical'])}; reference {short(gate['reference_sha256'])}.", "",
    ]
    return [*lines, *(f"- {cell(', '.join(f'{k} {v}' for k, v in sorted(failure.items())))}" for failure in gate["failures"]), ""]


def _attempts(summary: Summary) -> list[str]:
    lost = [attempt for attempt in summary["attempts"] if attempt["status"] != "ok"]
    if not lost:
        return ["## Attempts", "", f"All {len(summary['attempts'])} attempts were ok; none was repeated.", ""]
    rows = [
        [a["phase"] if a["repetition"] is None else f"{a['phase']}-{a['repetition']}", a["attempt"], a["status"],
         "; ".join(a["reasons"]) or NONE]
        for a in lost
    ]
    return ["## Attempts", "", f"{len(lost)} of {len(summary['attempts'])} attempts do not count.", "",
            *table(["block", "attempt", "status", "reasons"], rows)]


def _identities(summary: Summary) -> list[str]:
    rows = []
    for name, arm in _arms_in_order(summary):
        who = arm["who"] or {}
        rows.append([
            f"**{name}**", who.get("distribution"), who.get("version"), short(who.get("commit")), short(who.get("record_sha256")),
            short(arm["code_sha256"]), (arm["resolved"] or {}).get("attention_backend"), ", ".join(who.get("missing") or []) or "none",
        ])
    header = ["arm", "distribution", "version", "commit", "record", "staged code", "attention", "missing packages"]
    lines = ["## Identities", "", *table(header, rows)]
    settings = sorted({key for arm in dict(_arms_in_order(summary)).values() for key in (arm["resolved"] or {})})
    rows = [[key, *(cell((arm["resolved"] or {}).get(key)) for arm in dict(_arms_in_order(summary)).values())] for key in settings]
    return [*lines, "Settings as each engine resolved them:", "", *table(["setting", *summary["arm_order"]], rows)]


def _machine(summary: Summary) -> list[str]:
    return ["## Machine and repository", "", *table(["what", "value"], flatten(summary["series"]))]


def _reproduce(summary: Summary) -> list[str]:
    commit = summary["series"]["repository"]["commit"]
    return [
        "## How to reproduce", "", "```sh",
        f"git checkout {commit or '<commit unknown>'}",
        "parity run-series SERIES/spec.toml --out NEW  # the same plan again",
        "parity report SERIES                          # this page again, from the evidence",
        "parity tokens diff SERIES                     # the ids again",
        "```", "",
        f"Plan `{summary['plan_digest']}`, spec `{summary['spec_sha256']}`.", "",
        f"Evidence: manifest head `{summary['manifest_head']}`.", "",
    ]


def _arms_in_order(summary: Summary) -> list[tuple[str, Summary]]:
    """Arms as the plan lists them: JSON objects are stored sorted."""
    return [(name, summary["arms"][name]) for name in summary["arm_order"]]


def _pair(summary: Summary, ours: str, base: str) -> Summary:
    return next(pair for pair in summary["pairs"] if (pair["ours"], pair["base"]) == (ours, base))


def _label(pair: Summary) -> str:
    ours, base = map(cell, pair["roles"])
    return f"{pair['ours']} [{ours}] / {pair['base']} [{base}]"

