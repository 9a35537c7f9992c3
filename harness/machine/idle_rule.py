"""The idle gate's rule: its limits, and its decision over one stored sample.  Pure, so that evidence can be judged again at any time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from harness.machine.gpu import THROTTLED, event_names

UTILIZATION_VARIABLE = "GPU_IDLE_UTIL_MAX"
MIB = 1 << 20
GPU_NEEDED = ("uuid", "utilisation", "memory_used", "compute_pids", "graphics_pids", "clock_event_reasons")
"""Readings without which a card cannot be called idle."""
LIMITED = ("foreign_cpu", "steal", "utilization", "processes", "residue", "clock_event")
"""The checks by name; `residue` is GPU memory in use, by either limit."""
WAIVABLE = (*LIMITED, *(f"unreadable.{field}" for field in GPU_NEEDED))
"""What a spec may waive.  A whole probe that fails (`cpu`, `gpu`) is not among it: it tells nothing of anything."""


class Finding(NamedTuple):
    """Why a sample is not of an idle machine: the check by name, and what was found, naming what to stop."""

    check: str
    found: str


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
    vram_residue_max: int = 128 * MIB
    """Bytes in use above the card's lowest reading of this boot: less than any compute context takes."""
    vram_max: int = 1024 * MIB
    """Bytes in use whatever the lowest reading was: a display server's share, and nothing of a model's."""
    waived: tuple[str, ...] = ()
    """Checks (of :data:`WAIVABLE`) whose findings are recorded and refuse nothing."""


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


def decide(sample: Mapping[str, Any], limits: IdleLimits) -> list[str]:
    """Reasons why a sample of idle.json is not of an idle machine, each naming what to stop; empty when it is, or all are waived."""
    return [finding.found for finding in findings(sample, limits) if finding.check not in limits.waived]


def findings(sample: Mapping[str, Any], limits: IdleLimits) -> list[Finding]:
    """Everything that makes a sample of idle.json not one of an idle machine, waived or not."""
    found = _find_cpu(sample["cpu"], limits)
    for gpu in sample["gpus"] or ():
        found += [Finding(check, f"gpu {gpu['index']} ({gpu['name']}): {text}") for check, text in _find_gpu(gpu, limits)]
    if (error := sample.get("gpu_error")) is not None:  # absent from the first series' snapshots
        found.append(Finding("gpu", f"gpu unreadable: {error}"))
    return found


def _find_cpu(cpu: Mapping[str, Any] | None, limits: IdleLimits) -> list[Finding]:
    if cpu is None:
        return [Finding("cpu", "cpu unreadable: /proc/stat gave no CPU time for the sample")]
    found, named = [], cpu["processes"]
    if cpu["foreign"] + cpu["unattributed"] > limits.foreign_cpu_max:
        found = [f"foreign cpu: pid {one['pid']} ({one['name']}: {one['command']}) used {one['share']:.1%} of all cores" for one in named]
        if cpu["unattributed"] > limits.foreign_cpu_max or not named:
            found.append(f"unattributed: {cpu['unattributed']:.1%} of all cores went to processes gone before its end, or to interrupts")
    steal = [Finding("steal", f"steal: the hypervisor took {cpu['steal']:.1%} of all cores (at most {limits.steal_max:.1%})")]
    return [Finding("foreign_cpu", text) for text in found] + (steal if cpu["steal"] > limits.steal_max else [])


def _find_gpu(gpu: Mapping[str, Any], limits: IdleLimits) -> list[Finding]:
    """One card, each on its own; of several readings the highest counts."""
    unreadable = gpu["unreadable"]
    found = [Finding(f"unreadable.{field}", f"unreadable: {field}: {unreadable[field]}") for field in GPU_NEEDED if field in unreadable]
    found += [Finding("processes", f"{one['kind']} process: pid {one['pid']} ({one['command']})") for one in gpu["foreign"]]
    known = [value for value in gpu["utilisations"] if value is not None]
    if known and max(known) > limits.gpu_util_max:
        found.append(Finding("utilization", f"utilization: {max(known)} % (at most {limits.gpu_util_max:g} %)"))
    used, lowest = gpu["memory_used_max"], gpu["memory_lowest"]
    if used is not None and lowest is not None and used - lowest > limits.vram_residue_max:
        found.append(Finding("residue", f"memory residue: {used // MIB} MiB in use, {(used - lowest) // MIB} MiB more than the lowest "
                             f"reading of this boot (at most {limits.vram_residue_max // MIB} MiB more); end what holds it"))
    if used is not None and used > limits.vram_max:
        found.append(Finding("residue", f"memory: {used // MIB} MiB in use (at most {limits.vram_max // MIB} MiB); end what holds it"))
    if (gpu["clock_event_reasons"] or 0) & THROTTLED:
        events = ", ".join(event_names(gpu["clock_event_reasons"] & THROTTLED))
        found.append(Finding("clock_event", f"clock event: {events}; cool the card, or mend its power"))
    return found
