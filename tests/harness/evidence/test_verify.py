"""`parity verify`: a whole series passes, and each thing a forger could touch is named."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.cli import _run
from harness.evidence import layout
from harness.evidence.verify import first_difference, to_lines, verify
from harness.report.build import build_report
from legs import protocol
from tests.harness.series_factory import alter_id, edit_json, make_series, reseal


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    series = make_series(tmp_path_factory.mktemp("built") / "series")
    build_report(series)
    return series


@pytest.fixture
def series(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "series"))


def differences(series: Path) -> dict[str, str]:
    return {check.name: check.difference for check in verify(series) if check.difference is not None}


def edit(path: Path, change: Callable[[str], str]) -> None:
    before = path.read_text()
    path.write_text(change(before))
    assert path.read_text() != before, "the edit must change something"


def test_a_whole_series_verifies_and_nothing_is_written(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in built.rglob("*") if path.is_file()}
    assert _run(["verify", str(built)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["ok   seal", "ok   summary.json", "ok   report.md", "ok   plots/latency.svg",
                                                     "ok   plots/in_flight.svg", "ok   plots/memory.svg"]
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in built.rglob("*") if path.is_file()} == before


def test_one_changed_byte_of_evidence_is_a_broken_seal(series: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leg = layout.leg_folder(series, "performance", 2, 1, "on")
    alter_id(leg, request=4, position=6, value=9)
    assert _run(["verify", str(series)]) == 4
    assert "performance-2/attempt-1/on" in capsys.readouterr().err


def test_evidence_altered_and_sealed_anew_is_another_summary(series: Path) -> None:
    """The chain cannot tell a whole new seal; what was derived before it does."""
    leg = layout.leg_folder(series, "performance", 2, 1, "on")
    alter_id(leg, request=4, position=6, value=9)
    reseal(series)
    found = differences(series)
    assert set(found) == {"summary.json", "report.md"} and found["summary.json"].endswith("is computed")


@pytest.mark.parametrize(("change", "named"), [
    (lambda s: s["pairs"][0]["axes"]["ttft_mean"].update(ratio=s["pairs"][0]["axes"]["ttft_mean"]["ratio"] * (1 + 1e-8)),
     r"pairs\[0\].axes.ttft_mean.ratio: 0.\d+ is stored, 0.\d+ is computed"),
    (lambda s: s.update(verdict="FAIL"), r'verdict: "FAIL" is stored, "PASS" is computed'),
    (lambda s: s.update(exit_code=True), r"exit_code: true is stored, 0 is computed"),
    (lambda s: s["arms"]["on"]["performance"].pop(), r"arms.on.performance: \[.*\.\.\. is stored, .* is computed"),
    (lambda s: s.pop("tokens"), r"tokens: is not stored"),
    (lambda s: s.update(praise=1), r"praise: is stored, and nothing computes it"),
])
def test_a_summary_that_was_touched_is_named_by_its_field(series: Path, change: Callable[[Any], Any], named: str) -> None:
    edit_json(series / layout.SUMMARY, change)
    found = differences(series)
    assert set(found) == {"summary.json"} and re.match(named, found["summary.json"])


def test_nine_digits_are_asked_and_no_more(series: Path) -> None:
    edit_json(series / layout.SUMMARY, lambda s: s["pairs"][0]["axes"]["ttft_mean"].update(
        ratio=s["pairs"][0]["axes"]["ttft_mean"]["ratio"] * (1 + 1e-11)))
    assert differences(series) == {}
    assert first_difference(0.0, 1e-300) is not None, "nothing is near 0 but 0"
    assert first_difference(None, 0) is not None and first_difference(1, 1.0) is not None


def test_one_digit_of_the_report_is_named_by_its_line(series: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(series / layout.REPORT, lambda text: text.replace("1.2", "1.3", 1))
    assert _run(["verify", str(series)]) == 1
    assert "DIFF report.md: line 1: " in capsys.readouterr().out
    build_report(series)
    edit(series / layout.REPORT, lambda text: text.rstrip("\n"))
    end = len((series / layout.REPORT).read_text().splitlines()) + 1
    assert differences(series) == {"report.md": f'line {end}: null is stored, "" is computed'}


def moved(text: str) -> str:
    """The last vertex of the first curve two points to the left: what a retouched plot would have."""
    curves = list(re.finditer(r'<path d="([^"]*)" clip-path="[^"]*" style="fill: none; stroke: #2f81f7', text))
    path = curves[0].group(1)
    x = path.rstrip().split("\n")[-1].split()[1]
    return text.replace(path, path.replace(x, f"{float(x) - 2:.6f}"))


def test_a_plot_is_judged_by_what_it_shows(series: Path) -> None:
    plot = series / layout.PLOTS / "latency.svg"
    whole = plot.read_text()
    edit(plot, lambda text: text.replace("'DejaVu Sans', ", "").replace("stroke-width: 0.8", "stroke-width: 0.9"))
    assert differences(series) == {}, "another font is no other data"
    plot.write_text(whole)
    edit(plot, moved)
    assert re.fullmatch(r"curve \d+: is drawn elsewhere", differences(series)["plots/latency.svg"])
    plot.write_text(whole)
    edit(plot, lambda text: text.replace("on (ours)", "on (pin)"))
    assert differences(series)["plots/latency.svg"] == "text 'on (pin)' is stored, 'on (ours)' is computed"
    plot.write_text("<svg")
    assert "is not a plot" in differences(series)["plots/latency.svg"]


def test_a_plot_of_other_data_differs(series: Path, tmp_path: Path) -> None:
    other = make_series(tmp_path / "other", seed=2, noise=0.05)
    build_report(other)
    for name in ("latency.svg", "in_flight.svg", "memory.svg"):
        shutil.copy(other / layout.PLOTS / name, series / layout.PLOTS / name)
    assert {"plots/latency.svg", "plots/in_flight.svg"} <= set(differences(series))


def test_what_is_missing_or_does_not_belong_is_named(series: Path) -> None:
    (series / layout.SUMMARY).unlink()
    (series / layout.PLOTS / "latency.svg").unlink()
    (series / layout.PLOTS / "memory.svg").unlink()
    (series / layout.PLOTS / "memory.svg").symlink_to(series / layout.REPORT)
    (series / layout.PLOTS / "speed.svg").write_text("<svg/>")
    assert differences(series) == {
        "summary.json": "is missing; write it with `parity report`", "plots/latency.svg": "is missing; write it with `parity report`",
        "plots/memory.svg": "is a symbolic link where a plain file belongs",
        "plots/speed.svg": "belongs to no plot of this series; remove it",
    }
    assert to_lines(verify(series))[1].startswith("DIFF summary.json: is missing")


def test_a_plot_that_the_series_cannot_have_is_named(tmp_path: Path) -> None:
    series = make_series(tmp_path / "series", memory=0)
    build_report(series)
    assert differences(series) == {}
    (series / layout.PLOTS / "memory.svg").write_text("<svg/>")
    assert differences(series) == {"plots/memory.svg": "is there, and this series has no such plot"}


def test_a_series_that_is_not_sealed_is_not_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["verify", str(make_series(tmp_path / "series", sealed=False))]) == 4
    assert "not sealed" in capsys.readouterr().err
    assert _run(["verify", str(tmp_path / "nothing")]) == 4
    (tmp_path / "empty").mkdir()
    assert _run(["verify", str(tmp_path / "empty"), "--json"]) == 4


def test_for_machines(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["verify", str(built), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows[0]["name"] == "seal" and all(row["difference"] is None for row in rows)
    assert protocol.RESULT not in {row["name"] for row in rows}
