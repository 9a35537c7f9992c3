"""The idle gate: the table of devices, the order of waiting and sampling, and CPU time by whom."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pynvml
import pytest

from harness.machine.gpu import Gpu, GpuSample
from harness.machine.host import CpuTimes
from harness.machine.idle import check_idle
from harness.machine.idle_rule import IdleLimits, limits_from_environment
from harness.machine.vram import LowestVram
from tests.harness.machine.fake_nvml import FakeNvml
from tests.harness.machine.fake_probe import RUNNER, FakeProbe

LIMITS = IdleLimits(wait_max_s=5)


def check(probe: FakeProbe, limits: IdleLimits = LIMITS, previous_end_ns: int | None = None) -> dict[str, Any]:
    record = check_idle(limits, {RUNNER}, previous_end_ns, None, probe)
    json.dumps(record, allow_nan=False)
    assert record["ok"] is (record["reasons"] == [])
    return record


# --- the table of devices ---

NOT_SUPPORTED = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
UNKNOWN = pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)


@pytest.mark.parametrize("utilization", [0, 2])
def test_idle_card_passes(utilization: int) -> None:
    assert check(FakeProbe(FakeNvml({"utilization": utilization})))["ok"]


@pytest.mark.parametrize(
    ("card", "reason"),
    [
        ({"utilization": 3}, "utilization: 3 % (at most 2 %)"),
        ({"graphics": [78]}, "graphics process: pid 78 (command78)"),
        ({"compute": NOT_SUPPORTED}, "unreadable: compute_pids: Not Supported"),
        ({"graphics": UNKNOWN}, "unreadable: graphics_pids: Unknown Error"),
        ({"used": UNKNOWN}, "unreadable: memory_used: Unknown Error"),
        ({"reasons": NOT_SUPPORTED}, "unreadable: clock_event_reasons: Not Supported"),
        ({"uuid": UNKNOWN}, "unreadable: uuid: Unknown Error"),
        ({"used": 1025 << 20}, "memory: 1025 MiB in use (at most 1024 MiB); end what holds it"),
        ({"reasons": 0x08}, "clock event: hardware slowdown; cool the card, or mend its power"),
        ({"reasons": 0x20}, "clock event: software thermal slowdown; cool the card, or mend its power"),
        ({"reasons": 0x40 | 0x04}, "clock event: hardware thermal slowdown; cool the card, or mend its power"),
        ({"reasons": 0x80 | 0x01}, "clock event: power brake; cool the card, or mend its power"),
    ],
)
def test_busy_or_unreadable_card_is_refused(card: dict[str, Any], reason: str) -> None:
    assert check(FakeProbe(FakeNvml(card)))["reasons"] == [f"gpu 0 (Fake H200): {reason}"]


def test_software_power_cap_is_recorded_and_no_reason() -> None:
    record = check(FakeProbe(FakeNvml({"reasons": 0x05})))
    assert record["ok"]
    assert record["samples"][-1]["gpus"][0]["clock_events"] == ["idle", "software power cap"]


def test_a_clock_event_in_one_reading_of_many_is_refused() -> None:
    probe = FakeProbe()
    probe._gpu = Gpu(FakeNvml({"reasons": lambda: 0x40 if 1002.9 <= probe.t_s < 1003.1 else 1}), ())
    assert "hardware thermal slowdown" in check(probe)["reasons"][0]


def test_memory_that_stays_behind_is_refused_against_the_lowest_reading_of_this_boot(tmp_path: Path) -> None:
    """A display server's 539 MiB are the card's own; 611 MiB more on top of them are someone's, with no process in sight."""
    lock = tmp_path / "lock"

    def gate(*used_mib: int, boot: str = "first") -> dict[str, Any]:
        probe = FakeProbe(FakeNvml(*({"used": mib << 20} for mib in used_mib)))
        probe._vram = LowestVram(lock, boot)
        return check(probe)

    assert gate(539, 0)["ok"]
    assert gate(539 + 128, 128)["ok"]
    assert gate(1150, 0)["reasons"] == [
        "gpu 0 (Fake H200): memory residue: 1150 MiB in use, 611 MiB more than the lowest reading of this boot (at most 128 MiB more); "
        "end what holds it", "gpu 0 (Fake H200): memory: 1150 MiB in use (at most 1024 MiB); end what holds it"]
    assert gate(539, 611)["reasons"] == [
        "gpu 1 (Fake H200): memory residue: 611 MiB in use, 611 MiB more than the lowest reading of this boot (at most 128 MiB more); "
        "end what holds it"]
    assert gate(200, 0)["ok"], "a lower reading is the new lowest"
    assert not gate(539, 0)["ok"]
    assert gate(539, 0, boot="second")["ok"]


