"""The parts of a report below its first page: every leg's numbers, agreement, occupancy, memory, gate, attempts, identities, machine.

What fits a few lines stands open; long tables are folded.
"""

from __future__ import annotations

from typing import Any

from harness.evidence.layout import CEILING
from harness.report.near_tie import near_tie_section
from harness.report.text import (
    MIB,
    NONE,
    arms_in_order,
    cell,
    flatten,
    folded,
    milliseconds,
    number,
    percent,
    short,
    table,
    whole,
)
from harness.report.vllm_bench import vllm_bench_section
from harness.report.watched import watched

Summary = dict[str, Any]


def _latencies(summary: Summary) -> list[str]:
    legs = [leg for _, arm in arms_in_order(summary) for leg in arm["performance"]]
    rows = [
        [leg["leg"], number(leg["window"], 3), number(leg["total_throughput"]), milliseconds(leg["ttft"]["mean"]),
         milliseconds(leg["ttft_scheduled"]["mean"]), *_tpot(leg), milliseconds(leg["worst_gap"]), milliseconds(leg["e2e"]["mean"])]
        for leg in legs
    ]
    header = ["leg", "window s", "total tok/s", "TTFT ms", "scheduled", "TPOT ms", "by token", "ITL median", "worst gap", "E2E ms"]
    note = ("A percentile below its sample floor (p90 64, p95 130, p99 662) is n/a; beside each stands its one-sided 99 % upper bound over "
            "the requests of that leg.")
    tails = [
        [leg["leg"], name, leg[key]["n"] if leg[key] else None, _percentile(leg[key], "median"),
         *(_bounded(leg[key], q) for q in (90, 95, 99)), _percentile(leg[key], "maximum")]
        for leg in legs for name, key in (("TTFT", "ttft"), ("TPOT", "tpot"), ("E2E", "e2e"))
    ]
    tail_header = ["leg", "of each request, ms", "n", "median", "p90", "p95", "p99", "maximum"]
    return ["## Latency", "", *folded("Latency of each performance leg", table(header, rows)),
            *folded("Percentiles of each performance leg", [note, "", *table(tail_header, tails, text=2)]), *vllm_bench_section(summary)]


def _bounded(distribution: Summary | None, q: int) -> str:
    """A percentile and the bound it stays below."""
    value, upper = _percentile(distribution, f"p{q}"), _percentile(distribution, f"p{q}_upper")
    return value if value == NONE else whole(f"{value} (≤ {upper})")


def _tpot(leg: Summary) -> list[str]:
    return [_percentile(leg["tpot"], "mean"), milliseconds(leg["tpot_by_token"]), _percentile(leg["itl"], "median")]


def _percentile(distribution: Summary | None, name: str) -> str:
    return NONE if distribution is None else milliseconds(distribution[name])


def _tokens(summary: Summary) -> list[str]:
    names = {"self": "one arm over its legs", "ours": "our arms", "pin": "ours against the other engine",
             "ab": "both arms in one block"}
    rows = [
        [f"{row['a']} / {row['b']}", names[row["kind"]], f"{row['identical']}/{row['of']}", "must agree" if row["gated"] else "reported"]
        for row in summary["tokens"]
    ]
    details = [
        line.strip() for row in summary["tokens"] if row["identical"] < row["of"]
        for line in [f"{row['a']} / {row['b']}:", *row["lines"][1:]]
    ]
    gated = [row for row in summary["tokens"] if row["gated"]]
    wrong = sum(row["identical"] < row["of"] for row in gated)
    lines = ["## Tokens", "", f"{len(gated) - wrong} of {len(gated)} comparisons that must agree do: our arms with each other, and each of "
             "them with itself over its legs. Against another engine agreement is reported, not asked.", ""]
    lines += [*(f"- {cell(line)}" for line in details), ""] if details else []
    return lines + folded("Every comparison", table(["legs", "what", "identical outputs", "rule"], rows))


