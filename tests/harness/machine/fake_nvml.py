"""A stand-in for the pynvml module: cards as dictionaries, any reading may fail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml

IDLE_CARD = {
    "uuid": "GPU-0", "name": "Fake H200", "utilization": 0, "used": 0, "total": 150 << 30, "compute": [], "graphics": [],
    "clock": 345, "temperature": 30, "power": 70_000, "reasons": 1, "capability": (9, 0),
}


class FakeNvml:
    """`cards` are changes to an idle card; a reading that is an NVMLError is raised, one that is callable is called each time."""

    NVMLError = pynvml.NVMLError
    NVML_ERROR_LIBRARY_NOT_FOUND = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    NVML_ERROR_DRIVER_NOT_LOADED = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = pynvml.NVML_CLOCK_SM, pynvml.NVML_TEMPERATURE_GPU
    nvmlMemory_v2 = pynvml.nvmlMemory_v2  # noqa: N815

    def __init__(self, *cards: dict[str, Any], init_error: int | None = None, count_error: int | None = None) -> None:
        self.cards = [{**IDLE_CARD, "uuid": f"GPU-{index}", **card} for index, card in enumerate(cards)]
        self.init_error, self.count_error = init_error, count_error
        self.starts = self.stops = 0

    def nvmlInit(self) -> None:  # noqa: N802
        if self.init_error is not None:
            raise pynvml.NVMLError(self.init_error)
        self.starts += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.stops += 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        if self.count_error is not None:
            raise pynvml.NVMLError(self.count_error)
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.1"

    def nvmlSystemGetCudaDriverVersion(self) -> int:  # noqa: N802
        return 13020

    def nvmlDeviceGetUtilizationRates(self, card: int) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=self._value(card, "utilization"))

    def nvmlDeviceGetMemoryInfo(self, card: int, version: int) -> Any:  # noqa: N802
        assert version == pynvml.nvmlMemory_v2
        return SimpleNamespace(used=self._value(card, "used"), total=self._value(card, "total"))

    def nvmlDeviceGetComputeRunningProcesses(self, card: int) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=pid) for pid in self._value(card, "compute")]

    def nvmlDeviceGetGraphicsRunningProcesses(self, card: int) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=pid) for pid in self._value(card, "graphics")]

    def nvmlDeviceGetUUID(self, card: int) -> str:  # noqa: N802
        return self._value(card, "uuid")

    def nvmlDeviceGetName(self, card: int) -> str:  # noqa: N802
        return self._value(card, "name")

    def nvmlDeviceGetClockInfo(self, card: int, kind: int) -> int:  # noqa: N802
        assert kind == pynvml.NVML_CLOCK_SM
        return self._value(card, "clock")

    def nvmlDeviceGetTemperature(self, card: int, kind: int) -> int:  # noqa: N802
        return self._value(card, "temperature")

    def nvmlDeviceGetPowerUsage(self, card: int) -> int:  # noqa: N802
        return self._value(card, "power")

    def nvmlDeviceGetCurrentClocksEventReasons(self, card: int) -> int:  # noqa: N802
        return self._value(card, "reasons")

    def nvmlDeviceGetCudaComputeCapability(self, card: int) -> tuple[int, int]:  # noqa: N802
        return self._value(card, "capability")

    def _value(self, card: int, field: str) -> Any:
        value = self.cards[card][field]
        if callable(value):
            value = value()
        if isinstance(value, pynvml.NVMLError):
            raise value
        return value
