"""A near-tie judgement for people: as lines in a terminal, as a section of a report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.analysis.near_tie import IDENTICAL, nats
from harness.report.text import cell, folded, percent, short, table, whole

Summary = dict[str, Any]

REPORTED = ("Reported, not judged: another rounding moves them as a fault does that is too small for the band. A small p says that our ids "
            "agree less, or cost the oracle more, than its own.")


def lines(record: Mapping[str, Any]) -> list[str]:
    """Self-agreement of the oracle first, then the band and where it came from, then our exact share and each divergence."""
    found = [_oracle(record), "", "Oracle against itself"]
    found += [f"  {row['a']} against {row['b']}: {row['identical']}/{row['of']} outputs identical" for row in record["self_agreement"]]
    found += [f"  worst gap on its own ids: {nats(record['oracle_worst_gap'])} nats", "", "Band"]
    found += [
        f"  {row['what']}: {record['percentile']}th percentile {nats(row['percentile'])}, worst {nats(row['worst'])} nats "
        f"({row['values']} log-probabilities at {row['positions']} positions)"
        for row in record["jitter"]
    ]
    found.append(f"  {record['factor']} times the largest percentile: {nats(record['band'])} nats")
    if record["band"] == 0:
        found.append("  the oracle does not jitter here: nothing but identical ids passes")
    for arm in record["arms"]:
        found += ["", f"Ours ({', '.join(arm['legs'])}) against {arm['against']}", f"  {_counts(arm)}; worst gap of all our ids "
                  f"{nats(arm['worst_gap'])} nats", *(f"  {line}" for line in _beside(arm["beside_oracle"]))]
        found += [
            f"  request {row['request']}, position {row['position']}: {row['ours']} for {row['oracle']}, gap {nats(row['gap'])}, "
            f"worst {nats(row['worst_gap'])} at {row['worst_position']}: {row['label']}"
            for row in arm["requests"] if row["label"] != IDENTICAL
        ]
    return found


def headlines(summary: Summary) -> list[str]:
    """One line for each distinct output of our arms; none without a record."""
    record = summary["near_tie"]
    return [] if record is None else [
        f"near-tie: {_legs(arm)}: {_counts(arm)}; worst gap {nats(arm['worst_gap'])}, band {nats(record['band'])} nats"
        for arm in record["arms"]
    ]


def near_tie_section(summary: Summary) -> list[str]:
    """What the oracle says of our ids; nothing for a series without an oracle."""
    record = summary["near_tie"]
    head = ["## Near-ties", ""]
    if record is None:
        asked = any(arm["oracle"] is not None for arm in summary["arms"].values())
        return [*head, "Not judged: no near-tie record lies beside this series; `parity near-tie DIR` makes one.", ""] if asked else []
    said = "" if record["band"] else " It does not jitter here: nothing but identical ids passes."
    counted = ("of", "identical", "near_ties", "wrong")
    rows = [[_legs(arm), *(arm[key] for key in counted), nats(arm["worst_gap"])] for arm in record["arms"]]
    beside = [f"- {cell(_legs(arm))}: {cell(line)}" for arm in record["arms"] for line in _beside(arm["beside_oracle"])]
    return [
        *head,
        f"The {cell(_oracle(record))}, scored our ids one by one. Its band is {nats(record['band'])} nats: {record['factor']} times the "
        f"largest {record['percentile']}th percentile of its own jitter; on its own ids its worst gap is "
        f"{nats(record['oracle_worst_gap'])}.{said} Record {short(record['head'])}.", "",
        *table(["our legs", "outputs", "identical", "near-ties", "wrong", "worst gap, nats"], rows), *beside, "", REPORTED, "",
        *folded("The oracle against itself, and where the band comes from", _own(record)), *_divergences(record),
    ]


def _own(record: Mapping[str, Any]) -> list[str]:
    agreed = [[f"{row['a']} / {row['b']}", f"{row['identical']}/{row['of']}"] for row in record["self_agreement"]]
    jitter = [[row["what"], nats(row["percentile"]), nats(row["worst"]), row["values"], row["positions"]] for row in record["jitter"]]
    header = ["jitter, nats", whole(f"{record['percentile']}th percentile"), "worst", "log-probabilities", "positions"]
    return [*table(["the oracle against itself", "identical outputs"], agreed), *table(header, jitter)]


def _divergences(record: Mapping[str, Any]) -> list[str]:
    rows = [
        [_legs(arm), row["request"], row["position"], row["ours"], row["oracle"], nats(row["gap"]), nats(row["worst_gap"]),
         row["worst_position"], row["label"]]
        for arm in record["arms"] for row in arm["requests"]
    ]
    header = ["our legs", "request", "position", "our id", "its id", "gap, nats", "worst gap", "at", "is"]
    return folded(f"Every divergence: {len(rows)}", table(header, rows)) if rows else []


def _oracle(record: Mapping[str, Any]) -> str:
    oracle = record["oracle"]
    return f"oracle {oracle['distribution']} {oracle['version']} ({oracle['role']}), {record['dtype']}"


def _counts(arm: Mapping[str, Any]) -> str:
    return f"{arm['identical']}/{arm['of']} identical, {arm['near_ties']} near-ties, {arm['wrong']} wrong"


def _legs(arm: Mapping[str, Any]) -> str:
    """The legs that gave one output: the first, and how many more."""
    first, more = arm["legs"][0], len(arm["legs"]) - 1
    return first if not more else f"{first} and {more} more"


def _beside(found: Mapping[str, Any]) -> list[str]:
    """Our ids beside the oracle's own, a line each for share and cost."""
    ours, own = (f"{one['k']}/{one['n']} ({percent(one['lower'], 0)} to {percent(one['upper'], 0)})"
                 for one in (found["exact"], found["oracle_exact"]))
    share = f"exact share {ours}, the oracle's own {own}: p {_p(found['exact_p'])}"
    cost = f"an id costs {nats(found['cost'])} nats on average, the oracle's own {nats(found['oracle_cost'])}: p {_p(found['cost_p'])}"
    return [share, cost]


def _p(value: float | None) -> str:
    return "unknown" if value is None else "< 0.0001" if value < 1e-4 else f"{value:.2g}"
