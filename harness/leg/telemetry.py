"""The watcher of a performance leg: looks at the machine about once a second, so that trouble which begins within the leg is seen.

It runs inside the runner's own waiting loop, where a look costs least: nothing is started, and what it costs is the runner's own CPU time,
recorded with the rest.  The time between two looks grows with their cost, which stays under one per cent of a core.

Rows: {"kind": "sample", "start_ns", "end_ns", "cost_s", "cpu", "gpus", "gpu_error"} and one {"kind": "end", "cpu_s", "wall_s"}.
`cpu` holds clock ticks of the interval over all cores (`total`, `busy`, `own`, `kernel`, `foreign`, `unattributed`, `steal`) and the
largest foreign `processes`; `gpus` the cards' state at its end, with the compute and graphics processes that are not the series' own.
Times are CLOCK_MONOTONIC.  A value that could not be read is null.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from harness.machine.gpu import GpuSample, GpuUnreadable
from harness.machine.host import CpuTimes, ProcessTimes
from harness.machine.idle import NAMED_AT_MOST, NAMED_SHARE, Probe
from harness.machine.load import load_between, own_tree

PERIOD_S = 1.0
COST_SHARE = 0.01
"""Of one core: a look that took 50 ms is followed by a pause of five seconds."""

SHORTEST_S = 0.1
"""CPU time is counted in ticks of 10 ms: over less than this it says nothing."""


class Watcher:
    """Samples from its making to :meth:`finish`; call :meth:`look` as often as you like."""

    def __init__(self, own_roots: set[int], probe: Probe | None = None) -> None:
        self._roots, self._probe = own_roots, probe or Probe()
        self._began_ns, self._began_cpu_s = self._probe.now_ns(), time.process_time()
        self._rows: list[dict[str, Any]] = []
        self._cpu: CpuTimes | None = None
        self._processes: dict[int, ProcessTimes] = {}
        self._start_ns = self._due_ns = self._began_ns
        self._look(keep=False)

    def look(self) -> None:
        """Take a sample when one is due."""
        if self._probe.now_ns() >= self._due_ns:
            self._look()

    def finish(self) -> list[dict[str, Any]]:
        """Take the last sample, let go of the machine and return all rows."""
        if self._probe.now_ns() - self._start_ns >= SHORTEST_S * 1e9:
            self._look()
        self._probe.close()
        wall_s = (self._probe.now_ns() - self._began_ns) / 1e9
        self._rows.append({"kind": "end", "cpu_s": time.process_time() - self._began_cpu_s, "wall_s": wall_s})
        return self._rows

    def _look(self, keep: bool = True) -> None:
        began = self._probe.now_ns()
        cpu, processes = self._probe.cpu(), self._probe.processes()
        own = own_tree(self._processes, self._roots) | own_tree(processes, self._roots)
        gpus, gpu_error = None, None
        try:
            read = self._probe.gpus()
            gpus = None if read is None else [self._card(sample, own) for sample in read]
        except GpuUnreadable as error:
            gpu_error = str(error)
        now = self._probe.now_ns()
        if keep:
            self._rows.append({
                "kind": "sample", "start_ns": self._start_ns, "end_ns": began, "cost_s": (now - began) / 1e9,
                "cpu": self._cpu_row(cpu, processes, own), "gpus": gpus, "gpu_error": gpu_error,
            })
        self._cpu, self._processes, self._start_ns = cpu, processes, began
        self._due_ns = now + round(max(PERIOD_S * 1e9, (now - began) / COST_SHARE))

    def _cpu_row(self, cpu: CpuTimes | None, processes: Mapping[int, ProcessTimes], own: set[int]) -> dict[str, Any] | None:
        load = load_between(self._cpu, cpu, self._processes, processes, own)
        if load is None:
            return None
        named = sorted(load.foreign.items(), key=lambda item: -item[1])[:NAMED_AT_MOST]
        return {
            "total": load.total, "busy": load.busy, "own": load.own, "kernel": load.kernel, "foreign": sum(load.foreign.values()),
            "unattributed": load.unattributed, "steal": load.steal,
            "processes": [
                {"pid": pid, "name": processes[pid].name, "command": self._probe.command_line(pid), "ticks": ticks}
                for pid, ticks in named if ticks >= NAMED_SHARE * load.total
            ],
        }

    def _card(self, sample: GpuSample, own: set[int]) -> dict[str, Any]:
        row = asdict(sample)
        for kind in ("compute", "graphics"):
            pids = row.pop(f"{kind}_pids")
            row[f"foreign_{kind}"] = None if pids is None else [
                {"pid": pid, "command": self._probe.command_line(pid)} for pid in pids if pid not in own
            ]
        return row
