"""GPU memory of processes by NVML, for the memory sampler.  It makes no CUDA context."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from harness.machine.gpu import Gpu, GpuUnreadable


class GpuMemory(Gpu):
    """Bytes in use by process over all cards; opened and closed like a :class:`Gpu`."""

    def by_pid(self, pids: Collection[int]) -> dict[int, int | None]:
        """Bytes of each of `pids` on all cards together; None for all without a driver or when a card does not answer, and for a process
        whose use NVML calls not available.

        A process that no card lists holds 0, as far as NVML tells: in a container it may know processes by other numbers, so a tree that
        never holds anything has told nothing.
        """
        try:
            cards = [self._card(handle) for handle in self._handles()] if self._ensure_open() else None
        except (GpuUnreadable, self._nvml.NVMLError):
            cards = None
        if cards is None:
            return dict.fromkeys(pids)
        return {pid: _fold(sum, [card[pid] for card in cards if pid in card]) for pid in pids}

    def _card(self, handle: Any) -> dict[int, int | None]:
        nvml = self._nvml
        lists = [_used(read(handle)) for read in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses)]
        # A process with contexts of both kinds stands in both lists, each time with all that it uses.
        return {pid: _fold(max, [used[pid] for used in lists if pid in used]) for pid in {pid for used in lists for pid in used}}


def _used(processes: Sequence[Any]) -> dict[int, int | None]:
    """Bytes by pid of one list; with MIG a process has an entry an instance."""
    entries: dict[int, list[int | None]] = {}
    for process in processes:
        entries.setdefault(int(process.pid), []).append(process.usedGpuMemory)
    return {pid: _fold(sum, values) for pid, values in entries.items()}


def _fold(fold: Callable[[list[int]], int], values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return fold(known) if len(known) == len(values) else None
