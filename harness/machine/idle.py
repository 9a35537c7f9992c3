"""The idle gate: whether this machine is free enough for a leg to count.

The order is what makes it true: wait (a minimum, then until a short sample is idle, at most a maximum), *then* sample for the whole
decision period, *then* decide.  A gate that samples before it waits sees the previous leg draining.  A value that cannot be read
refuses.  It must run inside the series lock.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.machine import host
from harness.machine.gpu import Gpu, GpuSample, GpuUnreadable, event_names
from harness.machine.host import CpuTimes, ProcessTimes
from harness.machine.idle_rule import IdleLimits, decide, findings
from harness.machine.load import Load, load_between, own_tree
from harness.machine.vram import LowestVram, VramUnreadable

SCHEMA = 1
_WAIT_SAMPLE_S = 0.5
_GPU_PERIOD_S = 0.25
NAMED_SHARE = 0.002
NAMED_AT_MOST = 5
"""Processes named in a record: the largest of all cores' time, from this share on."""


class Probe:
    """How the gate sees the machine and the clock; a test puts another in its place.  Close it to let go of NVML."""

    def __init__(self, lock: Path | None = None) -> None:
        self._gpu = Gpu()
        self._vram = None if lock is None else LowestVram(lock)

    def now_ns(self) -> int:
        """CLOCK_MONOTONIC."""
        return time.monotonic_ns()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def cpu(self) -> CpuTimes | None:
        return host.cpu_times()

    def processes(self) -> dict[int, ProcessTimes]:
        return host.all_times()

    def command_line(self, pid: int) -> str:
        return host.brief_command(pid)

    def load_1(self) -> float | None:
        return host.load_1()

    def gpus(self) -> list[GpuSample] | None:
        """None on a machine without an NVIDIA driver; raises GpuUnreadable."""
        return self._gpu.read()

    def lowest_memory(self, used: Mapping[str, int]) -> dict[str, int]:
        """The lowest use of each GPU of this boot, these readings included (bytes by uuid); empty where no lock says where it is kept."""
        return {} if self._vram is None else self._vram.lower(used)

    def close(self) -> None:
        self._gpu.close()


def check_idle(
    limits: IdleLimits, own_roots: set[int], previous_end_ns: int | None, lock: Path | None = None, probe: Probe | None = None
) -> dict[str, Any]:
    """Wait, sample, decide; returns the record kept as idle.json.

    `own_roots` are the series' own processes, whose trees are not foreign; `previous_end_ns` is when the last leg ended
    (CLOCK_MONOTONIC), None before the first; beside `lock` the GPUs' lowest memory use is kept.  `ok` is True only when `reasons` is
    empty; each reason names what to stop.  `waived` holds what a waiver of `limits` kept from being a reason: {check, found}.
    """
    if probe is None:
        probe = Probe(lock)
        try:
            return check_idle(limits, own_roots, previous_end_ns, lock, probe)
        finally:
            probe.close()
    started = probe.now_ns()
    probe.sleep(limits.wait_min_s)
    samples = []
    while True:
        sample = _sample(limits, min(_WAIT_SAMPLE_S, limits.sample_s), own_roots, probe)
        waited = (probe.now_ns() - started) / 1e9
        samples.append({"role": "wait", **sample})
        if not sample["reasons"] or waited >= limits.wait_max_s:
            break
    decision_start = probe.now_ns()
    decision = _sample(limits, limits.sample_s, own_roots, probe)
    samples.append({"role": "decision", **decision})
    return {
        "schema": SCHEMA,
        "ok": not decision["reasons"],
        "reasons": decision["reasons"],
        "waived": [finding._asdict() for finding in findings(decision, limits) if finding.check in limits.waived],
        "waited_s": waited,
        "samples": samples,
        "load1": probe.load_1(),
        "since_previous_s": None if previous_end_ns is None else (decision_start - previous_end_ns) / 1e9,
        "limits": asdict(limits),
    }


