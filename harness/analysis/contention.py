"""Whether a series ran in company, and what its numbers are then still good for.  Pure: the stored idle snapshots alone decide.

A leg may run on a machine that is not idle only by a raised limit or a waiver.  Such a series is `contended`: what it measured in
absolute terms is the company's too, so no figure of time is shown of it.  Its ratios compare arms under one and the same load, so they
hold within that one series, as far as the load was the same before every leg; where it was not, there is no ratio either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.analysis.ratios import MEMORY
from harness.evidence import layout
from harness.evidence.schema import EvidenceError, Leg, Series
from harness.machine.gpu import THROTTLED
from harness.machine.idle_rule import MIB, IdleLimits, findings
from harness.verdict import Exit

Load = dict[str, float | None]
"""What weighed on the machine before a leg, by name; None where it could not be read."""

IDLE = IdleLimits()
"""What counts as idle whatever limits a series ran under."""


@dataclass(frozen=True, kw_only=True)
class Contention:
    """`company`: what made legs that count run on a machine that was not idle, each with its legs; empty when none did.
    `uneven`: how the load differed between legs by more than an idle machine may; `waived`: {check, reason, found, legs}."""

    company: list[str]
    uneven: list[str]
    waived: list[dict[str, Any]]


def contention(series: Series) -> Contention:
    """Judge the snapshots taken before each leg that counts.  Raises :class:`EvidenceError` naming the leg whose snapshot does not tell."""
    legs = [leg for arm in series.arms for leg in series.legs(arm)]
    samples = {leg.name: _decision(leg) for leg in legs}
    try:
        found = {name: findings(sample, IDLE) for name, sample in samples.items()}
        loads = {name: _load(sample) for name, sample in samples.items()}
    except (KeyError, TypeError) as error:
        raise EvidenceError(f"{layout.IDLE}: a snapshot lacks {error}") from None
    company = _by_check({name: [one for one in ones if not one[0].startswith("unreadable.")] for name, ones in found.items()})
    waived = _by_check({leg.name: [(one["check"], one["found"]) for one in (leg.idle or {}).get("waived", [])] for leg in legs})
    return Contention(
        company=[f"{row['found']} ({_legs(row['legs'])})" for row in company.values()],
        uneven=_uneven(loads) if company else [],
        waived=[{**waiver, **waived.get(waiver["check"], {"found": None, "legs": []})} for waiver in series.plan.get("waivers", [])],
    )


def mark(summary: dict[str, Any], found: Contention) -> dict[str, Any]:
    """The summary with `contention` in it, and of a contended series without what no longer holds: `lines` are for a reader."""
    lines = []
    if found.company:
        lines.append(f"contended: ratios hold within this one contended series only{', and not here' if found.uneven else ''}; its figures "
                     f"of time are withheld: {'; '.join(found.company)}")
    lines += [f"waived: {row['check']} ({row['reason']}): {_said(row)}" for row in found.waived]
    marked = {**summary, "contention": {
        "contended": bool(found.company), "uniform": not found.uneven if found.company else None, "lines": lines, "waived": found.waived,
    }}
    if not found.company:
        return marked
    if found.uneven:
        refused = "refused: the load was not the same before every leg, so the arms were not measured on one machine"
        marked["pairs"] = [{**pair, "refused": refused, "axes": {}, "withheld": [], "ab": None} for pair in summary["pairs"]]
        if summary["exit_code"] != Exit.ERROR:
            before = summary["reasons"] if summary["exit_code"] == Exit.VOID else []
            marked |= {"verdict": Exit.VOID.name, "exit_code": int(Exit.VOID), "qualifier": None, "reasons": [*found.uneven, *before]}
    return _without_absolutes(marked)


def _decision(leg: Leg) -> Mapping[str, Any]:
    samples = [sample for sample in (leg.idle or {}).get("samples", []) if sample.get("role") == "decision"]
    if len(samples) != 1:
        raise EvidenceError(f"{leg.name}: {layout.IDLE}: field `samples` holds {len(samples)} of role `decision`, expected one")
    return dict(samples[0])


def _load(sample: Mapping[str, Any]) -> Load:
    cpu = sample["cpu"]
    load: Load = {
        "foreign CPU": None if cpu is None else cpu["foreign"] + cpu["unattributed"], "steal": None if cpu is None else cpu["steal"],
    }
    for gpu in sample["gpus"] or ():
        reasons = gpu["clock_event_reasons"]
        load |= {
            f"gpu {gpu['index']} utilization": gpu["utilisation_max"],
            f"gpu {gpu['index']} memory": gpu["memory_used_max"],
            f"gpu {gpu['index']} processes": len(gpu["foreign"]),
            f"gpu {gpu['index']} throttling": None if reasons is None else reasons & THROTTLED,
        }
    return load


BANDS = {
    "foreign CPU": (IDLE.foreign_cpu_max, 100, " % of all cores"), "steal": (IDLE.steal_max, 100, " % of all cores"),
    "utilization": (IDLE.gpu_util_max, 1, " %"), "memory": (IDLE.vram_residue_max, 1 / MIB, " MiB"), "processes": (0, 1, ""),
    "throttling": (0, 1, ""),
}
"""How far apart a load may lie between legs: as far as on an idle machine, where the gate lets it lie anywhere up to its limit; then
scale and unit to show it in."""


def _uneven(loads: Mapping[str, Load]) -> list[str]:
    """How the load differed between the legs.  What is unreadable before every leg says nothing; before some, that they differ."""
    reasons = []
    names = {name: None for load in loads.values() for name in load}
    for name in names:
        band, scale, unit = BANDS[name.split(" ", 2)[-1] if name.startswith("gpu ") else name]
        known = {leg: value for leg, load in loads.items() if (value := load.get(name)) is not None}
        if known and len(known) < len(loads):
            reasons.append(f"the load was not uniform: {name} is unreadable before {_legs([leg for leg in loads if leg not in known])}")
        elif known:
            low, high = min(known, key=lambda leg: known[leg]), max(known, key=lambda leg: known[leg])
            if known[high] - known[low] > band:
                a, b, most = (f"{value * scale:.4g}{unit}" for value in (known[low], known[high], band))
                reasons.append(f"the load was not uniform: {name} {a} before {low}, {b} before {high} (at most {most} apart)")
    return reasons


def _by_check(found: Mapping[str, Sequence[tuple[str, str]]]) -> dict[str, dict[str, Any]]:
    """For each check the first finding and the legs that have one."""
    rows: dict[str, dict[str, Any]] = {}
    for leg, ones in found.items():
        for check, text in ones:
            row = rows.setdefault(check, {"found": text, "legs": []})
            if leg not in row["legs"]:
                row["legs"].append(leg)
    return rows


def _legs(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _said(row: Mapping[str, Any]) -> str:
    return f"{row['found']} ({_legs(row['legs'])})" if row["legs"] else "it found nothing"


def _without_absolutes(summary: dict[str, Any]) -> dict[str, Any]:
    """No figure of time or rate stays; memory, tokens and ratios do."""
    arms = {
        name: {**arm, "performance": [], "means": {axis: value if axis in MEMORY else None for axis, value in arm["means"].items()}}
        for name, arm in summary["arms"].items()
    }
    pairs = [
        {**pair, "axes": {name: row if name in MEMORY else {**row, "mean_ours": None, "mean_base": None}
                          for name, row in pair["axes"].items()}}
        for pair in summary["pairs"]
    ]
    ceiling = summary["ceiling"] and {
        **dict.fromkeys(summary["ceiling"]), "client": summary["ceiling"]["client"], "limit": summary["ceiling"]["limit"],
        "arms": {name: arm and {**arm, "requests_per_s": None, "deltas_per_s": None} for name, arm in summary["ceiling"]["arms"].items()},
    }
    return {**summary, "arms": arms, "pairs": pairs, "ceiling": ceiling}
