"""NVML readings: a failed reading is null and named, a missing driver is not a failed one."""

from __future__ import annotations

from pathlib import Path

import pynvml
import pytest

from harness.machine.gpu import Gpu, GpuUnreadable
from tests.harness.machine.fake_nvml import FakeNvml

NOT_SUPPORTED = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def test_reads_every_card() -> None:
    nvml = FakeNvml({"utilization": 7, "used": 611 << 20, "compute": [9, 4], "graphics": [5]}, {})
    with Gpu(nvml, ()) as gpu:
        first, second = gpu.read() or []
        (identity, _) = gpu.identities()
    assert (first.index, first.uuid, first.utilisation, first.memory_used) == (0, "GPU-0", 7, 611 << 20)
    assert (first.compute_pids, first.graphics_pids) == ((4, 9), (5,))
    assert (first.sm_clock_mhz, first.temperature_c, first.power_mw, first.clock_event_reasons) == (345, 30, 70_000, 1)
    assert (second.index, second.uuid, second.utilisation, second.unreadable) == (1, "GPU-1", 0, {})
    assert (identity.driver, identity.compute_capability, identity.memory_total) == ("580.1", "9.0", 150 << 30)
    assert (nvml.starts, nvml.stops) == (1, 1)


FIELDS = {
    "utilization": "utilisation", "used": "memory_used", "compute": "compute_pids", "graphics": "graphics_pids", "clock": "sm_clock_mhz",
    "temperature": "temperature_c", "power": "power_mw", "reasons": "clock_event_reasons", "uuid": "uuid", "name": "name",
}


@pytest.mark.parametrize("card_field", FIELDS)
def test_a_value_that_cannot_be_read_is_null_and_named(card_field: str) -> None:
    (sample,) = Gpu(FakeNvml({card_field: NOT_SUPPORTED}), ()).read() or []
    assert getattr(sample, FIELDS[card_field]) is None
    assert list(sample.unreadable) == [FIELDS[card_field]]
    assert sum(getattr(sample, field) is None for field in FIELDS.values()) == 1


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED])
def test_no_driver_is_no_gpu_but_a_driver_without_nvml_is_unreadable(code: int, tmp_path: Path) -> None:
    driver = tmp_path / "nvidiactl"
    gpu = Gpu(FakeNvml(init_error=code), (driver,))
    assert gpu.read() is None
    assert gpu.identities() == []
    driver.touch()
    with pytest.raises(GpuUnreadable, match="nvidiactl is there"):
        Gpu(FakeNvml(init_error=code), (driver,)).read()


@pytest.mark.parametrize("nvml", [FakeNvml(init_error=pynvml.NVML_ERROR_UNKNOWN), FakeNvml({}, count_error=pynvml.NVML_ERROR_GPU_IS_LOST)])
def test_a_driver_that_fails_is_unreadable(nvml: FakeNvml) -> None:
    with pytest.raises(GpuUnreadable, match="nvidia-smi"):
        Gpu(nvml, ()).read()


def test_the_real_module_has_every_name_that_is_used() -> None:
    for name in (name for name in vars(FakeNvml) if not name.startswith("_")):
        assert hasattr(pynvml, name), name
