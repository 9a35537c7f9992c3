"""The part of a report that tells what the machine did during the performance legs, as their watcher saw it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from harness.report.text import NONE, arms_in_order, cell, folded, number, percent, table, whole

Summary = dict[str, Any]

SHARES = ("steal", "steal_burst", "foreign", "foreign_burst")


def watched(summary: Summary) -> list[str]:
    """The worst of all legs in one line, every leg folded below it."""
    legs = [(leg["leg"], leg["telemetry"] or {}) for _, arm in arms_in_order(summary) for leg in arm["performance"]]
    head = "## Machine during the performance legs"
    if not legs:
        return [head, "", "No performance leg counts.", ""]
    most = {name: percent(_highest(_window(seen).get(name) for _, seen in legs)) for name in SHARES}
    own = percent(_highest(seen.get("own_cpu_share") for _, seen in legs))
    worst = (f"Over their measured windows the hypervisor took at most {most['steal']} of all cores ({most['steal_burst']} over the worst "
             f"5 s), foreign processes {most['foreign']} ({most['foreign_burst']}). Runner and watcher used at most {own} of one core.")
    rows = [
        [leg, *(percent(_window(seen).get(name)) for name in SHARES),
         percent(seen.get("own_cpu_share")), seen.get("samples"), number(seen.get("max_gap_s"), 1)]
        for leg, seen in legs
    ]
    header = ["leg", "steal", "worst 5 s", "foreign", "worst 5 s", "runner and watcher, of one core", "looks", "longest gap s"]
    cards = [_card(leg, card) for leg, seen in legs for card in seen.get("gpus") or ()]
    return [head, "", worst, "", *folded("What the watcher saw of each leg", table(header, rows)), *_cards(cards)]


def _cards(rows: list[list[Any]]) -> list[str]:
    if not rows:
        return []
    header = ["leg", "GPU", "SM clock MHz, median", "lowest to highest", "under a power cap", "memory in use MiB", "clock events"]
    return folded("GPU clocks of each leg", table(header, rows, text=2))


def _card(leg: str, card: Summary) -> list[Any]:
    clock, capped, used = card["sm_clock_mhz"] or {}, card["sm_clock_capped_mhz"], card["memory_used_max"]
    return [
        leg, f"{card['index']} {card['name']}", number(clock.get("median"), 0), _range(clock), _range(capped or {}) if capped else "never",
        number(used, 0, 1 / 2**20), cell(", ".join(card["clock_event_reasons"]) or "none"),
    ]


def _range(clock: Summary) -> str:
    return whole(f"{clock['min']} to {clock['max']}") if clock else NONE


def _window(seen: Summary) -> Summary:
    """Shares over the measured window; empty where they could not be read."""
    return dict((seen.get("cpu") or {}).get("window") or {})


def _highest(values: Iterable[float | None]) -> float | None:
    """None when one of them is: what was not read may have been the highest."""
    known = list(values)
    return None if None in known else max(value for value in known if value is not None)
