"""Checks 3 to 6: the idle gate's table, waiting before sampling, snapshots judged again, and what a contended series may still show."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest

from harness import cli
from harness.evidence.schema import EvidenceError
from harness.machine.gpu import Gpu
from harness.machine.idle import check_idle
from harness.machine.idle_rule import IdleLimits, limits_from_environment
from harness.machine.vram import LowestVram
from harness.report.build import build_report, summarize_series
from harness.report.scoreboard import render_scoreboard
from harness.series import leg, runner
from tests.e2e import toy
from tests.harness.machine.fake_nvml import FakeNvml
from tests.harness.machine.fake_probe import RUNNER, FakeProbe
from tests.harness.machine.idle_records import idle_record, snapshots_series
from tests.harness.series_factory import edit_json, make_series, reseal

NOT_SUPPORTED = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
UNKNOWN = pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
MIB = 1 << 20

# --- 3 ---


@pytest.mark.parametrize(("cards", "reason"), [
    ([{"utilization": 0}], None),
    ([{"utilization": 12}], "gpu 0 (Fake H200): utilization: 12 % (at most 2 %)"),
    ([{"utilization": 0, "compute": [77]}], "gpu 0 (Fake H200): compute process: pid 77 (command77)"),
    ([{"utilization": NOT_SUPPORTED}], "gpu 0 (Fake H200): unreadable: utilisation: Not Supported"),
    ([{"utilization": UNKNOWN}], "gpu 0 (Fake H200): unreadable: utilisation: Unknown Error"),
    ([{"used": (539 + 611) * MIB}], "gpu 0 (Fake H200): memory residue: 1150 MiB in use, 611 MiB more than the lowest reading of this boot "
                                    "(at most 128 MiB more); end what holds it"),
    ([{"utilization": 0}, {"utilization": 9}], "gpu 1 (Fake H200): utilization: 9 % (at most 2 %)"),
])
def test_check_03_idle_gate_table(cards: list[dict[str, Any]], reason: str | None, tmp_path: Path) -> None:
    probe = FakeProbe(FakeNvml(*({"used": 539 * MIB, **card} for card in cards)))
    probe._vram = LowestVram(tmp_path / "lock", "boot")
    probe._vram.lower({f"GPU-{index}": 539 * MIB for index in range(len(cards))})
    record = check_idle(IdleLimits(wait_max_s=5, vram_max=2000 * MIB), {RUNNER}, None, None, probe)
    assert record["ok"] is (reason is None)
    assert record["reasons"] == ([] if reason is None else [reason])


def test_check_03_a_probe_that_fails_is_refused() -> None:
    record = check_idle(IdleLimits(wait_max_s=2), {RUNNER}, None, None, FakeProbe(FakeNvml(init_error=pynvml.NVML_ERROR_UNKNOWN)))
    assert not record["ok"] and "gpu unreadable: NVML does not start" in record["reasons"][0]


def test_check_03_gpu_idle_util_max_turns_12_into_a_pass_and_is_recorded() -> None:
    limits = limits_from_environment({"GPU_IDLE_UTIL_MAX": "15"})
    record = idle_record({"utilization": 12}, limits=limits)
    assert record["ok"]
    assert (record["limits"]["gpu_util_max"], record["limits"]["gpu_util_source"]) == (15, "GPU_IDLE_UTIL_MAX")
    assert not idle_record({"utilization": 12}, limits=limits_from_environment({}))["ok"]
    assert limits_from_environment({}) == IdleLimits()


# --- 4 ---

Gate = Callable[[FakeProbe, IdleLimits], dict[str, Any]]


def waits_first(probe: FakeProbe, limits: IdleLimits) -> dict[str, Any]:
    return check_idle(limits, {RUNNER}, None, None, probe)


def samples_first(probe: FakeProbe, limits: IdleLimits) -> dict[str, Any]:
    """The build that reads the machine and then sleeps."""
    record = check_idle(dataclasses.replace(limits, wait_min_s=0, wait_max_s=0), {RUNNER}, None, None, probe)
    probe.sleep(20)
    return record


@pytest.mark.parametrize(("gate", "statuses"), [(waits_first, {"on": "ok", "off": "ok"}), (samples_first, {"on": "ok", "off": "void"})])
def test_check_04_cooldown_order(gate: Gate, statuses: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that takes ten seconds to drain after each timed leg: two arms get through, unless the gate samples before it sleeps."""
    series = tmp_path / "out"
    probe = FakeProbe()
    ended = [-1e9]
    probe.add(50, lambda t: max(0.0, 1 - (t - ended[0]) / 10))

    def decaying(limits: IdleLimits, *_: Any) -> dict[str, Any]:
        if list(series.glob("blocks/*/*/*/leg.json")):
            ended[0] = probe.t_s
        return gate(probe, limits)

    monkeypatch.setattr(leg, "check_idle", decaying)
    monkeypatch.setattr(runner, "check_idle", lambda *_: idle_record())
    monkeypatch.setattr(leg, "summarise_telemetry", lambda *_: ({}, [], []))
    monkeypatch.setenv(toy.LOCK_VARIABLE, str(tmp_path / "lock"))
    spec = toy.checkout(tmp_path / "root")
    spec.write_text(spec.read_text().replace("performance = 2", "performance = 1"))
    monkeypatch.setattr(cli, "repository_root", lambda: tmp_path / "root")
    code = cli._run(["run-series", str(spec), "--out", str(series)])
    first = series / "blocks" / "performance-1" / "attempt-1"
    found = {arm: json.loads((first / arm / "leg.json").read_bytes()) for arm in statuses}
    assert {arm: record["status"] for arm, record in found.items()} == statuses
    if "void" in statuses.values():
        assert found["off"]["reasons"][0].startswith("the machine is not idle: foreign cpu: pid 50 (name50: command50) used ")
        assert code == 3
    else:
        assert code in (0, 1, 2)
        assert json.loads((first / "off" / "idle.json").read_bytes())["waited_s"] > 8


