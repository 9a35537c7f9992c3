"""A machine that a test lays out: its processes, their load over time, its cards, its clock."""

from __future__ import annotations

from collections.abc import Callable

import pynvml

from harness.machine.gpu import Gpu
from harness.machine.host import CpuTimes, ProcessTimes
from harness.machine.idle import Probe
from tests.harness.machine.fake_nvml import FakeNvml

RUNNER = 100
CORES, TICKS = 2, 100


class FakeProbe(Probe):
    """A machine of two cores with a clock of its own.

    `loads` gives a process's use in cores at a time in seconds, by pid; `gone` is such a use by processes that no scan ever sees.
    """

    def __init__(self, nvml: FakeNvml | None = None) -> None:
        missing = FakeNvml(init_error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
        self._gpu, self._vram = Gpu(nvml or missing, ()), None
        self.t_s = 1000.0
        self.parents = {1: 0, 2: 0, RUNNER: 1}
        self.born = dict.fromkeys(self.parents, 0)
        self.loads: dict[int, Callable[[float], float]] = {}
        self.kernel_threads: set[int] = {2}
        self.gone: Callable[[float], float] = lambda _: 0.0
        self.steal: Callable[[float], float] = lambda _: 0.0
        self._used: dict[int, float] = {}
        self._gone = self._stolen = 0.0
        self.reads: list[tuple[str, float]] = []

    def add(self, pid: int, load: Callable[[float], float], parent: int = 1, kernel: bool = False) -> None:
        self.parents[pid], self.loads[pid], self.born[pid] = parent, load, round(self.t_s * TICKS)
        self._used.pop(pid, None)
        if kernel:
            self.kernel_threads.add(pid)

    def now_ns(self) -> int:
        return round(self.t_s * 1e9)

    def sleep(self, seconds: float) -> None:
        step = 0.01
        for _ in range(round(seconds / step)):
            for pid, load in self.loads.items():
                self._used[pid] = self._used.get(pid, 0.0) + load(self.t_s) * step
            self._gone += self.gone(self.t_s) * step
            self._stolen += self.steal(self.t_s) * step
            self.t_s += step

    def cpu(self) -> CpuTimes | None:
        self.reads.append(("cpu", self.t_s))
        steal = round(self._stolen * TICKS)
        busy = round((sum(self._used.values()) + self._gone) * TICKS)
        return CpuTimes(busy, steal, round(self.t_s * TICKS * CORES) - busy - steal)

    def processes(self) -> dict[int, ProcessTimes]:
        ticks = {pid: round(self._used.get(pid, 0.0) * TICKS) for pid in self.parents}
        return {
            pid: ProcessTimes(pid, f"name{pid}", "S", parent, pid in self.kernel_threads, ticks[pid], 0, self.born[pid])
            for pid, parent in self.parents.items()
        }

    def command_line(self, pid: int) -> str:
        return f"command{pid}"

    def load_1(self) -> float | None:
        return 9.0
