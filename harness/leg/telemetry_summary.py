"""What a performance leg's telemetry says: a summary, and the reasons to void the leg.  Pure: the rows alone decide, now or years later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from statistics import median
from typing import Any

from harness.leg.telemetry import SHORTEST_S
from harness.machine.gpu import POWER_CAPPED, THROTTLED, event_names

Row = Mapping[str, Any]

BURST_S = 5.0
"""Foreign CPU time and steal are also judged over runs of looks of this length: one burst of housekeeping of under limit x length x cores
(0.3 s of CPU time on two cores at 3 %) is what any machine has; more of it is company."""
STEAL_BURST_FACTOR = 2
"""Over a burst, steal may reach this many times its limit over the window (so 6 % beside 3 %); foreign CPU has one limit, over any burst.

Why: two virtual cores, full for an hour.  Steal came in episodes.  Of the 20 s windows 90 % lost under 3 % (a third of these had a burst
above 3 %, one in 500 above 6 %); the others lost 9 % in the median.  13 legs with windows of 11 to 13 s, loaded by the arm alone,
lost 0.05 to 1.9 % and 0.1 to 3.1 % in their worst burst, foreign CPU never above 0.6 % there: one limit of 3 % on bursts voided legs that
had lost 1.4 and 1.9 % in all, while the legs of one arm differ by 3 to 18 % for no cause that shows, which only blocks average out.
A burst in one arm's leg is a wrong number all the same: in a window under 10 s one at its limit uses up the window's, in a longer it moves
a mean by less than 3 %."""
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
    - `cpu`: `window_s` (first_submit to last_token), `burst_s`, and shares of all cores over that `window` and, not judged, over the whole
      `leg`: `foreign` (unattributed included), `steal`, and `foreign_burst`, `steal_burst`, each one's worst `burst_s`.  A leg without
      both marks is judged whole (`window_s` None).
    - `gpus`, by card: `utilisation_max`, `memory_used_max` (bytes), `clock_event_reasons` (names), and {min, median, max, spread, samples}
      of the SM clock over the samples between first_submit and last_token in which it worked: `sm_clock_mhz` of those without a software
      power cap, `sm_clock_capped_mhz` of those with it; None when they are under three.
    """
    samples, end = [row for row in rows if row["kind"] == "sample"], rows[-1]
    share = end["cpu_s"] / end["wall_s"] if end["wall_s"] else None
    measured = _window(marks)
    cpu, reasons = _judge_cpu(samples, measured, limits)
    gpus, gpu_reasons = _judge_gpus(samples, measured)
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


def _judge_cpu(
    samples: Sequence[Row], measured: tuple[int, int] | None, limits: Mapping[str, Any]
) -> tuple[dict[str, Any] | None, list[str]]:
    """Only the measured window is timed, so only that is judged.  A look that reaches over its edge counts in whole: what it saw may have
    been inside."""
    judged = [row for row in samples if measured is None or (row["end_ns"] > measured[0] and row["start_ns"] < measured[1])]
    if not judged or any(row["cpu"] is None for row in judged):
        return None, ["cpu unreadable: /proc/stat gave no CPU time for a part of the measured window"]
    if measured is not None and (judged[0]["start_ns"] > measured[0] or judged[-1]["end_ns"] < measured[1] - SHORTEST_S * 1e9):
        return None, ["cpu unreadable: the watcher did not look over the whole measured window"]
    span_s = _length(judged) if measured is None else (measured[1] - measured[0]) / 1e9
    window, (company, robbed) = _shares(judged, span_s)
    place = "leg" if measured is None else "measured window"
    taken = "steal: the hypervisor took {:.1%} of all cores over {} (at most {:.1%})"
    cap, burst_cap = limits["steal_max"], STEAL_BURST_FACTOR * limits["steal_max"]
    reasons = []
    if window["foreign_burst"] > limits["foreign_cpu_max"]:
        reasons.append(f"foreign cpu: {window['foreign_burst']:.1%} of all cores over {BURST_S:g} s, {_when(judged, company)} into the "
                       f"{place} (at most {limits['foreign_cpu_max']:.1%}): {_named(company)}")
    if window["steal"] > cap:
        reasons.append(taken.format(window["steal"], f"the {place}", cap))
    if window["steal_burst"] > burst_cap:
        reasons.append(taken.format(window["steal_burst"], f"{BURST_S:g} s, {_when(judged, robbed)} into the {place}", burst_cap))
    whole = None if any(row["cpu"] is None for row in samples) else _shares(samples, _length(samples))[0]
    return {"window_s": None if measured is None else span_s, "burst_s": BURST_S, "window": window, "leg": whole}, reasons


