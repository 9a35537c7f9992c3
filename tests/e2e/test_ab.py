"""`parity ab` through the runner: a whole A/B of the stand-in, an arm whose output changes once it is timed, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness import cli
from tests.e2e import toy
from tests.e2e.test_runner import idle

__all__ = ["idle"]

CHANGES_WHEN_TIMED = """if request.phase == "performance" and request.options["load"] == "staged":
        Arm.submit = lambda self, index, prompt: self.open.__setitem__(index, [7] * self.request.max_tokens)"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(toy.LOCK_VARIABLE, str(tmp_path / "lock"))
    monkeypatch.setattr(cli, "repository_root", lambda: tmp_path / "root")
    return tmp_path / "root"


def test_an_ab_runs_its_gates_flips_its_order_and_verifies(root: Path, idle: None, capsys: pytest.CaptureFixture[str]) -> None:
    series = root / "out"
    code = cli._run(["ab", str(toy.checkout(root)), "--out", str(series), "--json"])
    summary = json.loads(capsys.readouterr().out)
    assert code == summary["exit_code"] and code in (0, 1, 2), "the stand-in's speed is noise"
    found = summary["pairs"][0]["ab"]
    assert (found["kind"], found["option"], found["values"]) == ("A/B", "load", ["direct", "staged"])
    assert [(block["identical"], block["of"]) for block in found["blocks"]] == [(8, 8), (8, 8)]
    assert summary["correctness"]["ok"] and all((leg / "idle.json").is_file() for leg in series.glob("blocks/*/*/o*"))
    assert [a["order"] for a in summary["attempts"] if a["phase"] == "performance"] == [["on", "off"], ["off", "on"]]
    assert cli._run(["verify", str(series)]) == 0 and cli._run(["compare", str(series), str(series)]) == 0


def test_an_output_that_changes_once_it_is_timed_gets_no_verdict(root: Path, idle: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._run(["ab", str(toy.checkout(root, CHANGES_WHEN_TIMED)), "--out", str(root / "out")]) == 2
    out = capsys.readouterr().out
    assert "OUTPUT CHANGED (2 of 2 blocks; performance-1-on against performance-1-off: 0/8 outputs identical" in out
    assert "PASS" not in out and "FAIL" not in out


def test_two_differences_are_refused_before_the_lock(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = toy.checkout(root)
    spec.write_text(spec.read_text().replace('load = "staged"', 'load = "staged"\ndepth = 2'))
    assert cli._run(["ab", str(spec), "--out", str(root / "out")]) == 64
    assert "differ in depth, load; an A/B has one difference" in capsys.readouterr().err
    assert not (root / "out").exists() and not (tmp_path / "lock").exists()
