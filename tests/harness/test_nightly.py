"""`parity nightly`: what runs, the page of it, its exit code; and that company is never a regression."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness import cli, nightly
from harness.nightly import Night, code_of, load_nightly, worst
from harness.report.build import summarize_series
from harness.report.nightly import SUMMARY_VARIABLE, page, publish
from harness.series.runner import Refused
from harness.series.stage import repository_root
from harness.strict import SpecError
from harness.verdict import Exit
from tests.harness.series_factory import make_series

ROOT = repository_root()
BUSY = {"utilization": 40}
SLOW = {"on": 1300, "off": 820, "pin": 1000}


def made(folder: Path, **changes: Any) -> dict[str, Any]:
    return summarize_series(make_series(folder / "series", **changes))


def contended(folder: Path, **changes: Any) -> dict[str, Any]:
    """A series before each leg of which a card was 40 % busy, which its spec waived."""
    blocks = ("memory-1", "memory-2", "performance-1", "performance-2", "performance-3")
    legs = [f"{block}-{arm}" for block in blocks for arm in ("on", "off", "pin")]
    return made(folder, cards={leg: [BUSY] for leg in legs}, waivers={"utilization": "a display"}, **changes)


def night(summary: dict[str, Any]) -> Night:
    return Night(name="one", code=code_of(summary), summary=summary)


@pytest.mark.parametrize(("changes", "code", "said"), [
    ({}, Exit.PASS, "**PASS (FASTER)**"), ({"step_us": SLOW}, Exit.FAIL, "**FAIL**"),
    ({"performance": 1}, Exit.INCONCLUSIVE, "**INCONCLUSIVE**"),
    ({"statuses": {"performance-2": ["void"] * 3}}, Exit.VOID, "**unknown: VOID**"),
    ({"statuses": {"performance-2": ["failed"] * 3}}, Exit.ERROR, "**ERROR**"),
    ({"gate": {"ok": False, "passed": 3}, "performance": 0, "memory": 0}, None, ": wrong tokens**"),
])
def test_each_verdict_has_its_word_and_code(tmp_path: Path, changes: dict[str, Any], code: Exit | None, said: str) -> None:
    found = night(made(tmp_path, **changes))
    assert said in page("t", [found])
    assert code is None or (found.code == code and worst([found]) == code)


def test_company_is_never_a_regression(tmp_path: Path) -> None:
    summary = contended(tmp_path, step_us=SLOW)
    assert (summary["verdict"], summary["contention"]["contended"]) == ("FAIL", True)
    found = night(summary)
    text = page("t", [found])
    assert found.code == Exit.VOID and "## t: VOID, not all known: conditions were broken" in text
    assert "| one | **unknown: contended** |" in text and "FAIL" not in text.replace("contended", "").partition("**one**")[0]
    ratio = f"{summary['pairs'][0]['axes']['total_throughput']['ratio']:.4f}"
    assert ratio not in text, "a ratio in company is no figure to watch"


def test_a_broken_arm_in_company_is_still_broken(tmp_path: Path) -> None:
    summary = contended(tmp_path, statuses={"performance-3": ["failed"] * 3})
    assert summary["contention"]["contended"] and night(summary).code == Exit.ERROR


@pytest.mark.parametrize(("codes", "code"), [
    ([Exit.PASS, Exit.PASS], Exit.PASS), ([Exit.PASS, Exit.INCONCLUSIVE], Exit.INCONCLUSIVE), ([Exit.VOID, Exit.INCONCLUSIVE], Exit.VOID),
    ([Exit.REFUSED, Exit.VOID], Exit.REFUSED), ([Exit.FAIL, Exit.VOID, Exit.REFUSED], Exit.FAIL), ([Exit.FAIL, Exit.ERROR], Exit.ERROR),
])
def test_the_worst_decides(codes: list[Exit], code: Exit) -> None:
    assert worst([Night(name=str(one), code=one, summary=None) for one in codes]) == code


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "two.toml"
    path.write_text('schema = 1\ntitle = "Two"\nseries = ["legs/series/quick.toml", "legs/series/ab-direct.toml"]\n')
    monkeypatch.setenv("PARITY_LOCK", str(tmp_path / "lock"))
    monkeypatch.delenv(SUMMARY_VARIABLE, raising=False)
    return path


def test_a_night_runs_all_and_writes_one_page(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def run(root: Path, spec: Path, out: Path, resume: bool, *_: Any) -> dict[str, Any]:
        ran.append((spec, out, resume))
        if out.name == "quick":
            raise Refused("the machine is not idle: pid 4711 (stress) | 98 %")
        return made(tmp_path)

    monkeypatch.setattr(nightly, "run_series", run)
    job = tmp_path / "summary.md"
    job.write_text("before\n")
    monkeypatch.setenv(SUMMARY_VARIABLE, str(job))
    out = tmp_path / "out"
    assert cli._run(["nightly", str(config), "--out", str(out)]) == 5, "one that did not run is not passed"
    assert ran == [(ROOT / "legs" / "series" / f"{name}.toml", out / name, False) for name in ("quick", "ab-direct")]
    text = (out / "nightly.md").read_text()
    assert text in capsys.readouterr().out and job.read_text() == f"before\n{text}\n"
    assert text.startswith("## Two: REFUSED, not all known: something did not run\n")
    assert "| quick | **not run** | n/a |" in text
    assert "| ab-direct | **PASS (FASTER)** | on\u00a0[ours] / pin\u00a0[pin] | total throughput | 1." in text
    assert "**quick**: not run\n\n- the machine is not idle: pid 4711 (stress) \\| 98 %\n" in text
    assert cli._run(["nightly", str(config), "--out", str(out)]) == 5 and len(ran) == 2, "a night is written once"


def test_a_page_is_printed_where_no_job_asks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SUMMARY_VARIABLE, raising=False)
    text = publish(tmp_path / "out", "t", [Night(name="a", code=Exit.REFUSED, summary=None, refused="why")])
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["nightly.md"] and "- why" in text


@pytest.mark.parametrize(("text", "said"), [
    ('schema = 2\ntitle = "t"\nseries = ["legs/series/quick.toml"]', "field `schema` is 2"),
    ('schema = 1\ntitle = "t"\nseries = []', "field `series` is []: at least one spec"),
    ('schema = 1\ntitle = "t"\nseries = ["legs/series/none.toml"]', "series[0]` is 'legs/series/none.toml': there is no such file"),
    ('schema = 1\ntitle = "t"\nseries = ["legs/series/quick.toml", "legs/series/quick.toml"]', "series[1]` is"),
    ('schema = 1\ntitle = "t"\nseries = ["legs/calibration/token.toml"]', "is a series of a calibration"),
    ('schema = 1\ntitle = "t"\nseries = ["legs/nightly/quick.toml"]', "quick.toml: field"),
    ('schema = 1\ntitle = "t"', "field `series` is None: missing"),
])
def test_a_wrong_list_is_refused_before_anything_runs(config: Path, text: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(text)
    assert cli._run(["nightly", str(config), "--out", str(config.parent / "out")]) == 64
    assert said in capsys.readouterr().err and not (config.parent / "out").exists()


def test_the_nightlies_of_this_repository_can_be_read() -> None:
    found = [load_nightly(ROOT, path) for path in (ROOT / "legs" / "nightly").glob("*.toml")]
    assert found and all(len(one.series) >= 2 for one in found)
    workflow = (ROOT / ".github" / "workflows" / "nightly.yml").read_text()
    assert ".venv/bin/parity nightly legs/nightly/quick.toml" in workflow and "self-hosted" in workflow
    assert "run: make test" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()


def test_a_missing_list_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no such file"):
        load_nightly(ROOT, tmp_path / "none.toml")