def test_the_highest_reading_of_memory_counts(tmp_path: Path) -> None:
    probe = FakeProbe()
    probe._vram = LowestVram(tmp_path / "lock", "boot")
    probe._gpu = Gpu(FakeNvml({"used": lambda: (611 << 20) if 1002.9 <= probe.t_s < 1003.1 else 0}), ())
    assert "memory residue: 611 MiB" in check(probe)["reasons"][0]


@pytest.mark.parametrize("content", ["", "[]", '{"boot_id": "boot"}', '{"boot_id": "boot", "lowest": {"GPU-0": "none"}}', None])
def test_lowest_readings_that_cannot_be_read_refuse_with_the_cure(tmp_path: Path, content: str | None) -> None:
    if content is None:
        (tmp_path / "lock.vram").symlink_to(tmp_path / "elsewhere")
    else:
        (tmp_path / "lock.vram").write_text(content)
    probe = FakeProbe(FakeNvml({}))
    probe._vram = LowestVram(tmp_path / "lock", "boot")
    (reason,) = check(probe)["reasons"]
    assert reason.startswith("gpu unreadable: lock.vram beside the lock cannot be read (")
    assert reason.endswith("remove it while the machine is idle")


@pytest.mark.parametrize("text", ["", "x", "-1", "101", "nan"])
def test_limit_that_is_no_percentage_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"GPU_IDLE_UTIL_MAX=.*not a percentage"):
        limits_from_environment({"GPU_IDLE_UTIL_MAX": text})


def test_the_highest_of_several_readings_counts() -> None:
    """A card that is busy in one reading of many within the decision sample is refused."""
    probe = FakeProbe()
    nvml = FakeNvml({"utilization": lambda: 40 if 1002.9 <= probe.t_s < 1003.1 else 0})
    probe._gpu = Gpu(nvml, ())
    record = check(probe)
    assert record["reasons"] == ["gpu 0 (Fake H200): utilization: 40 % (at most 2 %)"]
    (gpu,) = record["samples"][-1]["gpus"]
    assert gpu["utilisation_max"] == 40
    assert len(gpu["utilisations"]) >= 5
    assert sorted(gpu["utilisations"])[-2:] == [0, 40]


def test_one_unreadable_reading_among_good_ones_refuses_and_leaves_no_maximum() -> None:
    probe = FakeProbe()
    probe._gpu = Gpu(FakeNvml({"utilization": lambda: UNKNOWN if 1002.9 <= probe.t_s < 1003.1 else 0}), ())
    record = check(probe)
    assert record["reasons"] == ["gpu 0 (Fake H200): unreadable: utilisation: Unknown Error"]
    assert record["samples"][-1]["gpus"][0]["utilisation_max"] is None


def test_driver_that_fails_is_refused_and_no_driver_is_not() -> None:
    assert "gpu unreadable: NVML does not start" in check(FakeProbe(FakeNvml(init_error=pynvml.NVML_ERROR_UNKNOWN)))["reasons"][0]
    record = check(FakeProbe())
    assert record["ok"]
    assert record["samples"][-1]["gpus"] is None


