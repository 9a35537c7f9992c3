"""What NVML tells about the GPUs of this machine.  Reading them makes no CUDA context, so the harness never loads the card it measures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pynvml

DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/nvidia0"))
"""Any of these means that the NVIDIA driver is on this machine, whether or not NVML works."""


EVENT_REASONS = {
    1 << 0: "idle", 1 << 1: "application clocks", 1 << 2: "software power cap", 1 << 3: "hardware slowdown", 1 << 4: "sync boost",
    1 << 5: "software thermal slowdown", 1 << 6: "hardware thermal slowdown", 1 << 7: "power brake", 1 << 8: "display clocks",
}
"""Why the clocks are what they are: the bits of NVML's nvmlClocksEventReason* (nvml.h)."""
POWER_CAPPED = 1 << 2
THROTTLED = 1 << 3 | 1 << 5 | 1 << 6 | 1 << 7
"""The bits under which no number counts: heat, or the board's supply.  A software power cap is how a card under full load runs."""


def event_names(mask: int) -> list[str]:
    """The reasons in a mask of clock event reasons, by name; a bit that has none is told by its value."""
    return [EVENT_REASONS.get(1 << bit, f"{1 << bit:#x}") for bit in range(mask.bit_length()) if mask >> bit & 1]


class GpuUnreadable(Exception):
    """The driver is there and a reading failed: nothing is known of the GPUs, which is not the same as none being busy."""


@dataclass(frozen=True, kw_only=True)
class GpuSample:
    """One reading of one GPU.  A value that could not be read is None, and `unreadable` says why, by field."""

    index: int
    uuid: str | None
    name: str | None
    utilisation: int | None
    """Per cent of the driver's last sample period in which a kernel ran."""
    memory_used: int | None
    """Bytes, without what the driver reserves for itself (NVML's version 2 call)."""
    compute_pids: tuple[int, ...] | None
    graphics_pids: tuple[int, ...] | None
    sm_clock_mhz: int | None
    temperature_c: int | None
    power_mw: int | None
    clock_event_reasons: int | None
    """NVML's bit mask (nvmlClocksEventReason*)."""
    unreadable: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class GpuIdentity:
    """What stays the same about one GPU.  `memory_total` is in bytes."""

    index: int
    uuid: str | None
    name: str | None
    driver: str | None
    cuda_driver: str | None
    """The newest CUDA that the driver takes, `major.minor`."""
    compute_capability: str | None
    memory_total: int | None


class Gpu:
    """A thin reader of NVML, opened on the first reading and closed by `with` or :meth:`close`.

    `nvml` is the pynvml module or a stand-in with its functions; `driver_files` decide whether a driver is on this machine.
    """

    def __init__(self, nvml: Any = pynvml, driver_files: Sequence[Path] = DRIVER_FILES) -> None:
        self._nvml = nvml
        self._driver_files = driver_files
        self._open: bool | None = None

    def read(self) -> list[GpuSample] | None:
        """Every GPU's state now; None on a machine without an NVIDIA driver.  Raises GpuUnreadable."""
        if not self._ensure_open():
            return None
        return [self._sample(index, handle) for index, handle in enumerate(self._handles())]

    def identities(self) -> list[GpuIdentity]:
        """Every GPU's identity; empty on a machine without an NVIDIA driver.  Raises GpuUnreadable."""
        if not self._ensure_open():
            return []
        return [self._identity(index, handle) for index, handle in enumerate(self._handles())]

    def close(self) -> None:
        """Let go of NVML."""
        if self._open:
            self._nvml.nvmlShutdown()
        self._open = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _ensure_open(self) -> bool:
        if self._open is None:
            try:
                self._nvml.nvmlInit()
                self._open = True
            except self._nvml.NVMLError as error:
                driver = [str(path) for path in self._driver_files if path.exists()]
                absent = (self._nvml.NVML_ERROR_LIBRARY_NOT_FOUND, self._nvml.NVML_ERROR_DRIVER_NOT_LOADED)
                if driver or error.value not in absent:
                    seen = f" although {driver[0]} is there" if driver else ""
                    raise GpuUnreadable(f"NVML does not start{seen}: {error}; check that nvidia-smi works for this user") from None
                self._open = False
        return self._open

    def _handles(self) -> list[Any]:
        try:
            return [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(self._nvml.nvmlDeviceGetCount())]
        except self._nvml.NVMLError as error:
            raise GpuUnreadable(f"NVML cannot list the GPUs: {error}; check that nvidia-smi works for this user") from None

    def _sample(self, index: int, handle: Any) -> GpuSample:
        nvml, failed = self._nvml, dict[str, str]()

        def read(field: str, reading: Callable[[], Any]) -> Any:
            try:
                return reading()
            except nvml.NVMLError as error:
                failed[field] = str(error)
                return None

        return GpuSample(
            index=index,
            uuid=read("uuid", lambda: _text(nvml.nvmlDeviceGetUUID(handle))),
            name=read("name", lambda: _text(nvml.nvmlDeviceGetName(handle))),
            utilisation=read("utilisation", lambda: int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)),
            memory_used=read("memory_used", lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).used)),
            compute_pids=read("compute_pids", lambda: _pids(nvml.nvmlDeviceGetComputeRunningProcesses(handle))),
            graphics_pids=read("graphics_pids", lambda: _pids(nvml.nvmlDeviceGetGraphicsRunningProcesses(handle))),
            sm_clock_mhz=read("sm_clock_mhz", lambda: int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))),
            temperature_c=read("temperature_c", lambda: int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))),
            power_mw=read("power_mw", lambda: int(nvml.nvmlDeviceGetPowerUsage(handle))),
            clock_event_reasons=read("clock_event_reasons", lambda: int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))),
            unreadable=failed,
        )

    def _identity(self, index: int, handle: Any) -> GpuIdentity:
        nvml = self._nvml

        def read(reading: Callable[[], Any]) -> Any:
            try:
                return reading()
            except nvml.NVMLError:
                return None

        return GpuIdentity(
            index=index,
            uuid=read(lambda: _text(nvml.nvmlDeviceGetUUID(handle))),
            name=read(lambda: _text(nvml.nvmlDeviceGetName(handle))),
            driver=read(lambda: _text(nvml.nvmlSystemGetDriverVersion())),
            cuda_driver=read(lambda: "{}.{}".format(*_version(int(nvml.nvmlSystemGetCudaDriverVersion())))),
            compute_capability=read(lambda: "{}.{}".format(*nvml.nvmlDeviceGetCudaComputeCapability(handle))),
            memory_total=read(lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).total)),
        )


def read_gpus() -> list[GpuSample] | None:
    """One reading of every GPU; None on a machine without an NVIDIA driver.  Raises GpuUnreadable."""
    with Gpu() as gpu:
        return gpu.read()


def _pids(processes: Sequence[Any]) -> tuple[int, ...]:
    return tuple(sorted(int(process.pid) for process in processes))


def _version(number: int) -> tuple[int, int]:
    """1000 x major + 10 x minor, as NVML and cuda.h have it."""
    return number // 1000, number % 1000 // 10


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
