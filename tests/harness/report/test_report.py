"""The report says what the summary says, hides nothing, and comes out the same from the same evidence."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.ratios import AXES, GPU_MEMORY, THROUGHPUT
from harness.evidence import layout
from harness.evidence.schema import EvidenceError, load_series
from harness.evidence.store import BrokenSeal, check_seal
from harness.report.build import build_report
from harness.report.markdown import render
from harness.report.plots import in_flight_svg, latency_svg, memory_svg, pss_over_time
from harness.report.scoreboard import render_scoreboard
from harness.report.text import NBSP, NONE, Markup, absolute, cell, flatten, folded, number, table, whole
from tests.harness.series_factory import alter_id, edit_json, make_series, reseal

FIGURES = ("latency.svg", "in_flight.svg", "memory.svg")
DERIVED = ("summary.json", "report.md", *(f"plots/{name}" for name in FIGURES))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    series = make_series(tmp_path_factory.mktemp("built") / "series", statuses={"performance-2": ["void", "ok"]})
    return series, build_report(series)


def page(summary: dict[str, Any]) -> str:
    """The report with plain spaces, so that a test need not say where a line may break."""
    return render(summary).replace(NBSP, " ")


def report_of(path: Path, **changes: Any) -> str:
    series = make_series(path / "series", **changes)
    build_report(series)
    return (series / "report.md").read_text().replace(NBSP, " ")


def section_of(text: str, pair: dict[str, Any]) -> str:
    """The table of every axis of one pair: under its heading, or folded under its summary."""
    name = f"{pair['ours']} [{pair['roles'][0]}] / {pair['base']} [{pair['roles'][1]}]"
    after = re.split(rf"### {re.escape(name)}\n|<summary><b>{re.escape(name)}</b>", text)[1]
    return re.split("</details>|<details>|##", after)[0]


def rows_of(section: str) -> list[str]:
    return [line for line in section.splitlines() if line.startswith("| ") and ("↑" in line or "↓" in line)]


def test_everything_derived_is_written_and_the_seal_still_holds(built: tuple[Path, dict[str, Any]]) -> None:
    series, summary = built
    assert all((series / name).is_file() for name in DERIVED)
    check_seal(series)
    assert summary["exit_code"] == 0
    assert (series / "report.md").read_text() == render(summary)


def test_the_same_evidence_gives_the_same_bytes(built: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    series, _ = built
    before = {name: (series / name).read_bytes() for name in DERIVED}
    (series / "report.md").write_text("something else")
    build_report(series)
    assert {name: (series / name).read_bytes() for name in DERIVED} == before
    again = make_series(tmp_path / "series", statuses={"performance-2": ["void", "ok"]})
    build_report(again)
    assert {name: (again / name).read_bytes() for name in DERIVED} == before


def test_the_verdict_line_comes_first(built: tuple[Path, dict[str, Any]]) -> None:
    first = page(built[1]).splitlines()[0]
    assert re.fullmatch(r"\*\*PASS \(FASTER\)\*\* · total throughput, on \[ours\] / pin \[pin\]: 1\.2\d{3}x, "
                        r"95 % interval 1\.\d{4} to 1\.\d{4} over 3 blocks; margin 2\.0 %", first)


def test_the_pairs_stand_at_a_glance_above_everything_else(built: tuple[Path, dict[str, Any]]) -> None:
    _, summary = built
    top = page(summary).split("## What against what")[0]
    rows = [line for line in top.splitlines() if line.startswith("| **")]
    assert len(rows) == len(summary["pairs"]) == 3
    for pair, row in zip(summary["pairs"], rows, strict=True):
        cells = row.strip("| ").split(" | ")
        assert cells[0] == f"**{pair['ours']} [{pair['roles'][0]}] / {pair['base']} [{pair['roles'][1]}]**"
        for cell_, axis in zip(cells[1:5], ("total_throughput", "ttft_mean", "tpot_mean", "peak_pss"), strict=True):
            found = pair["axes"][axis]
            assert cell_ == f"**{found['ratio']:.4f}**<br>{found['interval'][0]:.4f} to {found['interval'][1]:.4f}"
        assert cells[5] == "PASS (FASTER)"


def test_a_number_and_its_interval_stay_in_one_line(built: tuple[Path, dict[str, Any]]) -> None:
    text = render(built[1])
    assert not re.search(r"\d to \d", text) and re.search(rf"\d{NBSP}to{NBSP}\d", text)
    assert not [line for line in text.splitlines() if line.startswith("| ") and re.search(r"\d %", line.replace("95 % interval", ""))]


def test_every_ratio_stands_with_each_block_its_spread_and_its_role(built: tuple[Path, dict[str, Any]]) -> None:
    _, summary = built
    text = page(summary)
    for pair in summary["pairs"]:
        rows = rows_of(section_of(text, pair))
        axes = ["total_throughput", *(name for name in AXES if name not in THROUGHPUT and name != GPU_MEMORY)]
        assert len(rows) == len(axes) == 7 and rows[0].startswith("| throughput, all three ↑ |")
        for name, row in zip(axes, rows, strict=True):
            axis = pair["axes"][name]
            assert f"| {pair['base']} [{pair['roles'][1]}] | {axis['ratio']:.4f} |" in row
            assert " ".join(f"{value:.4f}" for value in axis["per_block"]) in row
            assert f"{axis['interval'][0]:.4f} to {axis['interval'][1]:.4f}" in row
            assert f"| {100 * axis['spread_ours']:.1f} % / {100 * axis['spread_base']:.1f} % |" in row
            assert ("↑" in row) == name.endswith("throughput")


def test_throughputs_that_disagree_keep_a_row_each(built: tuple[Path, dict[str, Any]]) -> None:
    pairs = [{**pair, "errors": ["they differ"]} for pair in built[1]["pairs"]]
    rows = rows_of(section_of(page({**built[1], "pairs": pairs}), pairs[0]))
    assert [row.split(" ↑")[0] for row in rows[:3]] == ["| total throughput", "| output throughput", "| request throughput"]


def test_lost_attempts_are_shown(built: tuple[Path, dict[str, Any]]) -> None:
    text = page(built[1])
    assert "| performance-2 | 1 | void | planted void |" in text
    assert "none was repeated" not in text


def test_occupancy_and_counters_are_shown_and_an_untold_counter_is_not_zero(built: tuple[Path, dict[str, Any]]) -> None:
    row = next(line for line in page(built[1]).splitlines() if line.startswith("| performance-1-on | ") and " of 4 " in line)
    leg = built[1]["arms"]["on"]["performance"][0]
    assert f"| {leg['occupancy']['mean_in_flight']:.2f} of 4 |" in row and f"{leg['occupancy']['steady_throughput']:,.2f}" in row
    assert row.endswith("| 10 | n/a | 0 | 0 |")


def test_an_eager_oracle_gets_no_verdict(tmp_path: Path) -> None:
    text = report_of(tmp_path, arms=(("on", "ours"), ("off", "ours"), ("pin", "eager")))
    assert text.startswith("**INCONCLUSIVE** · total throughput, on [ours] / pin [eager]: 1.2")
    section = section_of(text, {"ours": "on", "base": "pin", "roles": ["ours", "eager"]})
    rows = rows_of(section)
    assert len(rows) == 7 and all("| pin [eager] |" in row and row.endswith("| no verdict: eager |") for row in rows)
    assert "PASS" not in section and "pin ran without compilation or graphs" in section
    assert "| **on [ours] / pin [eager]** | **1.2" in text.split("## ")[0] and text.count("no verdict: eager |") == 2 * (7 + 1)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gate": None}, "Not run."),
        ({"gate": {"ok": False, "passed": 3, "failures": [{"arm": "on", "request": 2, "position": 7, "expected": 1, "got": 5}]}},
         "arm on, expected 1, got 5, position 7, request 2"),
        ({"dirty": True}, "not binding"),
        ({"clients": {"pin": "async"}}, "refused: clients differ"),
        ({"statuses": {"performance-1": ["void"] * 3}}, "**VOID**"),
        ({"statuses": {"performance-1": ["hung"] * 3}}, "**ERROR**"),
        ({"memory": 0}, "| peak PSS ↓ | pin [pin] | n/a | n/a | n/a | n/a | n/a | VOID |"),
        ({"performance": 1}, "one block, no interval"),
    ],
)
def test_what_went_wrong_is_said(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    assert says in report_of(tmp_path, **changes)


def test_wrong_tokens_are_named(tmp_path: Path) -> None:
    series = make_series(tmp_path / "series")
    alter_id(layout.leg_folder(series, "performance", 3, 1, "off"), request=6, position=2, value=77)
    reseal(series)
    build_report(series)
    text = (series / "report.md").read_text()
    assert "| memory-1-off / performance-3-off | one arm over its legs | 7/8 | must agree |" in text
    assert "request 6, position 2: 603 against 77" in text and text.startswith("**INCONCLUSIVE**")


def test_identities_and_the_way_back_are_there(built: tuple[Path, dict[str, Any]]) -> None:
    text = page(built[1])
    for part in ("vllm 0.32.0", "| machine.cpu | Synthetic CPU |", "git checkout c0ffee", "parity run-series SERIES/spec.toml"):
        assert part in text
    assert built[1]["manifest_head"] in text


def test_a_broken_seal_writes_nothing(tmp_path: Path) -> None:
    series = make_series(tmp_path / "series")
    edit_json(series / "series.json", lambda record: record.update(machine={}))
    with pytest.raises(BrokenSeal, match=r"series.json: changed"):
        build_report(series)
    assert not any((series / name).exists() for name in DERIVED)


def test_a_link_in_place_of_a_derived_file_is_not_followed(tmp_path: Path) -> None:
    series = make_series(tmp_path / "series")
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (series / "report.md").symlink_to(victim)
    with pytest.raises(BrokenSeal, match="symbolic link"):
        build_report(series)
    assert victim.read_text() == "mine"
    (series / "report.md").unlink()
    (series / "plots").rename(tmp_path / "plots")
    (series / "plots").symlink_to(tmp_path / "plots")
    with pytest.raises(BrokenSeal, match="symbolic link"):
        build_report(series)


def test_evidence_cannot_break_the_page(tmp_path: Path) -> None:
    series = make_series(tmp_path / "series")
    evil = "x | y\n# <script>alert(1)</script>"
    for leg in series.glob("blocks/*/*/pin/result.json"):
        edit_json(leg, lambda result: result["who"].update(version=evil))
    edit_json(series / "plan.json", lambda plan: plan.update(title=evil))
    reseal(series)
    build_report(series)
    text = (series / "report.md").read_text()
    assert "<script>" not in text and "\n# &lt;script" not in text
    assert "x \\| y # &lt;script>" in text


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_plain_svg_without_a_date(built: tuple[Path, dict[str, Any]], name: str) -> None:
    text = (built[0] / "plots" / name).read_text()
    root = ET.fromstring(text)
    assert root.tag.endswith("svg") and "<dc:date>" not in text and "<script" not in text
    words = " ".join("".join(node.itertext()) for node in root.iter() if node.tag.endswith("text"))
    assert all(f"{arm} ({role})" in words for arm, role in (("on", "ours"), ("off", "ours"), ("pin", "pin")))
    backgrounds = [node for node in root.iter() if node.tag.endswith("path") and "fill: #ffffff" in node.get("style", "")]
    assert all("opacity: 0" in node.get("style", "") for node in backgrounds)


def test_the_client_s_ceiling_is_shown_or_said_to_be_missing(built: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    assert "Not measured: this series has no leg against the null engine." in page(built[1])
    series = make_series(tmp_path / "series", ceiling_us=10, step_us={"on": 800, "off": 50, "pin": 1000})
    text = page(summary := build_report(series))
    ceiling = summary["ceiling"]
    assert f"{ceiling['requests_per_s']:,.2f} requests/s" in text and f"{ceiling['seconds_per_delta'] * 1e6:.3f} µs a delta" in text
    section = text.split("## Client ceiling")[1].split("## ")[0]
    on, off, _ = (row for row in section.splitlines() if row.startswith("| o") or row.startswith("| pin"))
    assert on.endswith(f"| {ceiling['arms']['on']['share']:.2%} | the engine's |".replace("%", " %"))
    assert off.endswith("| CLIENT-BOUND |") and "| **off [ours] / pin [pin]** |" in text
    glance = next(line for line in text.splitlines() if line.startswith("| **off [ours] / pin [pin]**"))
    assert glance.endswith("| no verdict: CLIENT-BOUND |")


def test_a_percentile_stands_with_its_bound_or_is_not_there(built: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    few = [line for line in page(built[1]).splitlines() if line.startswith("| performance-1-on | TTFT | 8 |")]
    assert len(few) == 1 and "| n/a | n/a | n/a |" in few[0]
    summary = build_report(make_series(tmp_path / "series", requests=70, memory=1))
    ttft = summary["arms"]["on"]["performance"][0]["ttft"]
    row = next(line for line in page(summary).splitlines() if line.startswith("| performance-1-on | TTFT | 70 |"))
    assert f"| {ttft['p90'] * 1000:,.3f} (≤ {ttft['p90_upper'] * 1000:,.3f}) | n/a | n/a |" in row


def test_memory_stands_with_its_parts_and_how_it_was_sampled(built: tuple[Path, dict[str, Any]]) -> None:
    mib = 2**20
    arms = {name: {**arm, "memory": [dict(leg) for leg in arm["memory"]]} for name, arm in built[1]["arms"].items()}
    arms["on"]["memory"][0] |= {
        "peak_pss": 9 * mib, "stable_pss": 8 * mib,
        "peak": {"phase": "loaded", "pss_anon": 4 * mib, "pss_file": 3 * mib, "pss_shmem": 2 * mib},
        "passes": 80, "partial_passes": 2, "max_gap_s": 0.5,
        "sampling": {"period_s": 0.2, "interval_s": 0.21, "mean_cost_s": 0.011, "max_cost_s": 0.022, "cost_share": 0.06,
                     "gpu_peak": 7 * mib, "available_min": None, "cgroup_peak": 11 * mib},
    }
    text = page({**built[1], "arms": arms})
    assert text.count("control group") == 1 and "- memory-1-on: its control group peaked at 11.0 MiB, page cache" in text
    shown, sampled = (line for line in text.splitlines() if line.startswith("| memory-1-on | "))
    assert shown == "| memory-1-on | 9.0 | 4.0 | 3.0 | 2.0 | loaded | 8.0 | 7.0 | n/a |"
    assert sampled == "| memory-1-on | 80 | 2 | 0.20 | 0.210 | 0.500 | 11.00 | 22.00 | 6.0 % |"
    assert built[1]["arms"]["on"]["memory"][0]["sampling"]["period_s"] == 0.2, "a real summary has these fields"


def test_a_leg_without_a_peak_says_why(built: tuple[Path, dict[str, Any]]) -> None:
    arms = {name: {**arm, "memory": [dict(leg) for leg in arm["memory"]]} for name, arm in built[1]["arms"].items()}
    arms["on"]["memory"][0] |= {"peak_pss": None, "peak_missed": [{"pid": 9, "name": "cc1", "hwm": 300 * 2**20, "sampled_rss": 10 * 2**20}]}
    arms["off"]["memory"][1] |= {"peak_pss": None, "stable_pss": None, "complete": False}
    text = page({**built[1], "arms": arms})
    assert "- memory-1-on: no peak, cc1 (pid 9) was once at 300.0 MiB by VmHWM, and 10.0 MiB is the most" in text
    assert "- memory-2-off: the sampler's stream is cut short" in text and "no peak" not in page(built[1])


def test_notes_of_legs_that_count_are_shown_once_each(tmp_path: Path) -> None:
    series = make_series(tmp_path / "series", statuses={"performance-2": ["void", "ok"]})
    note = "the page cache could not be proven: x | y"
    for leg in series.glob("blocks/*/attempt-*/on/leg.json"):
        edit_json(leg, lambda record: record.update(notes=[note] if record["attempt"] == 1 else []))
    edit_json(series / "blocks/memory-1/attempt-1/pin/leg.json", lambda record: record.update(notes=["another"]))
    reseal(series)
    text = page(build_report(series))
    section = text.split("## Notes of the legs")[1].split("##")[0]
    names = "memory-1-on, memory-2-on, performance-1-on, performance-3-on"
    assert section.strip().splitlines() == [f"- {note.replace('|', chr(92) + '|')} ({names})", "- another (memory-1-pin)"]


def test_notes_that_are_no_texts_are_refused(tmp_path: Path) -> None:
    series = make_series(tmp_path / "series")
    edit_json(series / "blocks/memory-1/attempt-1/pin/leg.json", lambda record: record.update(notes=[{"a": 1}]))
    reseal(series)
    with pytest.raises(EvidenceError, match=r"memory-1/attempt-1/pin/leg.json: field `notes` is .*, expected a list of texts"):
        build_report(series)


def test_equal_occupancy_is_claimed_only_of_arms_that_ran(built: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    claim = "equally full, within 1 %"
    assert claim in page(built[1])
    assert claim not in report_of(tmp_path, statuses={"performance-1": ["void"] * 3, "performance-2": ["void"], "performance-3": ["void"]})
    warned = {**built[1], "occupancy_warnings": ["on/pin: mean in flight 3 against 4"]}
    assert claim not in page(warned) and "- on/pin: mean in flight 3 against 4" in page(warned)


def test_every_figure_is_on_the_page(built: tuple[Path, dict[str, Any]]) -> None:
    assert sorted(re.findall(r"!\[[^]]+\]\(plots/([^)]+)\)", page(built[1]))) == sorted(FIGURES)
    assert sorted(path.name for path in (built[0] / "plots").iterdir()) == sorted(FIGURES)


def test_a_figure_without_its_phase_is_left_out(tmp_path: Path) -> None:
    series = make_series(tmp_path / "series", memory=0)
    summary = build_report(series)
    assert not (series / "plots" / "memory.svg").exists() and "memory.svg" not in render(summary)
    loaded = load_series(series)
    assert memory_svg(loaded) is None and latency_svg(loaded) is not None and in_flight_svg(loaded) is not None


def test_a_partial_pass_is_no_total() -> None:
    row: dict[str, Any] = {"kind": "pss", "t_ns": 5, "partial": False, "processes": [{"pss": 3}, {"pss": 4}]}
    rows = [row, {**row, "partial": True}, {**row, "processes": [{"pss": None}]}, {"kind": "rss"}]
    assert pss_over_time(rows) == [(5, 7), (5, None), (5, None)]


def test_no_value_is_written_as_not_available() -> None:
    assert (number(None), absolute("peak_pss", None), cell(None)) == (NONE, NONE, NONE)
    assert number(0.0) == "0.00" and cell(False) == "no" and cell(0) == "0"
    assert table(["a", "b"], []) == ["None.", ""]
    assert table(["a", "b"], [[1, None]]) == ["| a | b |", "|:--|--:|", "| 1 | n/a |", ""]
    assert table(["a", "b"], [["x", Markup("**y**<br>z")]], text=2)[1:3] == ["|:--|:--|", "| x | **y**<br>z |"]
    assert cell(f" {whole('a b')}\n c<") == f"a{NBSP}b c&lt;"
    assert folded("t", ["| a |"])[:4] == ["<details>", "<summary>t</summary>", "", "| a |"]
    assert flatten({"b": [1, 2], "a": {"c": None}, "d": [{"e": 1}]}) == [("a.c", "n/a"), ("b", "1, 2"), ("d[0].e", "1")]


def test_the_scoreboard_is_rebuilt_from_evidence(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    assert "No committed series yet." in render_scoreboard(results)
    make_series(results / "first")
    make_series(results / "second", arms=(("on", "ours"), ("off", "ours"), ("pin", "eager")))
    text = render_scoreboard(results)
    assert text == render_scoreboard(results)
    assert "[first](../results/first/report.md)" in text and "| PASS (FASTER) |" in text
    assert "| on [ours] / pin [eager] |" in text and "| INCONCLUSIVE |" in text
    edit_json(results / "second" / "series.json", lambda record: record.update(machine={}))
    with pytest.raises(BrokenSeal, match=r"series.json: changed"):
        render_scoreboard(results)


def test_the_scoreboard_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.report import scoreboard

    monkeypatch.setattr(scoreboard, "ROWS", 1)
    for name in ("a", "b"):
        make_series(tmp_path / name, performance=1, memory=0)
    text = render_scoreboard(tmp_path)
    assert "[b]" in text and "[a]" not in text and "1 older series are in results/." in text