def test_gpu_process_of_the_series_itself_is_not_foreign() -> None:
    probe = FakeProbe(FakeNvml({"compute": [101]}))
    probe.add(101, lambda _: 0.0, parent=RUNNER)
    assert check(probe)["ok"]


def test_a_card_that_goes_away_within_the_sample_is_refused() -> None:
    probe = FakeProbe()

    class Vanishing(Gpu):
        def read(self) -> list[GpuSample] | None:
            gpus = super().read() or []
            return gpus if probe.t_s < 1003 else gpus[:1]

    probe._gpu = Vanishing(FakeNvml({}, {}), ())
    assert check(probe)["reasons"] == ["gpu unreadable: the list of GPUs changed within the sample"]


# --- waiting, sampling, deciding ---


def test_waits_for_a_decaying_load_and_then_samples() -> None:
    """A load that drains for ten seconds after each leg: both arms of a series get through, because waiting comes first."""
    probe = FakeProbe()
    ended = [probe.t_s]
    probe.add(50, lambda t: max(0.0, 1 - (t - ended[0]) / 10))
    for _ in range(2):
        ended[0] = probe.t_s
        record = check(probe, IdleLimits(), probe.now_ns())
        assert record["ok"]
        assert 8 < record["waited_s"] < 12
        assert record["since_previous_s"] == pytest.approx(record["waited_s"])
        assert [sample["role"] for sample in record["samples"]][-2:] == ["wait", "decision"]
        assert record["samples"][0]["reasons"]
        decision = record["samples"][-1]
        assert decision["end_ns"] - decision["start_ns"] >= 2e9
        assert decision["start_ns"] >= max(sample["end_ns"] for sample in record["samples"][:-1])


def test_minimum_wait_comes_before_the_first_sample() -> None:
    probe = FakeProbe()
    check(probe, IdleLimits(wait_min_s=3))
    assert probe.reads[0] == ("cpu", pytest.approx(1003))


def test_gives_up_after_the_longest_wait() -> None:
    probe = FakeProbe()
    probe.add(50, lambda _: 1.0)
    record = check(probe, IdleLimits(wait_max_s=7))
    assert 7 <= record["waited_s"] < 8
    assert record["reasons"] == ["foreign cpu: pid 50 (name50: command50) used 50.0% of all cores"]


def test_load_that_begins_after_the_wait_is_refused() -> None:
    probe = FakeProbe()
    probe.add(50, lambda t: float(t > 1002))
    record = check(probe)
    assert record["samples"][0]["reasons"] == []
    assert not record["ok"]


def test_first_leg_has_no_time_since_the_previous_and_load_is_recorded_only() -> None:
    record = check(FakeProbe())
    assert record["since_previous_s"] is None
    assert record["load1"] == 9.0
    assert record["ok"]


# --- CPU time ---


@pytest.mark.parametrize(("cores", "ok"), [(0.05, True), (0.07, False)])
def test_limit_on_foreign_cpu(cores: float, ok: bool) -> None:
    probe = FakeProbe()
    probe.add(50, lambda _: cores)
    assert check(probe)["ok"] is ok


def test_many_small_processes_are_judged_together() -> None:
    probe = FakeProbe()
    for pid in range(200, 220):
        probe.add(pid, lambda _: 0.01)
    record = check(probe)
    assert len(record["reasons"]) == 5
    assert "used 0.5% of all cores" in record["reasons"][0]


def test_own_tree_and_kernel_threads_are_not_foreign() -> None:
    probe = FakeProbe()
    probe.add(101, lambda _: 0.5, parent=RUNNER)
    probe.add(102, lambda _: 0.5, parent=101)
    probe.add(3, lambda _: 0.3, parent=2, kernel=True)
    record = check(probe)
    assert record["ok"]
    assert record["samples"][-1]["cpu"]["own"] == pytest.approx(0.5, abs=0.01)


