"""Whose the CPU time of an interval was: the series' own, the kernel's, other people's, nobody's known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from harness.machine.host import CpuTimes, ProcessTimes


@dataclass(frozen=True, kw_only=True)
class Load:
    """CPU time of an interval in clock ticks, over all cores.

    What living processes have used includes what they have reaped within it, so that a short-lived child counts for its parent.  `busy`
    beyond `own + kernel + foreign` went to processes whose end nobody saw, and to interrupts.
    """

    total: int
    busy: int
    steal: int
    own: int
    kernel: int
    """The kernel's own threads: writing back, reclaiming memory."""
    foreign: dict[int, int]
    """By pid."""

    @property
    def unattributed(self) -> int:
        """Ticks that are nobody's known; below zero where the kernel's two ways of counting disagree."""
        return self.busy - self.own - self.kernel - sum(self.foreign.values())


def load_between(
    cpu_before: CpuTimes | None,
    cpu_after: CpuTimes | None,
    before: Mapping[int, ProcessTimes],
    after: Mapping[int, ProcessTimes],
    own: set[int],
) -> Load | None:
    """The load between two scans, `own` being the pids of the series; None when /proc/stat gave no time for it."""
    if cpu_before is None or cpu_after is None or cpu_after.total <= cpu_before.total:
        return None
    used = _used(before, after)
    return Load(
        total=cpu_after.total - cpu_before.total,
        busy=cpu_after.busy - cpu_before.busy,
        steal=cpu_after.steal - cpu_before.steal,
        own=sum(ticks for pid, ticks in used.items() if pid in own),
        kernel=sum(ticks for pid, ticks in used.items() if pid not in own and after[pid].is_kernel),
        foreign={pid: ticks for pid, ticks in used.items() if ticks > 0 and pid not in own and not after[pid].is_kernel},
    )


def own_tree(processes: Mapping[int, ProcessTimes], roots: Iterable[int]) -> set[int]:
    """The roots and everything below them."""
    children: dict[int, list[int]] = {}
    for pid, times in processes.items():
        children.setdefault(times.parent, []).append(pid)
    own: set[int] = set()
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        if pid not in own:
            own.add(pid)
            waiting += children.get(pid, [])
    return own


def _used(before: Mapping[int, ProcessTimes], after: Mapping[int, ProcessTimes]) -> dict[int, int]:
    """Ticks of the interval by living process, what it has reaped included.

    The time of a process that ended moves to the one that reaped it; what it had used before the interval is taken off there again.
    """

    def same(pid: int) -> bool:
        return pid in before and pid in after and before[pid].start_ticks == after[pid].start_ticks

    used = {
        pid: times.cpu_ticks + times.reaped_ticks - (before[pid].cpu_ticks + before[pid].reaped_ticks if same(pid) else 0)
        for pid, times in after.items()
    }
    for pid, times in before.items():
        if not same(pid):
            heir = times.parent
            while heir in before and not same(heir):
                heir = before[heir].parent
            if heir in used:
                used[heir] -= times.cpu_ticks + times.reaped_ticks
    return {pid: max(0, ticks) for pid, ticks in used.items()}
