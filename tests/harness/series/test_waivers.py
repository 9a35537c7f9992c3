"""Waivers: a check that a shared machine cannot meet is recorded and told instead of refusing, and nothing else is let through by it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pynvml
import pytest

from harness import cli
from harness.machine.idle_rule import LIMITED, WAIVABLE, IdleLimits
from harness.report.build import build_report
from harness.series import leg, runner
from harness.series.checks import waive
from harness.series.plan import make_plan
from harness.series.spec import load_spec
from harness.strict import SpecError
from tests.e2e import toy
from tests.harness.machine.idle_records import idle_record
from tests.harness.series.spec_factory import write_spec
from tests.harness.series_factory import make_series

LIMITS = IdleLimits(wait_max_s=2)
NOT_SUPPORTED = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
CARDS: dict[str, dict[str, Any]] = {
    "utilization": {"utilization": 12}, "processes": {"compute": [77]}, "residue": {"used": 2000 << 20}, "clock_event": {"reasons": 0x40},
    "unreadable.utilisation": {"utilization": NOT_SUPPORTED}, "unreadable.graphics_pids": {"graphics": NOT_SUPPORTED},
}
"""For each check a card that it alone refuses."""


def waiver(check: str, reason: str = "shared") -> tuple[str, str]:
    return "[limits]", f'[[waivers]]\ncheck = "{check}"\nreason = "{reason}"\n\n[limits]'


def waiving(*checks: str) -> IdleLimits:
    return dataclasses.replace(LIMITS, waived=checks)


@pytest.mark.parametrize("check", CARDS)
def test_a_waiver_lets_its_own_check_through_and_records_what_would_have_refused(check: str) -> None:
    refused, let_through = idle_record(CARDS[check], limits=LIMITS), idle_record(CARDS[check], limits=waiving(check))
    assert not refused["ok"] and refused["waived"] == []
    assert let_through["ok"] and let_through["reasons"] == []
    assert let_through["waived"] == [{"check": check, "found": reason} for reason in refused["reasons"]]
    assert let_through["waited_s"] < 2, "nobody waits for what is waived to end"


@pytest.mark.parametrize("check", CARDS)
def test_a_waiver_of_every_other_check_lets_nothing_through(check: str) -> None:
    record = idle_record(CARDS[check], limits=waiving(*(other for other in WAIVABLE if other != check)))
    assert not record["ok"] and record["waived"] == []


def test_a_probe_that_fails_as_a_whole_cannot_be_waived() -> None:
    assert not {"cpu", "gpu"} & set(WAIVABLE)
    assert set(LIMITED) < set(WAIVABLE)


@pytest.mark.parametrize(("change", "field", "value"), [
    (waiver("heat"), "waivers[0].check", "'heat'"),
    (waiver("utilisation"), "waivers[0].check", "'utilisation'"),
    (waiver("unreadable"), "waivers[0].check", "'unreadable'"),
    (waiver("gpu"), "waivers[0].check", "'gpu'"),
    (waiver("residue", " "), "waivers[0].reason", "' '"),
    (("[limits]", '[[waivers]]\ncheck = "steal"\n[limits]'), "waivers[0].reason", "None"),
    (("[limits]", '[[waivers]]\ncheck = "steal"\nreason = "x"\narms = ["on"]\n[limits]'), "waivers[0].arms", "['on']"),
    (("[limits]", '[[waivers]]\ncheck = "steal"\nreason = "x"\n' * 2 + "[limits]"), "waivers[1].check", "'steal'"),
])
def test_a_waiver_that_names_no_check_or_no_reason_is_refused(tmp_path: Path, change: tuple[str, str], field: str, value: str) -> None:
    with pytest.raises(SpecError) as error:
        load_spec(write_spec(tmp_path, change))
    assert str(error.value).startswith(f"toy.toml: field `{field}` is {value}: ")


def test_the_plan_holds_waivers_and_changes_with_them(tmp_path: Path) -> None:
    def plan(*changes: tuple[str, str]) -> dict[str, Any]:
        return make_plan(load_spec(write_spec(tmp_path, *changes)), b"", {"vllm-toy": {}}, 0, IdleLimits())

    plain, waived = plan(), plan(waiver("processes", "a colleague's notebook"))
    assert (plain["waivers"], plain["idle"]["waived"]) == ([], ())
    assert waived["waivers"] == [{"check": "processes", "reason": "a colleague's notebook"}]
    assert waived["idle"]["waived"] == ("processes",) and waived["digest"] != plain["digest"]


def test_within_a_leg_a_waiver_holds_for_the_same_check_alone() -> None:
    seen = [
        "foreign cpu: 9.0% of all cores over 5 s", "steal: the hypervisor took 9 %", "gpu 0 (NVIDIA H200 (a): b): foreign compute process: "
        "pid 7 (python)", "gpu 1 (X): clock event: power brake: cool the card", "gpu 1 (X): unreadable: utilisation",
        "gpu 1 (X): unreadable: sm_clock_mhz", "cpu unreadable: no", "gpu 0 (X): SM clock from 1 to 2 MHz within the measured window",
    ]
    assert waive(seen, []) == (seen, [])
    for number, check in enumerate(("foreign_cpu", "steal", "processes", "clock_event", "unreadable.utilisation")):
        assert waive(seen, [check]) == ([*seen[:number], *seen[number + 1:]], [f"waived: {seen[number]}"])
    assert waive(seen, WAIVABLE)[0] == seen[5:]


@pytest.mark.parametrize(("check", "ok"), [("utilization", True), ("processes", False)])
def test_a_series_under_a_waiver_runs_on_a_busy_card_and_says_so(
    check: str, ok: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (leg, runner):
        monkeypatch.setattr(module, "check_idle", lambda limits, *_: idle_record(CARDS["utilization"], limits=limits))
    monkeypatch.setattr(leg, "summarise_telemetry", lambda *_: (None, [], []))
    monkeypatch.setenv(toy.LOCK_VARIABLE, str(tmp_path / "lock"))
    spec, series = toy.checkout(tmp_path / "root"), tmp_path / "out"
    spec.write_text(spec.read_text().replace(*waiver(check, "a display hangs on it")).replace("performance = 2", "performance = 1"))
    monkeypatch.setattr(cli, "repository_root", lambda: tmp_path / "root")
    code = cli._run(["run-series", str(spec), "--out", str(series)])
    if not ok:
        assert code == 5 and not series.exists()
        assert "gpu 0 (Fake H200): utilization: 12 %" in capsys.readouterr().err
        return
    assert code in (0, 1, 2)
    found = {"check": "utilization", "found": "gpu 0 (Fake H200): utilization: 12 % (at most 2 %)"}
    for path in series.rglob("idle.json"):
        assert json.loads(path.read_bytes())["waived"] == [found]
    assert json.loads((series / "plan.json").read_bytes())["waivers"] == [{"check": check, "reason": "a display hangs on it"}]
    above = (series / "report.md").read_text().split("## ")[0]
    assert f"- waived: utilization (a display hangs on it): {found['found']} (performance-1-on and 1 more)\n" in above


def test_a_waiver_that_nothing_needed_is_told_and_leaves_the_series_idle(tmp_path: Path) -> None:
    series = make_series(tmp_path / "series", waivers={"residue": "a display server"})
    summary = build_report(series)
    assert (summary["verdict"], summary["contention"]["contended"]) == ("PASS", False)
    assert "- waived: residue (a display server): it found nothing\n" in (series / "report.md").read_text()
