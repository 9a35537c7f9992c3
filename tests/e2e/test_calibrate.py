"""`parity calibrate`: the faults that end or spoil a series, through the real runner; and the whole, up to its record."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness import calibrate, cli
from harness.analysis.calibration import RULES, SERIES, Evidence
from harness.evidence import store
from harness.evidence.calibrations import find_quote
from harness.evidence.records import RECORDS
from harness.report.build import load_summary
from harness.report.markdown import render
from harness.report.scoreboard import render_scoreboard
from harness.series.runner import Refused, run_series
from tests.e2e import toy
from tests.e2e.test_runner import idle
from tests.harness.calibration_factory import make_calibration, make_one
from tests.harness.series_factory import make_series, reseal

__all__ = ["idle"]

HOST = "ab" * 32


def toy_spec(root: Path, name: str, healthy: bool) -> Path:
    """A calibration's spec as it is, over the toy's model and work; a healthy one has the arms without their faults."""
    head = toy.checkout(root, "" if healthy else "from legs.drivers.inject import Injected\n    if 'inject' in request.options: "
                        "return Injected(Arm(request), request)")
    text, work = (toy.ROOT / "legs" / "calibration" / f"{name}.toml").read_text(), head.read_text()
    for section in ("model", "workload"):
        part = re.compile(rf"\[{section}\]\n(?:[^\[]*\n)*?(?=\n?\[)")
        text = part.sub(lambda _, part=part: part.search(work)[0], text)  # type: ignore[index, misc]
    text = text.partition("[correctness]")[0] + "[correctness]" + work.partition("[correctness]")[2].replace('"on", "off"', '"a"')
    text = text.replace("token = 5", "token = 2").replace("kill = 8", "kill = 3").replace("performance = 2", "performance = 1")
    head.write_text(text)
    return head


@pytest.mark.parametrize("healthy", [False, True])
@pytest.mark.parametrize("name", ["token", "count", "killed"])
def test_a_real_series_shows_the_fault_and_only_the_fault(tmp_path: Path, idle: None, name: str, healthy: bool) -> None:
    spec = toy_spec(tmp_path / "root", name, healthy)
    run_series(tmp_path / "root", spec, tmp_path / "out", False, tmp_path / "lock", None, Console(quiet=True), calibration=True)
    found = RULES[name](Evidence(*load_summary(tmp_path / "out")))
    assert found.ok is not healthy, found
    assert not healthy or found.got in ("PASS", "FAIL", "INCONCLUSIVE"), "the stand-in's speed is noise"
    gate = json.loads((tmp_path / "out" / "correctness" / "gate.json").read_bytes())
    assert gate["ok"], "the fault shows only once it is timed"


class Runs:
    """`run_series` that writes the synthetic series of a calibration, as long as it is let."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, bool]] = []
        self.refuse: str | None = None
        self.changes: dict[str, dict[str, Any]] = {}

    def __call__(self, root: Path, spec: Path, out: Path, resume: bool, *_: Any, calibration: bool) -> None:
        assert calibration and spec == root / "legs" / "calibration" / f"{out.name}.toml"
        if out.name == self.refuse:
            raise Refused("the machine is not idle: cron")
        self.ran.append((out.name, resume))
        make_one(out.name, out, **self.changes.get(out.name, {}))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Runs:
    found = Runs()
    monkeypatch.setattr(calibrate, "run_series", found)
    monkeypatch.setenv(toy.LOCK_VARIABLE, str(tmp_path / "lock"))
    return found


