"""What NVML tells of one card: every field as a value or as the exact error, so that a record shows what a gate may rely on."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pynvml

SPIN = """
import time, torch
held = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
torch.cuda.synchronize()
print("ready", flush=True)
end = time.monotonic() + 2.0
while time.monotonic() < end:
    for _ in range(50):
        a @ a
    torch.cuda.synchronize()
print("spun", flush=True)
input()
"""
"""A process that holds 1 GiB and a context, multiplies for two seconds, then waits to be told to end."""

IDLE_WAIT_S = 6.0


def attempt(read: Callable[[], Any]) -> Any:
    """The value of `read`, or {"error": the exception's type and text}; never a made-up value."""
    try:
        return read()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def handle() -> Any:
    """NVML's handle of card 0; initialises NVML."""
    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByIndex(0)


def identity(card: Any) -> dict[str, Any]:
    """Names and versions that do not change while the machine runs."""
    return {
        "name": attempt(lambda: pynvml.nvmlDeviceGetName(card)),
        "driver": attempt(pynvml.nvmlSystemGetDriverVersion),
        "cuda_driver_version": attempt(pynvml.nvmlSystemGetCudaDriverVersion_v2),
        "nvml_version": attempt(pynvml.nvmlSystemGetNVMLVersion),
        "cards": attempt(pynvml.nvmlDeviceGetCount),
        "compute_capability": attempt(lambda: list(pynvml.nvmlDeviceGetCudaComputeCapability(card))),
        "power_limit_mw": attempt(lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(card)),
        "persistence_mode": attempt(lambda: pynvml.nvmlDeviceGetPersistenceMode(card)),
        "compute_mode": attempt(lambda: pynvml.nvmlDeviceGetComputeMode(card)),
        "mig_mode": attempt(lambda: list(pynvml.nvmlDeviceGetMigMode(card))),
        "pcie_generation": attempt(lambda: pynvml.nvmlDeviceGetCurrPcieLinkGeneration(card)),
        "pcie_width": attempt(lambda: pynvml.nvmlDeviceGetCurrPcieLinkWidth(card)),
        "max_sm_clock_mhz": attempt(lambda: pynvml.nvmlDeviceGetMaxClockInfo(card, pynvml.NVML_CLOCK_SM)),
        "max_memory_clock_mhz": attempt(lambda: pynvml.nvmlDeviceGetMaxClockInfo(card, pynvml.NVML_CLOCK_MEM)),
    }


def _memory(card: Any, version: Any = None) -> dict[str, int]:
    told = pynvml.nvmlDeviceGetMemoryInfo(card) if version is None else pynvml.nvmlDeviceGetMemoryInfo(card, version=version)
    return {name: getattr(told, name) for name in ("total", "free", "used", "reserved") if hasattr(told, name)}


def _processes(told: list[Any]) -> list[dict[str, Any]]:
    return [{"pid": process.pid, "bytes": process.usedGpuMemory} for process in told]


def state(card: Any) -> dict[str, Any]:
    """One reading of every field that changes: clocks in MHz, power in mW, energy in mJ, memory in bytes, temperature in Celsius."""
    return {
        "utilisation_gpu_percent": attempt(lambda: pynvml.nvmlDeviceGetUtilizationRates(card).gpu),
        "utilisation_memory_percent": attempt(lambda: pynvml.nvmlDeviceGetUtilizationRates(card).memory),
        "memory_v1": attempt(lambda: _memory(card)),
        "memory_v2": attempt(lambda: _memory(card, pynvml.nvmlMemory_v2)),
        "compute_processes": attempt(lambda: _processes(pynvml.nvmlDeviceGetComputeRunningProcesses(card))),
        "graphics_processes": attempt(lambda: _processes(pynvml.nvmlDeviceGetGraphicsRunningProcesses(card))),
        "sm_clock_mhz": attempt(lambda: pynvml.nvmlDeviceGetClockInfo(card, pynvml.NVML_CLOCK_SM)),
        "memory_clock_mhz": attempt(lambda: pynvml.nvmlDeviceGetClockInfo(card, pynvml.NVML_CLOCK_MEM)),
        "power_mw": attempt(lambda: pynvml.nvmlDeviceGetPowerUsage(card)),
        "total_energy_mj": attempt(lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(card)),
        "temperature_c": attempt(lambda: pynvml.nvmlDeviceGetTemperature(card, pynvml.NVML_TEMPERATURE_GPU)),
        "performance_state": attempt(lambda: pynvml.nvmlDeviceGetPerformanceState(card)),
        "clock_event_reasons": attempt(lambda: pynvml.nvmlDeviceGetCurrentClocksEventReasons(card)),
        "clock_event_reasons_supported": attempt(lambda: pynvml.nvmlDeviceGetSupportedClocksEventReasons(card)),
    }


def watch() -> dict[str, Any]:
    """The card before any process, while another one holds it idle, while it multiplies, and after it ended.

    `listed_as_own_pid` tells whether NVML lists the process under the pid that this machine knows it by; `back_to_zero_s` is the time
    from its end until utilisation read 0, null when it did not within the wait.
    """
    card = handle()
    out: dict[str, Any] = {"identity": identity(card), "before_any_process": state(card)}
    started = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", SPIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None and other.stdout is not None
        if other.stdout.readline().strip() != "ready":
            return {**out, "error": "the other process did not start"}
        out["context_after_s"] = time.monotonic() - started
        time.sleep(1.0)
        out["while_multiplying"] = state(card)
        reading = [attempt(lambda: _timed(lambda: state(card))) for _ in range(3)]
        out["one_reading_ms"] = reading
        other.stdout.readline()
        time.sleep(0.5)
        out["held_but_still"] = state(card)
        listed = out["held_but_still"]["compute_processes"]
        out["listed_as_own_pid"] = any(entry["pid"] == other.pid for entry in listed) if isinstance(listed, list) else None
        other.stdin.write("\n")
        other.stdin.flush()
        other.wait()
    ended = time.monotonic()
    zero = clock = None
    while time.monotonic() - ended < IDLE_WAIT_S and (zero is None or clock is None):
        now = state(card)
        passed = time.monotonic() - ended
        if zero is None and now["utilisation_gpu_percent"] == 0:
            zero = passed
        if clock is None and now["sm_clock_mhz"] == out["before_any_process"]["sm_clock_mhz"]:
            clock = passed
        time.sleep(0.05)
    return {**out, "back_to_zero_s": zero, "back_to_idle_clock_s": clock, "after": state(card)}


def _timed(act: Callable[[], Any]) -> float:
    start = time.perf_counter()
    act()
    return (time.perf_counter() - start) * 1e3
