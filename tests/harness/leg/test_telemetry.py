"""The watcher: what begins within a leg voids it, what any machine does by itself does not."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pynvml
import pytest

from harness.leg.telemetry import Watcher
from harness.leg.telemetry_summary import summarise_telemetry
from harness.machine.gpu import Gpu, GpuSample
from harness.machine.idle_rule import IdleLimits
from tests.harness.machine.fake_nvml import FakeNvml
from tests.harness.machine.fake_probe import RUNNER, FakeProbe

LIMITS = asdict(IdleLimits())
ARM, BEGIN_S, LEG_S = 150, 1000, 40
BUSY = {"utilization": 97, "clock": 1980, "used": 20 << 30, "compute": [ARM]}
MARKS = [{"mark": "first_submit", "t_ns": (BEGIN_S + 10) * 10**9}, {"mark": "last_token", "t_ns": (BEGIN_S + 38) * 10**9}]


def watch(
    probe: FakeProbe, leg_s: float = LEG_S, marks: list[dict[str, Any]] = MARKS
) -> tuple[dict[str, Any], list[str], list[dict[str, Any]]]:
    """(summary, reasons, rows) of a leg on `probe`, whose arm keeps both cores busy but for what others take."""
    probe.add(ARM, lambda _: 1.5, parent=RUNNER)
    watcher = Watcher({RUNNER}, probe)
    while probe.t_s < BEGIN_S + leg_s:
        probe.sleep(0.5)
        watcher.look()
    rows = watcher.finish()
    json.dumps(rows, allow_nan=False)
    summary, reasons, _ = summarise_telemetry(rows, marks, LIMITS)
    json.dumps(summary, allow_nan=False)
    return summary, reasons, rows


def between(first_s: float, last_s: float, value: Any, other: Any) -> Callable[[], Any]:
    """A reading that is `value` between two moments of the leg; `PROBE` tells the time."""
    return lambda: value if first_s <= PROBE[0].t_s - BEGIN_S < last_s else other


PROBE: list[FakeProbe] = []


def gpu_leg(card: dict[str, Any], *more: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    PROBE[:] = [FakeProbe(FakeNvml({**BUSY, **card}, *more))]
    summary, reasons, _ = watch(PROBE[0])
    return summary, reasons


def test_a_quiet_leg_counts_and_its_own_load_is_its_own() -> None:
    summary, reasons, rows = watch(FakeProbe())
    assert reasons == []
    assert summary["gpus"] is None
    assert summary["cpu"]["window_s"] == 28
    for part in ("window", "leg"):
        assert summary["cpu"][part] == pytest.approx(dict.fromkeys(("foreign", "foreign_burst", "steal", "steal_burst"), 0), abs=0.002)
    assert 38 <= summary["samples"] <= 42
    assert summary["max_gap_s"] == pytest.approx(1, abs=0.1)
    assert (rows[0]["start_ns"], rows[-2]["end_ns"]) == (BEGIN_S * 10**9, pytest.approx((BEGIN_S + LEG_S) * 10**9, abs=6e8))


def test_a_process_that_appears_halfway_voids_the_leg_and_is_named() -> None:
    probe = FakeProbe()
    probe.add(60, lambda t: 0.4 * (t > BEGIN_S + LEG_S / 2))
    _, (reason,), _ = watch(probe)
    assert reason.startswith("foreign cpu: 20.0% of all cores over 5 s, ")
    assert "s into the measured window (at most 3.0%): pid 60 (name60: command60) 20.0%" in reason


@pytest.mark.parametrize(("seconds", "void"), [(0.25, False), (0.4, True)])
def test_a_short_burst_of_housekeeping_is_no_company(seconds: float, void: bool) -> None:
    """0.3 s of CPU time in five seconds are 3 % of two cores."""
    probe = FakeProbe()
    probe.add(60, lambda t: float(BEGIN_S + 20.2 <= t < BEGIN_S + 20.2 + seconds))
    assert bool(watch(probe)[1]) is void


def test_a_window_shorter_than_a_burst_has_the_same_budget() -> None:
    for seconds, void in ((0.25, False), (0.4, True)):
        probe = FakeProbe()
        probe.add(60, lambda t, seconds=seconds: float(BEGIN_S + 10.2 <= t < BEGIN_S + 10.2 + seconds))  # type: ignore[misc]
        assert bool(watch(probe, 12.0, [MARKS[0], {"mark": "last_token", "t_ns": (BEGIN_S + 11) * 10**9}])[1]) is void


@pytest.mark.parametrize(("first_s", "void"), [(2, False), (8, True), (34, True), (39, False)])
def test_only_the_measured_window_is_judged_and_the_whole_leg_is_recorded(first_s: float, void: bool) -> None:
    """Four seconds of another's work while the arm loads, over either edge of the window from 10 to 38 s, and after it."""
    for kind in ("foreign", "steal"):
        probe = FakeProbe()
        load = lambda t: 0.4 * (BEGIN_S + first_s <= t < BEGIN_S + first_s + 4)  # noqa: E731
        if kind == "foreign":
            probe.add(60, load)
        else:
            probe.steal = load
        summary, reasons, _ = watch(probe, 44)
        assert bool(reasons) is void
        assert summary["cpu"]["leg"][f"{kind}_burst"] == pytest.approx(0.16, abs=0.01)
        assert (summary["cpu"]["window"][f"{kind}_burst"] > 0.05) is void