def _window(marks: Sequence[Mapping[str, Any]]) -> tuple[int, int] | None:
    """first_submit and last_token; None when one is missing."""
    times = {line["mark"]: int(line["t_ns"]) for line in marks}
    return (times["first_submit"], times["last_token"]) if "first_submit" in times and "last_token" in times else None


def _shares(rows: Sequence[Row], span_s: float) -> tuple[dict[str, float], tuple[Sequence[Row], Sequence[Row]]]:
    """Shares of all cores over `span_s`, of which `rows` tell, and the runs of looks that hold the worst foreign and stolen bursts."""
    foreign, company = _worst(rows, _foreign)
    steal, robbed = _worst(rows, _steal)
    return {
        "foreign": _share(_foreign(rows), rows, span_s), "foreign_burst": foreign, "steal": _share(_steal(rows), rows, span_s),
        "steal_burst": steal,
    }, (company, robbed)


def _share(ticks: int, rows: Sequence[Row], span_s: float) -> float:
    """`ticks` over all cores' ticks of `span_s`.  What is shorter than a burst has a whole burst's budget of CPU time."""
    return ticks / (_sum(rows, "total") / _length(rows) * max(span_s, BURST_S))


def _worst(samples: Sequence[Row], ticks: Callable[[Sequence[Row]], int]) -> tuple[float, Sequence[Row]]:
    """The largest share of all cores over any run of samples that fills a burst, and that run."""
    ends = [0.0, *accumulate(_seconds(row) for row in samples)]
    worst: tuple[float, Sequence[Row]] = (0.0, samples)
    first = 0
    for last in range(1, len(samples) + 1):
        while ends[last] - ends[first + 1] >= BURST_S:
            first += 1
        run = samples[first:last]
        worst = max(worst, (_share(ticks(run), run, _length(run)), run), key=lambda pair: pair[0])
    return worst


def _length(rows: Sequence[Row]) -> float:
    return sum(_seconds(row) for row in rows)


def _foreign(rows: Sequence[Row]) -> int:
    """Unattributed time is summed before it is cut at zero: in one sample it may be below, the kernel counts in two ways."""
    return _sum(rows, "foreign") + max(0, _sum(rows, "unattributed"))


def _steal(rows: Sequence[Row]) -> int:
    return _sum(rows, "steal")


def _sum(rows: Sequence[Row], name: str) -> int:
    return sum(int(row["cpu"][name]) for row in rows)


def _when(samples: Sequence[Row], window: Sequence[Row]) -> str:
    return f"{(window[0]['start_ns'] - samples[0]['start_ns']) / 1e9:.0f} s"


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


def _judge_gpus(samples: Sequence[Row], measured: tuple[int, int] | None) -> tuple[list[dict[str, Any]] | None, list[str]]:
    errors = [row["gpu_error"] for row in samples if row["gpu_error"] is not None]
    if errors:
        return None, [f"gpu unreadable: {errors[0]}"]
    if all(row["gpus"] is None for row in samples):
        return None, []
    if len({tuple(card["uuid"] for card in row["gpus"] or ()) for row in samples}) != 1:
        return None, ["gpu unreadable: the list of GPUs changed within the leg"]
    records, reasons = [], []
    for index in range(len(samples[0]["gpus"])):
        cards = [row["gpus"][index] for row in samples]
        timed = [row["gpus"][index] for row in samples if measured is not None and measured[0] <= row["end_ns"] <= measured[1]]
        record, why = _judge_card(cards, timed)
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
