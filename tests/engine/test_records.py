"""Records of the card and of the host: their derived page is what they give, and a test report is counted as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench import cpu_kernels, gpu_tests, levers

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_levers_is_what_its_records_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    sources = sorted(Path("results/platform").glob("*-engine/*/step_time.json"))
    assert sources
    page = levers.page({str(source): json.loads(source.read_bytes()) for source in sources})
    assert page == Path("docs/LEVERS.md").read_text(encoding="utf-8"), \
        "docs/LEVERS.md differs; run python -m tools.bench.levers docs/LEVERS.md results/platform/*-engine/*/step_time.json"


def test_the_page_of_host_kernels_is_what_its_records_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    sources = sorted(Path("results/platform").glob("cpu-*/cpu_kernels.json"))
    assert sources
    page = cpu_kernels.page({str(source): json.loads(source.read_bytes()) for source in sources})
    assert page == Path("docs/CPU.md").read_text(encoding="utf-8"), \
        "docs/CPU.md differs; run python -m tools.bench.cpu_kernels page docs/CPU.md results/platform/cpu-*/cpu_kernels.json"


def test_a_report_is_counted_by_what_became_of_each_test(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text("""<testsuites><testsuite>
        <testcase classname="a" name="passes" time="1.25"/>
        <testcase classname="a" name="fails" time="0.25"><failure message="no"/></testcase>
        <testcase classname="a" name="breaks"><error message="no"/></testcase>
        <testcase classname="a" name="is skipped" time="0"><skipped message="needs a card"/></testcase>
    </testsuite></testsuites>""")
    assert gpu_tests.counts(report) == {
        "passed": 1, "failed": 2, "skipped": 1, "failures": ["a::breaks", "a::fails"], "skips": ["needs a card"], "seconds": 1.5}


@pytest.mark.parametrize("path", sorted((ROOT / "results" / "gpu-tests").glob("*.json")), ids=lambda path: path.stem)
def test_a_record_of_tests_adds_up(path: Path) -> None:
    record = json.loads(path.read_bytes())
    assert record["failed"] == len(record["failures"]) and (record["exit_code"] == 0) == (record["failed"] == 0)
    assert record["passed"] > 0 and record["commit"] and record["device"] and record["versions"]["triton"]