def _occupancy(summary: Summary) -> list[str]:
    rows = []
    for arm in dict(arms_in_order(summary)).values():
        for leg in arm["performance"]:
            full = leg["occupancy"]
            rows.append([
                leg["leg"], f"{number(full['mean_in_flight'])} of {full['concurrency']}", percent(full["ramp"], 1),
                percent(full["drain"], 1), number(full["steady_throughput"]), number(leg["total_throughput"]),
                *(leg["counters"].get(name) for name in ("steps", "mixed_steps", "preemptions", "prefix_cache_hits")),
            ])
    note = ("Mean in flight by Little's law; ramp and drain as shares of the window; total tok/s inside the steady window (from first to "
            "last full) beside the whole run; the engine's own counters.")
    header = ["leg", "in flight", "ramp", "drain", "steady tok/s", "whole tok/s", "steps", "mixed", "preemptions", "cache hits"]
    said = [f"- {cell(warning)}" for warning in summary["occupancy_warnings"]]
    if not said and all(arm["performance"] for arm in summary["arms"].values()):
        said = ["Every pair of arms was equally full, within 1 %."]
    figure = ["![Requests in flight over time, by arm](plots/in_flight.svg)", ""] if rows else []
    return ["## Occupancy", "", *said, "", *figure, *folded("Occupancy of each performance leg", [note, "", *table(header, rows)])]


def _ceiling(summary: Summary) -> list[str]:
    ceiling = summary["ceiling"]
    if ceiling is None:
        return ["## Client ceiling", "", f"Not measured: {cell(_no_ceiling(summary))}.", ""]
    rows = [
        [name, number((arm or {}).get("requests_per_s")), number((arm or {}).get("deltas_per_s")), *_client_share(arm)]
        for name, arm in ((name, ceiling["arms"][name]) for name, _ in arms_in_order(summary))
    ]
    return [
        "## Client ceiling", "",
        f"Against an engine that answers at once the `{cell(ceiling['client'])}` client reaches {number(ceiling['requests_per_s'])} "
        f"requests/s and {number(ceiling['deltas_per_s'], 0)} deltas/s: {number(ceiling['seconds_per_delta'], 3, 1e6)} µs a delta, which "
        f"adds {number(ceiling['tpot'], 3, 1e6)} µs to TPOT. An arm above {percent(ceiling['limit'], 0)} of it is "
        "CLIENT-BOUND: no verdict.", "",
        *table(["arm, its nearest leg", "requests/s", "deltas/s", "of the ceiling", "so"], rows),
    ]


def _no_ceiling(summary: Summary) -> str:
    """Why there is no ceiling: what ended the last attempt at it."""
    ended = [attempt["reasons"] for attempt in summary["attempts"] if attempt["phase"] == CEILING]
    if not ended:
        return "this series has no leg against the null engine"
    return "; ".join(ended[-1]) or "its leg gave no reason"


def _client_share(arm: Summary | None) -> list[str]:
    return [NONE, NONE] if arm is None else [percent(arm["share"]), "CLIENT-BOUND" if arm["bound"] else "the engine's"]


def _memory(summary: Summary) -> list[str]:
    legs = [leg for _, arm in arms_in_order(summary) for leg in arm["memory"]]
    rows = [
        [leg["leg"], _mib(leg["peak_pss"]), *(_mib((leg["peak"] or {}).get(part)) for part in ("pss_anon", "pss_file", "pss_shmem")),
         (leg["peak"] or {}).get("phase"), _mib(leg["stable_pss"]), *(_mib(leg["sampling"][key]) for key in ("gpu_peak", "available_min"))]
        for leg in legs
    ]
    header = ["leg", "peak PSS", "anonymous", "file", "shared", "peak after", "stable PSS", "GPU peak", "MemAvailable, lowest"]
    return [
        "## Memory", "", "Of the whole process tree, in MiB: the largest pass with its parts and the mark before it; the median between "
        "first and last token. What could not be read is n/a.", "",
        *table(header, rows), *(f"- {cell(line)}" for leg in legs for line in [*_memory_doubts(leg), *_memory_cgroup(leg)]), "",
        *folded("How memory was sampled", _sampling(legs)),
    ]