def test_a_calibration_goes_on_where_it_stopped_and_is_read_again(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    runs.refuse = "token"
    assert cli._run(["calibrate", "--out", str(out)]) == 5
    assert [name for name, _ in runs.ran] == ["times", "tail", "leak"] and not (out / "record").exists()
    runs.refuse = None
    assert cli._run(["calibrate", "--resume", str(out)]) == 0
    assert [name for name, _ in runs.ran] == list(SERIES), "what is sealed is not run again"
    text = capsys.readouterr().out
    assert text.startswith("**as expected, every case** · this instrument, on this machine, sees ")
    assert text == (out / "calibration.md").read_text() + "\n"
    for said in ("| A/A |", "| busy wait, 10 % | 10.00 % of the time |", "| leak | 256 MiB |", "| foreign process |", "hold the true size"):
        assert said in text
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert cli._run(["calibrate", "--resume", str(out), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["ok"] and record == json.loads((out / "record" / "calibration.json").read_bytes())
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} and len(runs.ran) == len(SERIES)


def test_a_void_series_is_kept_aside_and_run_again(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    runs.changes["tail"] = {"statuses": {"performance-1": ["void"] * 3}, "reasons": "foreign cpu: pid 9 (cron)"}
    for times in (1, 2):
        assert cli._run(["calibrate", *(["--resume", str(out)] if times == 2 else ["--out", str(out)])]) == 3
        assert "tail: performance-1: none of 3 attempts is ok, the last is void: foreign cpu: pid 9" in capsys.readouterr().err
    del runs.changes["tail"]
    assert cli._run(["calibrate", "--resume", str(out)]) == 0
    assert [name for name, _ in runs.ran] == ["times", "tail", "tail", *SERIES[1:]]
    assert {path.name for path in out.iterdir() if path.is_dir()} == {*SERIES, "tail-void-1", "tail-void-2", "record"}


def test_a_case_that_is_not_as_expected_is_a_fail(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs.changes["leak"] = {"pss_mib": {"leak": 900, "a": 900}}
    assert cli._run(["calibrate", "--out", str(tmp_path / "out")]) == 1
    text = capsys.readouterr().out
    assert text.startswith("**NOT as expected: leak** · ") and "**NO**" in text


def test_folders_are_refused_before_anything_runs(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "there").mkdir()
    assert cli._run(["calibrate", "--out", str(tmp_path / "there")]) == 5
    assert cli._run(["calibrate", "--resume", str(tmp_path / "none")]) == 5
    assert cli._run(["calibrate", "--out", "x", "--resume", "y"]) == 64
    assert runs.ran == [] and "there is no calibration to resume" in capsys.readouterr().err


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results folder with one calibration in it."""
    results = tmp_path_factory.mktemp("repository") / "results"
    calibrate.write_record(make_calibration(results / "calibration-a"))
    return results


def test_a_record_that_says_otherwise_than_its_evidence_is_an_error(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert cli._run(["calibrate", "--out", str(out)]) == 0
    path = out / "record" / "calibration.json"
    path.write_text(path.read_text().replace('"detectable": 0', '"detectable": 1'))
    assert cli._run(["calibrate", "--resume", str(out)]) == 4
    assert "calibration.json: changed since it was recorded" in capsys.readouterr().err
    reseal(out / "record")
    assert cli._run(["calibrate", "--resume", str(out)]) == 4
    assert "record/calibration.json: field `detectable` is not what its evidence gives" in capsys.readouterr().err


def test_a_series_quotes_the_newest_calibration_of_its_machine(made: Path, tmp_path: Path) -> None:
    assert find_quote(tmp_path, HOST) is None and find_quote(made, "another boot") is None
    quote = find_quote(made, HOST)
    assert quote is not None and quote["record"] == "calibration-a"
    assert quote["head"] == store.read_manifest(made / "calibration-a" / "record").head
    summary = load_summary(make_series(tmp_path / "series"))[1]
    head = render(summary).partition("\n## ")[0]
    assert "- no calibration of this machine was on record when this series began" in head
    summary["series"]["calibration"] = quote
    head = render(summary).partition("\n## ")[0]
    assert re.search(r"- this instrument, on this machine, sees 0\.\d.% of total throughput \(10 blocks of two equal arms\); "
                     r"slowdowns injected: 1\.0.% seen, 3\.0.% seen, 10\.0.% seen \(calibration-a `\w{12}`\)\n", head)
    summary["series"]["calibration"] = {**quote, "ok": False, "detectable": None}
    text = render(summary)
    assert "is not known: its healthy arms gave no interval" in text and "not every case of it was as expected)" in text


def test_the_newest_counts_whatever_its_name(made: Path, tmp_path: Path) -> None:
    for name, when in (("calibration-z", "2026-01-01"), ("calibration-b", "2026-01-02")):
        folder = tmp_path / name / "record"
        store.create_series(folder)
        record = json.loads((made / "calibration-a" / "record" / "calibration.json").read_bytes())
        (folder / "calibration.json").write_text(json.dumps({**record, "started_utc": when}))
        store.record(folder, "calibration.json")
        store.seal(folder)
    quote = find_quote(tmp_path, HOST)
    assert quote is not None and quote["record"] == "calibration-b"
    (folder / "calibration.json").write_text("{}")
    with pytest.raises(store.BrokenSeal):
        find_quote(tmp_path, HOST)


def test_the_scoreboard_shows_a_calibration_and_takes_it_for_no_series(made: Path) -> None:
    page = render_scoreboard(made)
    assert not (made / RECORDS).exists() and "No committed series yet." in page
    assert "## Calibration" in page and f"[calibration-a](../results/calibration-a/calibration.md), machine {HOST}: this instrument" in page
    assert "| killed arm |" in page