# --- 5 ---


def recheck(series: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    code = cli._run(["recheck-idle", str(series)])
    return code, capsys.readouterr().out.splitlines()


def test_check_05_replay_prints_0_and_12_and_touches_no_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = snapshots_series(tmp_path / "idle", {}, {})
    contended = snapshots_series(tmp_path / "contended", {"utilization": 11}, {"utilization": 12}, util_max=15)
    monkeypatch.setattr(Gpu, "read", lambda _: pytest.fail("a GPU was read"))
    monkeypatch.setattr(Gpu, "__init__", lambda *_: pytest.fail("NVML was opened"))
    assert recheck(idle, capsys) == (0, ["idle: maximum GPU utilisation 0 %; snapshots that let a leg run: 2, that refused one: 0"])
    code, lines = recheck(contended, capsys)
    assert code == 3
    assert lines == [
        "contended: maximum GPU utilisation 12 %; snapshots that let a leg run: 2, that refused one: 0",
        "  blocks/performance-1/attempt-1/on: gpu 0 (Fake H200): utilization: 11 % (at most 2 %)",
        "  blocks/performance-2/attempt-1/on: gpu 0 (Fake H200): utilization: 12 % (at most 2 %)",
    ]


# --- 6 ---

LEGS = [f"{phase}-{repetition}-{arm}" for phase, last in (("memory", 2), ("performance", 3)) for repetition in range(1, last + 1)
        for arm in ("on", "off", "pin")]
RATE = re.compile(r"\d\s*(tok/s|req/s|ms|µs|s)\b|tokens/s: \d")


def busy(*utilizations: int) -> dict[str, list[dict[str, Any]]]:
    """Every leg that counts saw one card, busy by these per cent in turn."""
    return {name: [{"utilization": utilizations[number % len(utilizations)]}] for number, name in enumerate(LEGS)}


def absolutes(summary: dict[str, Any]) -> set[str]:
    """Every figure of time or rate of a summary as a page would print it."""
    legs = [leg_ for arm in summary["arms"].values() for leg_ in arm["performance"]]
    rates = [leg_[name] for leg_ in legs for name in ("total_throughput", "output_throughput", "request_throughput")]
    rates += [leg_["occupancy"]["steady_throughput"] for leg_ in legs if leg_["occupancy"]["steady_throughput"] is not None]
    rates += [arm["means"][axis] for arm in summary["arms"].values() for axis in ("total_throughput", "output_throughput")]
    times = [leg_[name]["mean"] * 1000 for leg_ in legs for name in ("ttft", "tpot", "e2e")]
    return {f"{value:,.{digits}f}" for values, digits in ((rates, 2), (times, 3)) for value in values}


def test_check_06_a_contended_series_shows_no_absolute_throughput_and_its_ratios_with_a_caveat(tmp_path: Path) -> None:
    idle = make_series(tmp_path / "idle" / "series")
    series = make_series(tmp_path / "results" / "series", cards=busy(11, 12, 13), waivers={"utilization": "a display hangs on it"})
    was, is_ = build_report(idle), build_report(series)
    assert (was["contention"]["contended"], is_["contention"]["contended"], is_["contention"]["uniform"]) == (False, True, True)
    idle_page = (idle / "report.md").read_text()
    shown = {value for value in absolutes(was) if value in idle_page}
    assert len(shown) > 40, "of each leg, in its tables"
    pages = {
        "report": (series / "report.md").read_text(), "summary": json.dumps(json.loads((series / "summary.json").read_bytes())),
        "scoreboard": render_scoreboard(tmp_path / "results"),
    }
    for name, page in pages.items():
        assert not [value for value in shown if re.search(rf"(?<![\d.,]){re.escape(value)}(?!\d)", page)], name
    assert not RATE.search(pages["report"].replace("\u00a0", " ").split("## How to reproduce")[0])
    assert {path.name for path in (series / "plots").iterdir()} == {"memory.svg"}
    for pair, other in zip(is_["pairs"], was["pairs"], strict=True):
        assert {axis: row["ratio"] for axis, row in pair["axes"].items()} == {axis: row["ratio"] for axis, row in other["axes"].items()}
    first = pages["report"].splitlines()[0]
    assert first.endswith("; within one contended series") and re.search(r"1\.2\d{3}x", first)
    assert "contended: ratios hold within this one contended series only; its figures of time are withheld: gpu 0 (Fake H200): " \
           "utilization: 11 % (at most 2 %) (memory-1-on and 14 more)" in pages["report"]
    assert ", within one contended series |" in pages["scoreboard"]


def test_check_06_a_load_that_is_not_uniform_voids_the_ratios_too(tmp_path: Path) -> None:
    series = make_series(tmp_path / "series", cards={**busy(11, 12, 13), "performance-2-pin": [{"utilization": 14}]})
    summary = build_report(series)
    assert (summary["verdict"], summary["exit_code"], summary["contention"]["uniform"]) == ("VOID", 3, False)
    assert summary["reasons"] == ["the load was not uniform: gpu 0 utilization 11 % before memory-1-on, 14 % before performance-2-pin "
                                  "(at most 2 % apart)"]
    assert all(pair["axes"] == {} and pair["refused"] for pair in summary["pairs"])
    page = (series / "report.md").read_text()
    assert not re.search(r"\d\.\d{4}", page)
    assert page.splitlines()[0] == "**VOID** · total throughput, on\u00a0[ours] / pin\u00a0[pin]: no ratio"


@pytest.mark.parametrize(("card", "why"), [
    ({"compute": [77]}, "gpu 0 processes 0 before memory-2-on, 1 before memory-1-on (at most 0 apart)"),
    ({"used": 611 * MIB}, None),
    ({"reasons": 0x40}, "gpu 0 throttling 0 before memory-2-on, 64 before memory-1-on (at most 0 apart)"),
    ({"used": 2000 * MIB}, "gpu 0 memory 0 MiB before memory-2-on, 2000 MiB before memory-1-on (at most 128 MiB apart)"),
])
def test_check_06_company_of_any_kind_before_one_leg_alone_is_not_uniform(card: dict[str, Any], why: str | None, tmp_path: Path) -> None:
    summary = summarize_series(make_series(tmp_path / "series", cards={"memory-1-on": [card]}))
    if why is None:  # memory in use without a lower reading to hold it against is within the limit
        assert not summary["contention"]["contended"]
    else:
        assert summary["verdict"] == "VOID" and summary["reasons"] == [f"the load was not uniform: {why}"]


def test_check_06_an_idle_series_is_not_contended_and_a_leg_without_a_snapshot_is_an_error(tmp_path: Path) -> None:
    series = make_series(tmp_path / "series", cards=busy(0, 1, 2))
    assert summarize_series(series)["contention"] == {"contended": False, "uniform": None, "lines": [], "waived": []}
    edit_json(series / "blocks" / "performance-1" / "attempt-1" / "on" / "idle.json", lambda record: record["samples"].clear())
    reseal(series)
    with pytest.raises(EvidenceError, match=r"performance-1-on: idle.json: field `samples` holds 0 of role `decision`, expected one"):
        summarize_series(series)
