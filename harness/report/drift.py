"""What two series' comparison found, for people; and what it comes to."""

from __future__ import annotations

from typing import Any

from harness.analysis.drift import AMBIENT, REFUSED, STILL
from harness.analysis.ratios import THROUGHPUT
from harness.report.text import AXIS_NAMES, interval, percent, ratio
from harness.verdict import Exit


def drift_lines(found: dict[str, Any]) -> list[str]:
    """A line for what is refused, the control, each changed arm, and each arm on each axis."""
    lines = [f"{found['a']} to {found['b']}: values of the second over the first, geometric means over blocks; in brackets 95 % intervals",
             *(f"refused: {reason}" for reason in found["refused"]), *(f"note: {note}" for note in found["notes"])]
    for name, arm in found["arms"].items():
        what = f"changed: {', '.join(arm['changed'])}" if arm["changed"] else "unchanged"
        control = ", the control" if name == found["control"] else ""
        lines.append(f"{name} [{arm['role']}]: {what}{control}; {arm['tokens']['identical']}/{arm['tokens']['of']} outputs as before")
    for axis, rows in found["axes"].items():
        if axis in THROUGHPUT[1:] and axis != found["primary"]:
            continue  # with the same work they move as total throughput does
        lines.append(f"{AXIS_NAMES[axis]}{' (primary)' if axis == found['primary'] else ''}")
        lines += [f"  {name}: {_move(row['move'])}{_against(row)}" for name, row in rows.items()]
    return lines


def drift_exit(found: dict[str, Any]) -> Exit:
    """By the primary axis: PASS when nothing but the machine moved, FAIL when an arm moved against the control, else INCONCLUSIVE."""
    rows = found["axes"].get(found["primary"], {})
    called = [row["called"] for row in rows.values() if row["called"] != "control"]
    if found["refused"] or not called or REFUSED in called:
        return Exit.INCONCLUSIVE
    return Exit.PASS if set(called) <= {AMBIENT, STILL} else Exit.FAIL


def _move(move: dict[str, Any]) -> str:
    if move["factor"] is None:
        return "n/a"
    return f"{ratio(move['factor'])} ({interval(move['interval'])})"


def _against(row: dict[str, Any]) -> str:
    if row["called"] == "control":
        return ", the control"
    seen = row["against_control"]["detectable"]
    size = f", {percent(seen, 1)} would have been seen" if seen is not None else ""
    return f", against the control {_move(row['against_control'])}{size}: {row['called']}{'; ' + row['why'] if row['why'] else ''}"