def test_a_foreign_process_of_five_per_cent_over_the_window_voids() -> None:
    probe = FakeProbe()
    probe.add(60, lambda t: 0.1 * (BEGIN_S + 10 <= t < BEGIN_S + 38))
    summary, (reason,), _ = watch(probe)
    assert reason.startswith("foreign cpu: 5.")
    assert summary["cpu"]["window"]["foreign"] == pytest.approx(0.05, abs=0.003)


@pytest.mark.parametrize(("share", "seconds", "said"), [
    (0.031, 4.9, None), (0.054, 4.9, None), (0.07, 5.5, "over 5 s, "), (0.026, 28, None),
    (0.035, 28, "over the measured window (at most 3.0%)"),
])
def test_steal_has_a_limit_over_the_window_and_twice_that_over_a_burst(share: float, seconds: float, said: str | None) -> None:
    """As measured under the arms' own load 3.1 % over five seconds come and go; 3 % over the whole window is a slower machine."""
    probe = FakeProbe()
    probe.steal = lambda t: 2 * share * (BEGIN_S + 10 <= t < BEGIN_S + 10 + seconds)
    _, reasons, _ = watch(probe)
    assert len(reasons) == (said is not None)
    assert all(reason.startswith("steal: the hypervisor took ") and str(said) in reason for reason in reasons)


def test_time_that_no_scan_sees_voids_the_leg() -> None:
    probe = FakeProbe()
    probe.gone = lambda t: 0.2 * (t > BEGIN_S + 20)
    assert "unattributed 10.0%" in watch(probe)[1][0]


def test_stolen_time_voids_the_leg() -> None:
    probe = FakeProbe()
    probe.steal = lambda t: 0.2 * (t > BEGIN_S + 20)
    over_the_window, burst = watch(probe)[1]
    assert over_the_window.startswith("steal: the hypervisor took 6.")
    assert burst.startswith("steal: the hypervisor took 10.0% of all cores over 5 s")


def test_unreadable_cpu_time_voids_the_leg() -> None:
    probe = FakeProbe()
    read = probe.cpu
    probe.cpu = lambda: None if 1020 < probe.t_s < 1021.1 else read()  # type: ignore[method-assign]
    summary, reasons, _ = watch(probe)
    assert reasons == ["cpu unreadable: /proc/stat gave no CPU time for a part of the measured window"]
    assert summary["cpu"] is None