def _sample(limits: IdleLimits, period_s: float, own_roots: set[int], probe: Probe) -> dict[str, Any]:
    """One sample over at least `period_s`: CPU time by whom, and every GPU's readings, with the reasons that make it not idle."""
    start_ns = probe.now_ns()
    # /proc/stat is read outside the two scans, so that time which no scan saw is counted as foreign rather than lost.
    cpu_before, before = probe.cpu(), probe.processes()
    readings: list[list[GpuSample]] = []
    gpu_error: str | None = None
    while True:
        try:
            gpus = probe.gpus()
            if gpus is not None:
                readings.append(gpus)
        except GpuUnreadable as error:
            gpu_error = str(error)
        remaining = period_s - (probe.now_ns() - start_ns) / 1e9
        if remaining <= 0:
            break
        probe.sleep(min(_GPU_PERIOD_S if readings else remaining, remaining))
    after, cpu_after = probe.processes(), probe.cpu()
    end_ns = probe.now_ns()
    own = own_tree(before, own_roots) | own_tree(after, own_roots)
    load = load_between(cpu_before, cpu_after, before, after, own)
    cards, list_error = _gpu_records(readings, own, probe)
    record = {
        "start_ns": start_ns, "end_ns": end_ns, "cpu": _cpu_record(load, after, probe), "gpus": cards,
        "gpu_error": gpu_error or list_error,
    }
    return {**record, "reasons": decide(record, limits)}


def _cpu_record(load: Load | None, after: Mapping[int, ProcessTimes], probe: Probe) -> dict[str, Any] | None:
    """Shares of all cores' time: foreign processes, stolen by the hypervisor, and unattributed, which counts as foreign, too."""
    if load is None:
        return None
    total = load.total
    unattributed, foreign, steal = max(0, load.unattributed) / total, sum(load.foreign.values()) / total, load.steal / total
    named = [
        {"pid": pid, "name": after[pid].name, "command": probe.command_line(pid), "share": ticks / total}
        for pid, ticks in sorted(load.foreign.items(), key=lambda item: -item[1])[:NAMED_AT_MOST]
        if ticks / total >= NAMED_SHARE
    ]
    shares = {"busy": load.busy / total, "own": load.own / total, "foreign": foreign, "unattributed": unattributed, "steal": steal}
    return {"ticks": total, **shares, "processes": named}


def _gpu_records(
    readings: list[list[GpuSample]], own: set[int], probe: Probe
) -> tuple[list[dict[str, Any]] | None, str | None]:
    """Every GPU's last reading with what all its readings say, and an error.  (None, None) without an NVIDIA driver."""
    if not readings:
        return None, None
    used: dict[str, list[int | None]] = {}
    for sample in (sample for reading in readings for sample in reading):
        used.setdefault(sample.uuid or "?", []).append(sample.memory_used)
    try:
        lowest = probe.lowest_memory({uuid: min(known) for uuid, values in used.items() if (known := [v for v in values if v is not None])})
    except VramUnreadable as error:
        return None, str(error)
    records = []
    for series in zip(*readings, strict=False):
        values = used[series[0].uuid or "?"]
        utilisations = [sample.utilisation for sample in series]
        mask = 0
        for sample in series:
            mask |= sample.clock_event_reasons or 0
        records.append({
            **asdict(series[-1]), "utilisations": utilisations, "utilisation_max": _highest(utilisations),
            "memory_used_max": _highest(values), "memory_lowest": lowest.get(series[0].uuid or "?"),
            "clock_event_reasons": mask, "clock_events": event_names(mask),
            "unreadable": {field: why for sample in reversed(series) for field, why in sample.unreadable.items()},
            "foreign": [
                {"kind": kind, "pid": pid, "command": probe.command_line(pid)}
                for kind in ("compute", "graphics")
                for pid in sorted({pid for sample in series for pid in getattr(sample, f"{kind}_pids") or ()} - own)
            ],
        })
    changed = len({tuple(sample.uuid for sample in reading) for reading in readings}) != 1
    return records, "the list of GPUs changed within the sample" if changed else None


def _highest(values: list[int | None]) -> int | None:
    """None when any is unknown: the highest may have been that one."""
    known = [value for value in values if value is not None]
    return max(known) if known and len(known) == len(values) else None
