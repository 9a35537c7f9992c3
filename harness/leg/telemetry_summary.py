"""What a performance leg's telemetry says: a summary, and the reasons to void the leg.  Pure: the rows alone decide, now or years later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from statistics import median
from typing import Any

from harness.machine.gpu import POWER_CAPPED, THROTTLED, event_names

Row = Mapping[str, Any]

WINDOW_S = 5.0
"""Foreign CPU time and steal are judged over windows of this length: one burst of housekeeping of under limit x window x cores (0.3 s of
CPU time on two cores at 3 %) is what any machine has; more of it is company."""
CLOCK_SPREAD_MAX = 0.05
"""Highest over lowest SM clock, less one, of a card at work within the measured window.  Under a software power cap the clock follows the
load itself (an H200 at its 700 W: 1350 MHz in matrix products, 1965 MHz a moment later), so such samples are recorded and not judged."""
CLOCK_SAMPLES_MIN = 3
OWN_SHARE_MAX = 0.02
"""Of one core: what runner and watcher may use in a performance leg before it is noted."""
GPU_NEEDED = ("utilisation", "sm_clock_mhz", "clock_event_reasons", "foreign_compute", "foreign_graphics")


def summarise_telemetry(
    rows: Sequence[Row], marks: Sequence[Mapping[str, Any]], limits: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str], list[str]]:
    """(summary, reasons to void the leg, notes) from the watcher's rows, the arm's marks and the idle gate's limits of the plan.

    - `samples`, `max_gap_s`, `own_cpu_share`: looks, the longest time between two, CPU time of runner and watcher in cores.
    - `cpu`: shares of all cores: `foreign` (unattributed included) and `steal` over the leg, and each one's worst window.
    - `gpus`, by card: `utilisation_max`, `memory_used_max` (bytes), `clock_event_reasons` (names), and {min, median, max, spread, samples}
      of the SM clock over the samples between first_submit and last_token in which it worked: `sm_clock_mhz` of those without a software
      power cap, `sm_clock_capped_mhz` of those with it; None when they are under three.
    """
    samples, end = [row for row in rows if row["kind"] == "sample"], rows[-1]
    share = end["cpu_s"] / end["wall_s"] if end["wall_s"] else None
    cpu, reasons = _judge_cpu(samples, limits)
    gpus, gpu_reasons = _judge_gpus(samples, {line["mark"]: line["t_ns"] for line in marks})
    summary = {
        "samples": len(samples), "max_gap_s": max((_seconds(row) for row in samples), default=None), "own_cpu_share": share, "cpu": cpu,
        "gpus": gpus,
    }
    notes = []
    if share is not None and share > OWN_SHARE_MAX:
        notes.append(f"watching: runner and watcher used {share:.1%} of a core (at most {OWN_SHARE_MAX:.0%} is meant)")
    return summary, reasons + gpu_reasons, notes


def _seconds(row: Row) -> float:
    return float(row["end_ns"] - row["start_ns"]) / 1e9


def _judge_cpu(samples: Sequence[Row], limits: Mapping[str, Any]) -> tuple[dict[str, Any] | None, list[str]]:
    if not samples or any(row["cpu"] is None for row in samples):
        return None, ["cpu unreadable: /proc/stat gave no CPU time for a part of the leg"]
    total = sum(row["cpu"]["total"] for row in samples)
    foreign, window = _worst(samples, _foreign)
    steal, stolen = _worst(samples, lambda rows: _sum(rows, "steal"))
    reasons = []
    if foreign > limits["foreign_cpu_max"]:
        reasons.append(f"foreign cpu: {foreign:.1%} of all cores over {WINDOW_S:g} s, {_when(samples, window)} "
                       f"(at most {limits['foreign_cpu_max']:.1%}): {_named(window)}")
    if steal > limits["steal_max"]:
        reasons.append(f"steal: the hypervisor took {steal:.1%} of all cores over {WINDOW_S:g} s, {_when(samples, stolen)} "
                       f"(at most {limits['steal_max']:.1%})")
    return {
        "foreign": _foreign(samples) / total, "foreign_window_max": foreign, "steal": _sum(samples, "steal") / total,
        "steal_window_max": steal, "window_s": WINDOW_S,
    }, reasons


def _worst(samples: Sequence[Row], ticks: Callable[[Sequence[Row]], int]) -> tuple[float, Sequence[Row]]:
    """The largest share of all cores over any run of samples that fills a window, and that run.  A leg shorter than a window is judged by
    the same budget of CPU time."""
    ends = [0.0, *accumulate(_seconds(row) for row in samples)]
    worst: tuple[float, Sequence[Row]] = (0.0, samples)
    first = 0
    for last in range(1, len(samples) + 1):
        while ends[last] - ends[first + 1] >= WINDOW_S:
            first += 1
        window = samples[first:last]
        share = ticks(window) / _sum(window, "total") * min(1.0, (ends[last] - ends[first]) / WINDOW_S)
        worst = max(worst, (share, window), key=lambda pair: pair[0])
    return worst


def _foreign(rows: Sequence[Row]) -> int:
    """Unattributed time is summed before it is cut at zero: in one sample it may be below, the kernel counts in two ways."""
    return _sum(rows, "foreign") + max(0, _sum(rows, "unattributed"))


def _sum(rows: Sequence[Row], name: str) -> int:
    return sum(int(row["cpu"][name]) for row in rows)


def _when(samples: Sequence[Row], window: Sequence[Row]) -> str:
    return f"{(window[0]['start_ns'] - samples[0]['start_ns']) / 1e9:.0f} s into the leg"


def _named(window: Sequence[Row]) -> str:
    """The processes of a window by what they used, and what nobody is known for."""
    total, used = _sum(window, "total"), dict[tuple[int, str, str], int]()
    for row in window:
        for one in row["cpu"]["processes"]:
            key = one["pid"], one["name"], one["command"]
            used[key] = used.get(key, 0) + one["ticks"]
    parts = [f"pid {pid} ({name}: {command}) {ticks / total:.1%}"
             for (pid, name, command), ticks in sorted(used.items(), key=lambda item: -item[1])[:3]]
    return ", ".join([*parts, f"unattributed {max(0, _sum(window, 'unattributed')) / total:.1%}"])


def _judge_gpus(samples: Sequence[Row], marks: Mapping[str, int]) -> tuple[list[dict[str, Any]] | None, list[str]]:
    errors = [row["gpu_error"] for row in samples if row["gpu_error"] is not None]
    if errors:
        return None, [f"gpu unreadable: {errors[0]}"]
    if all(row["gpus"] is None for row in samples):
        return None, []
    if len({tuple(card["uuid"] for card in row["gpus"] or ()) for row in samples}) != 1:
        return None, ["gpu unreadable: the list of GPUs changed within the leg"]
    first, last = marks.get("first_submit"), marks.get("last_token")
    records, reasons = [], []
    for index in range(len(samples[0]["gpus"])):
        cards = [row["gpus"][index] for row in samples]
        measured = [row["gpus"][index] for row in samples if first is not None and last is not None and first <= row["end_ns"] <= last]
        record, why = _judge_card(cards, measured)
        records.append(record)
        reasons += [f"gpu {cards[0]['index']} ({cards[0]['name']}): {reason}" for reason in why]
    return records, reasons


def _judge_card(cards: Sequence[Row], measured: Sequence[Row]) -> tuple[dict[str, Any], list[str]]:
    """One card over the leg's samples; `measured` are those of the measured window."""
    reasons = []
    for field in GPU_NEEDED:
        if any(card[field] is None for card in cards):
            reasons.append(f"unreadable: {field}")
    for kind in ("compute", "graphics"):
        # Twice: a process that comes or goes between the scan and the reading is seen once.
        seen = [one for card in cards for one in card[f"foreign_{kind}"] or ()]
        count = Counter(one["pid"] for one in seen)
        commands = {one["pid"]: one["command"] for one in reversed(seen)}
        reasons += [f"foreign {kind} process: pid {pid} ({commands[pid]})" for pid in sorted(commands) if count[pid] > 1]
    mask = 0
    for card in cards:
        mask |= card["clock_event_reasons"] or 0
    if mask & THROTTLED:
        reasons.append(f"clock event: {', '.join(event_names(mask & THROTTLED))}: cool the card, or mend its power")
    working = [card for card in measured if card["utilisation"] and card["sm_clock_mhz"]]
    clock, capped = (
        _clock([card["sm_clock_mhz"] for card in working if bool((card["clock_event_reasons"] or 0) & POWER_CAPPED) is is_capped])
        for is_capped in (False, True)
    )
    if clock is not None and clock["spread"] > CLOCK_SPREAD_MAX:
        reasons.append(f"SM clock from {clock['min']} to {clock['max']} MHz within the measured window "
                       f"(at most {CLOCK_SPREAD_MAX:.0%} apart)")
    return {
        "index": cards[0]["index"], "uuid": cards[0]["uuid"], "name": cards[0]["name"], "sm_clock_mhz": clock,
        "sm_clock_capped_mhz": capped,
        "utilisation_max": _highest(cards, "utilisation"), "memory_used_max": _highest(cards, "memory_used"),
        "clock_event_reasons": event_names(mask),
    }, reasons


def _clock(clocks: Sequence[int]) -> dict[str, Any] | None:
    if len(clocks) < CLOCK_SAMPLES_MIN:
        return None
    return {"min": min(clocks), "median": median(clocks), "max": max(clocks), "spread": max(clocks) / min(clocks) - 1,
            "samples": len(clocks)}


def _highest(cards: Sequence[Row], field: str) -> int | None:
    values = [card[field] for card in cards]
    return None if None in values else max(values)