def test_cpu_time_unreadable_outside_the_window_leaves_the_whole_leg_null() -> None:
    probe = FakeProbe()
    read = probe.cpu
    probe.cpu = lambda: None if 1004 < probe.t_s < 1005.1 else read()  # type: ignore[method-assign]
    summary, reasons, _ = watch(probe)
    assert (reasons, summary["cpu"]["leg"]) == ([], None)
    assert summary["cpu"]["window"]["foreign"] == pytest.approx(0, abs=0.002)


def test_a_window_that_was_not_watched_to_its_end_voids_the_leg() -> None:
    assert watch(FakeProbe(), 36)[1] == ["cpu unreadable: the watcher did not look over the whole measured window"]


def test_a_leg_that_ends_at_a_look_has_no_sample_of_no_time() -> None:
    watcher = Watcher({RUNNER}, probe := FakeProbe())
    probe.sleep(1.5)
    watcher.look()
    probe.sleep(0.01)
    summary, reasons, _ = summarise_telemetry(watcher.finish(), [], LIMITS)
    assert (summary["samples"], reasons) == (1, [])


def test_time_of_the_arms_short_lived_children_is_its_own() -> None:
    """A compiler that an arm starts by the hundred is gone before any scan; its parent has reaped its time."""
    watcher = Watcher({RUNNER}, probe := FakeProbe())
    probe.add(ARM, lambda _: 0.1, parent=RUNNER)
    probe.add(160, lambda t: 1.0 * (t < 1003), parent=ARM)
    scan = probe.processes

    def after_its_end() -> dict[int, Any]:
        found = scan()
        if probe.t_s >= 1003:
            found[ARM] = found[ARM]._replace(reaped_ticks=found.pop(160).cpu_ticks)
        return found

    probe.processes = after_its_end  # type: ignore[method-assign]
    for _ in range(16):
        probe.sleep(0.5)
        watcher.look()
    summary, reasons, _ = summarise_telemetry(watcher.finish(), [], LIMITS)
    assert reasons == []
    assert summary["cpu"]["window"]["foreign_burst"] < 0.005


def test_a_busy_card_of_the_arm_counts() -> None:
    summary, reasons = gpu_leg({})
    assert reasons == []
    (card,) = summary["gpus"]
    clock = card["sm_clock_mhz"]
    assert (clock["min"], clock["median"], clock["max"], clock["spread"]) == (1980, 1980, 1980, 0)
    assert 26 <= clock["samples"] <= 29
    assert card["sm_clock_capped_mhz"] is None
    assert card["clock_event_reasons"] == ["idle"]
    assert (card["utilisation_max"], card["memory_used_max"]) == (97, 20 << 30)


@pytest.mark.parametrize(
    ("card", "reason"),
    [
        ({"compute": between(20, 30, [ARM, 77], [ARM])}, "foreign compute process: pid 77 (command77)"),
        ({"graphics": between(20, 30, [78], [])}, "foreign graphics process: pid 78 (command78)"),
        ({"reasons": between(20, 21.1, 0x40, 0)}, "clock event: hardware thermal slowdown: cool the card, or mend its power"),
        ({"reasons": between(20, 21.1, 0x80, 0)}, "clock event: power brake: cool the card, or mend its power"),
        ({"reasons": between(20, 21.1, 0x08 | 0x20, 0)},
         "clock event: hardware slowdown, software thermal slowdown: cool the card, or mend its power"),
        ({"clock": between(20, 25, 1860, 1980)}, "SM clock from 1860 to 1980 MHz within the measured window (at most 5% apart)"),
        ({"clock": between(20, 21.1, pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN), 1980)}, "unreadable: sm_clock_mhz"),
        ({"compute": between(20, 21.1, pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED), [])}, "unreadable: foreign_compute"),
    ],
)
def test_trouble_of_a_card_voids_the_leg(card: dict[str, Any], reason: str) -> None:
    assert gpu_leg(card)[1] == [f"gpu 0 (Fake H200): {reason}"]


