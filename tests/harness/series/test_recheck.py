"""Stored idle snapshots judged again, beyond the replay of tests/harness/test_checks_idle.py: limits, refused legs, errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness import cli
from tests.harness.machine.idle_records import snapshots_series


def recheck(series: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    code = cli._run(["recheck-idle", str(series)])
    return code, capsys.readouterr().out.splitlines()


def test_the_limit_of_the_environment_holds_here_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    series = snapshots_series(tmp_path / "series", {"utilization": 12}, util_max=15)
    monkeypatch.setenv("GPU_IDLE_UTIL_MAX", "15")
    assert recheck(series, capsys)[0] == 0
    monkeypatch.setenv("GPU_IDLE_UTIL_MAX", "many")
    assert recheck(series, capsys)[0] == 64


def test_a_leg_that_was_refused_did_not_run_on_a_busy_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = recheck(snapshots_series(tmp_path / "series", {"utilization": 40}, {}), capsys)
    assert code == 0
    assert lines == [
        "idle: maximum GPU utilisation 0 %; snapshots that let a leg run: 1, that refused one: 1",
        "  blocks/performance-1/attempt-1/on (refused then): gpu 0 (Fake H200): utilization: 40 % (at most 2 %)",
    ]


def test_every_reason_of_the_gate_is_found_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Snapshots alone give the gate's own reasons back, whatever they are."""
    series = snapshots_series(tmp_path / "series", {"compute": [77], "reasons": 0x40, "used": 2000 << 20}, {"utilization": 3})
    assert cli._run(["recheck-idle", str(series), "--json"]) == 0
    for snapshot in json.loads(capsys.readouterr().out)["snapshots"]:
        assert snapshot["reasons"] == json.loads((series / snapshot["leg"] / "idle.json").read_bytes())["reasons"] != []


def test_a_series_without_a_gpu_has_no_utilisation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, (line,) = recheck(snapshots_series(tmp_path / "series", None), capsys)
    assert (code, line) == (0, "idle: no GPU was there; snapshots that let a leg run: 1, that refused one: 0")


def test_a_changed_snapshot_an_empty_series_and_none_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    series = snapshots_series(tmp_path / "series", {})
    path = next(series.rglob("idle.json"))
    path.write_text(path.read_text().replace('"ok": true', '"ok": false'))
    for folder in (series, snapshots_series(tmp_path / "empty"), tmp_path / "none"):
        assert recheck(folder, capsys)[0] == 4
