"""Stored idle snapshots judged again: two fixture series, one from an idle card, one from a card that was 12 % busy all along."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness import cli
from harness.evidence import store
from harness.machine.gpu import Gpu
from harness.machine.idle import check_idle
from harness.machine.idle_rule import IdleLimits
from tests.harness.machine.fake_nvml import FakeNvml
from tests.harness.machine.fake_probe import RUNNER, FakeProbe


def fixture_series(folder: Path, *legs: dict[str, Any] | None, util_max: float = 2) -> Path:
    """A series of performance legs whose gate saw these cards in order, None being a machine without one."""
    store.create_series(folder)
    for number, card in enumerate(legs, 1):
        leg = folder / "blocks" / f"performance-{number}" / "attempt-1" / "on"
        leg.mkdir(parents=True)
        limits = IdleLimits(wait_max_s=2, gpu_util_max=util_max)
        record = check_idle(limits, {RUNNER}, None, None, FakeProbe(None if card is None else FakeNvml(card)))
        (leg / "idle.json").write_text(json.dumps(record))
        store.record(folder, (leg / "idle.json").relative_to(folder).as_posix())
    return folder


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a switch after which any reading of a GPU fails the test."""
    def arm() -> None:
        monkeypatch.setattr(Gpu, "read", lambda _: pytest.fail("a GPU was read"))
        monkeypatch.setattr(Gpu, "__init__", lambda *_: pytest.fail("NVML was opened"))
    return arm


def recheck(series: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    code = cli._run(["recheck-idle", str(series)])
    return code, capsys.readouterr().out.splitlines()


def test_an_idle_series_reads_0_and_a_contended_one_12(tmp_path: Path, capsys: pytest.CaptureFixture[str], no_gpu: Any) -> None:
    idle = fixture_series(tmp_path / "idle", {}, {})
    contended = fixture_series(tmp_path / "contended", {"utilization": 11}, {"utilization": 12}, util_max=15)
    no_gpu()
    assert recheck(idle, capsys) == (0, ["idle: maximum GPU utilisation 0 %; snapshots that let a leg run: 2, that refused one: 0"])
    code, lines = recheck(contended, capsys)
    assert code == 3
    assert lines == [
        "contended: maximum GPU utilisation 12 %; snapshots that let a leg run: 2, that refused one: 0",
        "  blocks/performance-1/attempt-1/on: gpu 0 (Fake H200): utilization: 11 % (at most 2 %)",
        "  blocks/performance-2/attempt-1/on: gpu 0 (Fake H200): utilization: 12 % (at most 2 %)",
    ]


def test_the_limit_of_the_environment_holds_here_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    series = fixture_series(tmp_path / "series", {"utilization": 12}, util_max=15)
    monkeypatch.setenv("GPU_IDLE_UTIL_MAX", "15")
    assert recheck(series, capsys)[0] == 0
    monkeypatch.setenv("GPU_IDLE_UTIL_MAX", "many")
    assert recheck(series, capsys)[0] == 64


def test_a_leg_that_was_refused_did_not_run_on_a_busy_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = recheck(fixture_series(tmp_path / "series", {"utilization": 40}, {}), capsys)
    assert code == 0
    assert lines == [
        "idle: maximum GPU utilisation 0 %; snapshots that let a leg run: 1, that refused one: 1",
        "  blocks/performance-1/attempt-1/on (refused then): gpu 0 (Fake H200): utilization: 40 % (at most 2 %)",
    ]


def test_every_reason_of_the_gate_is_found_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Snapshots alone give the gate's own reasons back, whatever they are."""
    series = fixture_series(tmp_path / "series", {"compute": [77], "reasons": 0x40, "used": 2000 << 20}, {"utilization": 3})
    assert cli._run(["recheck-idle", str(series), "--json"]) == 0
    for snapshot in json.loads(capsys.readouterr().out)["snapshots"]:
        assert snapshot["reasons"] == json.loads((series / snapshot["leg"] / "idle.json").read_bytes())["reasons"] != []


def test_a_series_without_a_gpu_has_no_utilisation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, (line,) = recheck(fixture_series(tmp_path / "series", None), capsys)
    assert (code, line) == (0, "idle: no GPU was there; snapshots that let a leg run: 1, that refused one: 0")


def test_a_changed_snapshot_an_empty_series_and_none_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    series = fixture_series(tmp_path / "series", {})
    path = next(series.rglob("idle.json"))
    path.write_text(path.read_text().replace('"ok": true', '"ok": false'))
    for folder in (series, fixture_series(tmp_path / "empty"), tmp_path / "none"):
        assert recheck(folder, capsys)[0] == 4