def test_a_software_power_cap_is_recorded_with_its_clocks_and_not_judged() -> None:
    """As seen on an H200 at full load, whose clock then follows the kernels' own appetite."""
    summary, reasons = gpu_leg({"reasons": between(15, 40, 0b100, 0), "clock": between(15, 25, 1350, 1980)})
    assert reasons == []
    (card,) = summary["gpus"]
    assert card["clock_event_reasons"] == ["software power cap"]
    assert (card["sm_clock_capped_mhz"]["min"], card["sm_clock_capped_mhz"]["max"]) == (1350, 1980)
    assert (card["sm_clock_mhz"]["min"], card["sm_clock_mhz"]["max"]) == (1980, 1980)


def test_each_card_is_watched_on_its_own() -> None:
    _, reasons = gpu_leg({}, {"compute": [77]})
    assert reasons == ["gpu 1 (Fake H200): foreign compute process: pid 77 (command77)"]


def test_what_a_card_does_outside_the_measured_window_is_no_spread() -> None:
    """Loading runs at other clocks, a card without work idles, and a small wobble is no trouble."""
    summary, reasons = gpu_leg({"clock": between(0, 9.9, 345, 1980)}, {"clock": 345})
    assert reasons == []
    assert [card["sm_clock_mhz"] is None for card in summary["gpus"]] == [False, True]
    assert gpu_leg({"clock": between(20, 25, 1900, 1980)})[1] == []


def test_a_process_seen_once_is_one_that_was_just_starting_or_ending() -> None:
    assert gpu_leg({"compute": between(20, 21, [ARM, 151], [ARM])})[1] == []


def test_cards_that_go_away_void_the_leg() -> None:
    probe = FakeProbe()

    class Vanishing(Gpu):
        def read(self) -> list[GpuSample] | None:
            gpus = super().read() or []
            return gpus if probe.t_s < 1020 else gpus[:1]

    probe._gpu = Vanishing(FakeNvml({}, {}), ())
    assert watch(probe)[1] == ["gpu unreadable: the list of GPUs changed within the leg"]


def test_dear_looks_are_rare() -> None:
    """A look that takes 50 ms is followed by a pause of five seconds: one per cent of a core."""
    probe = FakeProbe()
    scan = probe.processes

    def slow() -> dict[int, Any]:
        probe.t_s += 0.05
        return scan()

    probe.processes = slow  # type: ignore[method-assign]
    summary, _, rows = watch(probe)
    assert summary["samples"] <= 9
    assert summary["max_gap_s"] > 5
    assert sum(row["cost_s"] for row in rows[:-1]) / LEG_S < 0.015


def test_runner_and_watcher_above_their_share_are_noted() -> None:
    rows = watch(FakeProbe())[2]
    end = {"kind": "end", "cpu_s": 1.0, "wall_s": 40.0}
    summary, reasons, (note,) = summarise_telemetry([*rows[:-1], end], MARKS, LIMITS)
    assert (summary["own_cpu_share"], reasons) == (0.025, [])
    assert note.startswith("watching: runner and watcher used 2.5% of a core")
    assert summarise_telemetry([*rows[:-1], {**end, "cpu_s": 0.7}], MARKS, LIMITS)[2] == []


# --- this machine ---


def test_a_busy_loop_beside_a_real_leg_is_named_and_watching_costs_under_two_per_cent_of_a_core() -> None:
    loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        watcher = Watcher(set())  # no root: this test's own loop must be foreign
        for _ in range(12):
            time.sleep(0.5)
            watcher.look()
        rows = watcher.finish()
    finally:
        loop.kill()
        loop.wait()
    summary, reasons, _ = summarise_telemetry(rows, [], LIMITS)
    assert any(f"pid {loop.pid} (" in reason for reason in reasons)
    assert summary["own_cpu_share"] < 0.02
    assert all(isinstance(row["cpu"]["total"], int) for row in rows[:-1])