def test_an_orphan_of_the_series_is_foreign() -> None:
    probe = FakeProbe()
    probe.add(101, lambda _: 0.5, parent=1)
    assert "pid 101" in check(probe)["reasons"][0]


def test_process_that_starts_within_the_sample_counts_whole() -> None:
    probe = FakeProbe()
    sleep = probe.sleep

    def sleep_and_start(seconds: float) -> None:
        if probe.t_s >= 1001.4 and 60 not in probe.parents:
            probe.add(60, lambda _: 1.0)
        sleep(seconds)

    probe.sleep = sleep_and_start  # type: ignore[method-assign]
    assert "pid 60" in check(probe)["reasons"][0]


def test_new_process_under_an_old_pid_counts_whole() -> None:
    probe = FakeProbe()
    probe.add(60, lambda _: 0.0)
    probe._used[60] = 500.0
    sleep = probe.sleep

    def sleep_and_replace(seconds: float) -> None:
        if probe.t_s >= 1001.4 and probe.born[60] == 100_000:
            probe._gone = 500.0
            probe.add(60, lambda _: 1.0)
        sleep(seconds)

    probe.sleep = sleep_and_replace  # type: ignore[method-assign]
    record = check(probe)
    assert any("pid 60" in reason for reason in record["reasons"])


def test_time_of_processes_that_no_scan_sees_is_refused_as_unattributed() -> None:
    probe = FakeProbe()
    probe.gone = lambda _: 0.2
    (reason,) = check(probe)["reasons"]
    assert reason.startswith("unattributed: 10.0% of all cores")


def test_steal_is_refused() -> None:
    probe = FakeProbe()
    probe.steal = lambda _: 0.2
    assert check(probe)["reasons"] == ["steal: the hypervisor took 10.0% of all cores (at most 3.0%)"]


@pytest.mark.parametrize("value", [None, CpuTimes(1, 1, 1)])
def test_unreadable_cpu_time_is_refused(value: CpuTimes | None) -> None:
    probe = FakeProbe()
    probe.cpu = lambda: value  # type: ignore[method-assign]
    record = check(probe)
    assert record["reasons"] == ["cpu unreadable: /proc/stat gave no CPU time for the sample"]
    assert record["samples"][-1]["cpu"] is None


# --- this machine ---


@contextmanager
def spinning() -> Iterator[subprocess.Popen[bytes]]:
    """A process of this machine that does nothing but use a core, at the usual priority even where the tests run below it."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as loop:
        try:
            with suppress(PermissionError):
                os.setpriority(os.PRIO_PROCESS, loop.pid, 0)
            yield loop
        finally:
            loop.kill()


def test_a_busy_loop_on_this_machine_is_refused_and_named() -> None:
    with spinning() as loop:
        # Only a root without children: this test's own loop must be foreign.
        record = check_idle(IdleLimits(sample_s=1, wait_min_s=0, wait_max_s=0), own_roots=set(), previous_end_ns=None)
    assert not record["ok"]
    named = rf"foreign cpu: pid {loop.pid} \(python.*: python.* -c while True: pass\) used [\d.]+% of all cores"
    assert any(re.fullmatch(named, reason) for reason in record["reasons"]), record["reasons"]


def test_the_same_loop_below_the_runner_is_its_own() -> None:
    with spinning() as loop:
        record = check_idle(IdleLimits(sample_s=1, wait_min_s=0, wait_max_s=0), own_roots={os.getpid()}, previous_end_ns=None)
    assert not any(f"pid {loop.pid} " in reason for reason in record["reasons"])
    assert record["samples"][-1]["cpu"]["own"] > 0.1 / (os.cpu_count() or 1)


def test_the_gate_loads_no_torch() -> None:
    """The harness must not load the card that it measures."""
    code = "import sys, harness.machine.idle, harness.leg.launch, harness.leg.memory; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=root).returncode == 0