def _sampling(legs: list[Summary]) -> list[str]:
    rows = [
        [leg["leg"], leg["passes"], leg["partial_passes"], number(leg["sampling"]["period_s"], 2), number(leg["sampling"]["interval_s"], 3),
         number(leg["max_gap_s"], 3), *(number(leg["sampling"][cost], 2, 1000) for cost in ("mean_cost_s", "max_cost_s")),
         percent(leg["sampling"]["cost_share"], 1)]
        for leg in legs
    ]
    header = ["leg", "whole passes", "partial", "period s", "median interval s", "longest gap s", "cost ms", "dearest ms", "of one core"]
    note = "A peak shorter than a gap is not seen; the kernel's own record of each process (VmHWM) tells when that mattered."
    return [note, "", *table(header, rows)]


def _memory_doubts(leg: Summary) -> list[str]:
    """Why a memory leg has no peak."""
    lines = [] if leg["complete"] else [f"{leg['leg']}: the sampler's stream is cut short, so it has neither peak nor stable PSS"]
    return lines + [
        f"{leg['leg']}: no peak, {missed['name']} (pid {missed['pid']}) was once at {_mib(missed['hwm'])} MiB by VmHWM, and "
        f"{_mib(missed['sampled_rss'])} MiB is the most that was sampled of it"
        for missed in leg["peak_missed"]
    ]


def _memory_cgroup(leg: Summary) -> list[str]:
    """What a control group of the leg's own says, where there was one."""
    peak = leg["sampling"].get("cgroup_peak")
    return [] if peak is None else [f"{leg['leg']}: its control group peaked at {_mib(peak)} MiB, page cache and kernel memory included"]


def _mib(size: float | None) -> str:
    return number(size, 1, 1 / MIB)


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


def _notes(summary: Summary) -> list[str]:
    """What the runner noted of legs that count; one and the same note of several legs is said once."""
    legs: dict[str, list[str]] = {}
    for line in summary["notes"]:
        leg, _, note = line.partition(": ")
        legs.setdefault(note, []).append(leg)
    lines = [f"- {cell(note)} ({', '.join(names)})" for note, names in legs.items()]
    return ["## Notes of the legs", "", *(lines or ["None."]), ""]


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
    for name, arm in arms_in_order(summary):
        who = arm["who"] or {}
        rows.append([
            f"**{name}**", who.get("distribution"), who.get("version"), short(who.get("commit")), short(who.get("record_sha256")),
            short(arm["code_sha256"]), (arm["resolved"] or {}).get("attention_backend"), _missing(who),
        ])
    header = ["arm", "distribution", "version", "commit", "record", "staged code", "attention", "missing packages"]
    lines = table(header, rows, text=8)
    settings = sorted({key for arm in dict(arms_in_order(summary)).values() for key in (arm["resolved"] or {})})
    rows = [[key, *(cell((arm["resolved"] or {}).get(key)) for arm in dict(arms_in_order(summary)).values())] for key in settings]
    lines += ["Settings as each engine resolved them:", "", *table(["setting", *summary["arm_order"]], rows)]
    return ["## Provenance", "", *folded("Identity and resolved settings of each arm", lines)]


def _missing(who: Summary) -> str:
    missing = who.get("missing")
    return NONE if missing is None else f"{len(missing)}: {', '.join(missing)}" if missing else "none"


def _machine(summary: Summary) -> list[str]:
    return folded("Machine, model and repository", table(["what", "value"], flatten(summary["series"]), text=2))


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


ALL = (_tokens, _correctness, near_tie_section, _latencies, _occupancy, _ceiling, _memory, watched, _attempts, _notes, _identities,
       _machine, _reproduce)
"""In the order in which a report shows them."""
