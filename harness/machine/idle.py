"""The idle gate: whether this machine is free enough for a leg to count.

The order is what makes it true: wait (a minimum, then until a short sample is idle, at most a maximum), *then* sample for the whole
decision period, *then* decide.  A gate that samples before it waits sees the previous leg draining.  A value that cannot be read
refuses.  It must run inside the series lock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from harness.machine import host
from harness.machine.gpu import Gpu, GpuSample, GpuUnreadable
from harness.machine.host import CpuTimes, ProcessTimes
from harness.machine.load import Load, load_between, own_tree

SCHEMA = 1
UTILIZATION_VARIABLE = "GPU_IDLE_UTIL_MAX"
_WAIT_SAMPLE_S = 0.5
_GPU_PERIOD_S = 0.25
NAMED_SHARE = 0.002
NAMED_AT_MOST = 5
"""Processes named in a record: the largest of all cores' time, from this share on."""


@dataclass(frozen=True, kw_only=True)
class IdleLimits:
    """What counts as idle.  CPU shares are of all cores over the sample."""

    foreign_cpu_max: float = 0.03
    steal_max: float = 0.03
    sample_s: float = 2.0
    wait_min_s: float = 1.0
    wait_max_s: float = 90.0
    gpu_util_max: float = 2
    """Per cent of any GPU, the maximum over the sample's readings."""
    gpu_util_source: str = "default"
    """Where `gpu_util_max` comes from: `default` or the environment variable's name."""


def limits_from_environment(environment: Mapping[str, str] = os.environ) -> IdleLimits:
    """The limits, with GPU_IDLE_UTIL_MAX from `environment` where it is set; ValueError when that is no percentage."""
    text = environment.get(UTILIZATION_VARIABLE)
    if text is None:
        return IdleLimits()
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value <= 100:
        raise ValueError(f"{UTILIZATION_VARIABLE}={text!r}: not a percentage; give a number from 0 to 100, or unset it")
    return IdleLimits(gpu_util_max=value, gpu_util_source=UTILIZATION_VARIABLE)


class Probe:
    """How the gate sees the machine and the clock; a test puts another in its place.  Close it to let go of NVML."""

    def __init__(self) -> None:
        self._gpu = Gpu()

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

    def close(self) -> None:
        self._gpu.close()


def check_idle(limits: IdleLimits, own_roots: set[int], previous_end_ns: int | None, probe: Probe | None = None) -> dict[str, Any]:
    """Wait, sample, decide; returns the record kept as idle.json.

    `own_roots` are the series' own processes, whose trees are not foreign; `previous_end_ns` is when the last leg ended
    (CLOCK_MONOTONIC), None before the first.  `ok` is True only when `reasons` is empty; each reason names what to stop.
    """
    if probe is None:
        probe = Probe()
        try:
            return check_idle(limits, own_roots, previous_end_ns, probe)
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
    cpu, reasons = _judge_cpu(limits, load, after, probe)
    gpu_records, gpu_reasons = _judge_gpus(limits, readings, own, probe)
    if gpu_error is not None:
        gpu_reasons.append(f"gpu unreadable: {gpu_error}")
    return {"start_ns": start_ns, "end_ns": end_ns, "cpu": cpu, "gpus": gpu_records, "reasons": reasons + gpu_reasons}


def _judge_cpu(
    limits: IdleLimits, load: Load | None, after: Mapping[int, ProcessTimes], probe: Probe
) -> tuple[dict[str, Any] | None, list[str]]:
    """Shares of all cores' time: foreign processes, stolen by the hypervisor, and unattributed, which counts as foreign, too."""
    if load is None:
        return None, ["cpu unreadable: /proc/stat gave no CPU time for the sample"]
    total = load.total
    unattributed, foreign, steal = max(0, load.unattributed) / total, sum(load.foreign.values()) / total, load.steal / total
    named = [
        {"pid": pid, "name": after[pid].name, "command": probe.command_line(pid), "share": ticks / total}
        for pid, ticks in sorted(load.foreign.items(), key=lambda item: -item[1])[:NAMED_AT_MOST]
        if ticks / total >= NAMED_SHARE
    ]
    reasons = []
    if foreign + unattributed > limits.foreign_cpu_max:
        reasons = [f"foreign cpu: pid {one['pid']} ({one['name']}: {one['command']}) used {one['share']:.1%} of all cores" for one in named]
        if unattributed > limits.foreign_cpu_max or not named:
            reasons.append(f"unattributed: {unattributed:.1%} of all cores went to processes gone before its end, or to interrupts")
    if steal > limits.steal_max:
        reasons.append(f"steal: the hypervisor took {steal:.1%} of all cores (at most {limits.steal_max:.1%})")
    shares = {"busy": load.busy / total, "own": load.own / total, "foreign": foreign, "unattributed": unattributed, "steal": steal}
    return {"ticks": total, **shares, "processes": named}, reasons


def _judge_gpus(
    limits: IdleLimits, readings: list[list[GpuSample]], own: set[int], probe: Probe
) -> tuple[list[dict[str, Any]] | None, list[str]]:
    """Every GPU on its own over all its readings; the highest utilization counts.  None without an NVIDIA driver."""
    if not readings:
        return None, []
    records: list[dict[str, Any]] = []
    reasons: list[str] = []
    if len({tuple(sample.uuid for sample in reading) for reading in readings}) != 1:
        reasons.append("gpu unreadable: the list of GPUs changed within the sample")
    for series in zip(*readings, strict=False):
        gpu = f"gpu {series[0].index} ({series[0].name})"
        utilisations = [sample.utilisation for sample in series]
        known = [value for value in utilisations if value is not None]
        complete = len(known) == len(utilisations)
        for field in ("utilisation", "compute_pids", "graphics_pids"):
            errors = [sample.unreadable.get(field, "no value") for sample in series if getattr(sample, field) is None]
            if errors:
                reasons.append(f"{gpu}: unreadable: {field}: {errors[0]}")
        for kind in ("compute", "graphics"):
            pids = {pid for sample in series for pid in getattr(sample, f"{kind}_pids") or ()}
            reasons += [f"{gpu}: {kind} process: pid {pid} ({probe.command_line(pid)})" for pid in sorted(pids - own)]
        if known and max(known) > limits.gpu_util_max:
            reasons.append(f"{gpu}: utilization: {max(known)} % (at most {limits.gpu_util_max:g} %)")
        records.append({**asdict(series[-1]), "utilisations": utilisations, "utilisation_max": max(known) if complete else None})
    return records, reasons
