"""One build, one difference: what is an A/B, what withholds its verdict, and what is said of a gap inside the noise."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from harness.ab import check_ab
from harness.analysis.ab import difference, judge, neutrality, why_no_ab
from harness.analysis.ratios import compare
from harness.cli import _run
from harness.evidence import layout
from harness.report.build import build_report, summarize_series
from harness.report.text import NBSP
from harness.strict import SpecError
from legs import protocol
from tests.harness.series_factory import Recipe, edit_json, make_plan, make_series, reseal

ROOT = Path(__file__).resolve().parents[3]
TWO: dict[str, Any] = {"arms": (("on", "ours"), ("off", "ours")), "pairs": (("on", "off"),), "performance": 5}
LOADS = {"on": {"load": "direct"}, "off": {"load": "staged"}}
AB: dict[str, Any] = {**TWO, "options": LOADS, "step_us": {"on": 1000, "off": 1000}}
AA: dict[str, Any] = {**TWO, "step_us": {"on": 1000, "off": 1000}}


def plan_of(**changes: Any) -> dict[str, Any]:
    return make_plan(Recipe(**{**AB, **changes}))


def test_one_difference_is_an_ab_and_none_an_aa() -> None:
    found = difference(plan_of())
    assert found is not None and (found.kind, found.option, found.values) == ("A/B", "load", ("direct", "staged"))
    turned = difference(plan_of(pairs=(("off", "on"),)))
    assert turned is not None and turned.values == ("staged", "direct"), "ours first, whatever the order of the arms"
    same = difference(plan_of(options={}))
    assert same is not None and (same.kind, same.option) == ("A/A", None)


@pytest.mark.parametrize(("change", "said"), [
    (lambda plan: plan["arms"][1].update(driver="vllm"), "`arms.*.driver`: on has 'engine', off has 'vllm'"),
    (lambda plan: plan["arms"][1].update(oracle="vllm-cpu"), "`arms.*.oracle`: on has None, off has 'vllm-cpu'"),
    (lambda plan: plan["arms"][1].update(client="async"), "`arms.*.client`: on has 'step', off has 'async'"),
    (lambda plan: plan["arms"][1]["options"].update(depth=2), "on and off differ in depth, load; an A/B has one difference"),
    (lambda plan: plan["arms"][1]["options"].pop("depth"), "on and off differ in depth, load"),
    (lambda plan: plan["arms"][1]["options"].update(depth=True), "on and off differ in depth, load"),
    (lambda plan: plan["pairs"].append(["off", "on"]), "an A/B has one pair"),
    (lambda plan: plan["arms"].append({**plan["arms"][1], "name": "third"}), "3 arms (on, off, third)"),
])
def test_anything_else_is_none(change: Any, said: str) -> None:
    plan = copy.deepcopy(plan_of())
    change(plan)
    assert said in why_no_ab(plan)[0] and difference(plan) is None


@pytest.mark.parametrize("name", ["quick", "smollm2"])
def test_the_command_refuses_other_series_before_anything_runs(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, lock = tmp_path / "out", tmp_path / "lock"
    assert _run(["ab", str(ROOT / "legs" / "series" / f"{name}.toml"), "--out", str(out), "--lock", str(lock)]) == 64
    assert f"{name}.toml: field `arms` is ['on', 'off', 'pin']: 3 arms" in capsys.readouterr().err
    assert not out.exists() and not lock.exists()


def test_two_differences_in_a_spec_are_refused(tmp_path: Path) -> None:
    text = (ROOT / "legs" / "series" / "ab-direct.toml").read_text()
    spec = tmp_path / "ab.toml"
    changed = text.replace("depth = 1\n", "").replace('load = "direct"', 'load = "direct"\ndepth = 1').replace(
        'load = "staged"', 'load = "staged"\ndepth = 2')
    spec.write_text(changed)
    with pytest.raises(SpecError, match="differ in depth, load; an A/B has one difference"):
        check_ab(ROOT, spec)


@pytest.mark.parametrize(("name", "kind", "option"), [("ab-direct", "A/B", "load"), ("aa", "A/A", None)])
def test_the_committed_specs_are_what_they_say(name: str, kind: str, option: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    spec = ROOT / "legs" / "series" / f"{name}.toml"
    check_ab(ROOT, spec)
    assert _run(["plan", str(spec), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    found = difference(plan)
    assert found is not None and (found.kind, found.option) == (kind, option)
    orders = [block["order"] for block in plan["blocks"] if block["phase"] == "performance"]
    assert len(orders) >= 5 and all(a == b[::-1] for a, b in itertools.pairwise(orders)), "AB, BA, AB, ..."


def summary_of(path: Path, **changes: Any) -> dict[str, Any]:
    return summarize_series(make_series(path / "series", **changes))


def test_equal_arms_are_equivalent(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, **AB)
    assert (summary["verdict"], summary["qualifier"]) == ("PASS", "EQUIVALENT")
    found = summary["pairs"][0]["ab"]
    assert (found["kind"], found["option"], found["values"]) == ("A/B", "load", ["direct", "staged"])
    assert [(block["identical"], block["of"]) for block in found["blocks"]] == [(8, 8)] * 7, "two memory and five performance blocks"


def test_a_real_gain_of_an_ab_is_faster(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, **{**AB, "step_us": {"on": 900, "off": 1000}})
    assert (summary["verdict"], summary["qualifier"]) == ("PASS", "FASTER")
    assert summary["pairs"][0]["ab"]["axes"]["total_throughput"]["inside"] is False


def test_a_changed_output_withholds_the_speed_verdict(tmp_path: Path) -> None:
    def change(arm: str, phase: str, repetition: int, ids: list[list[int]]) -> list[list[int]]:
        if (arm, phase, repetition) == ("off", "performance", 2):
            ids[3][2] += 1
        return ids

    series = make_series(tmp_path / "series", **{**AB, "step_us": {"on": 800, "off": 1000}}, tokens=change)
    summary = build_report(series)
    assert (summary["verdict"], summary["qualifier"], summary["exit_code"]) == ("INCONCLUSIVE", None, 2)
    assert summary["reasons"][0] == (
        "OUTPUT CHANGED (1 of 7 blocks; performance-2-on against performance-2-off: 7/8 outputs identical, first at request 3, position 2; "
        "a speed over other work is none)")
    page = (series / "report.md").read_text().replace(NBSP, " ")
    assert "OUTPUT CHANGED performance-2-on / performance-2-off 7/8" in page
    assert "FASTER" not in page and "| OUTPUT CHANGED |" in page


def test_another_engines_changed_output_counts_too(tmp_path: Path) -> None:
    """Two arms of the oracle: what no other series gates, an A/B does."""
    series = make_series(tmp_path / "series", **{**AB, "arms": (("on", "pin"), ("off", "pin"))}, planned_gate=False, gate=None,
                         tokens=lambda arm, phase, r, ids: [[i + (arm == "off") for i in row] for row in ids])
    assert summarize_series(series)["reasons"][0].startswith("OUTPUT CHANGED (7 of 7 blocks")


@pytest.mark.parametrize(("file", "change", "said"), [
    (protocol.RESULT, lambda result: result["who"].update(version="9"), "not one build (on and off differ in `who`)"),
    (protocol.RESULT, lambda result: result["device"].update(name="other"), "not one build (on and off differ in `device`)"),
    (protocol.RESULT, lambda result: result["resolved"].update(depth=2), "asked for the same, the arms resolved depth differently"),
])
def test_arms_that_turn_out_unlike_get_no_verdict(tmp_path: Path, file: str, change: Any, said: str) -> None:
    series = make_series(tmp_path / "series", **AA)
    for leg in series.glob(f"blocks/*/*/off/{file}"):
        edit_json(leg, change)
    reseal(series)
    summary = summarize_series(series)
    assert summary["verdict"] == "INCONCLUSIVE" and said in summary["reasons"][0]


def test_what_a_difference_brings_with_it_is_told(tmp_path: Path) -> None:
    series = make_series(tmp_path / "series", **AB)
    for leg in series.glob(f"blocks/*/*/off/{protocol.RESULT}"):
        edit_json(leg, lambda result: result["resolved"].update(depth=2))
    reseal(series)
    summary = build_report(series)
    assert summary["verdict"] == "PASS" and summary["pairs"][0]["ab"]["also_resolved"] == ["depth"]
    assert "resolved differently because of it: depth" in (series / layout.REPORT).read_text()


ONE = [1.0] * 5


def axis_of(ours: list[float], margin: float, base: list[float] | None = None) -> Any:
    return compare("total_throughput", ours, base or ONE[: len(ours)], margin)


@pytest.mark.parametrize(("centre", "scatter", "verdict", "qualifier"), [
    (1.0, 0.001, "PASS", "EQUIVALENT"), (1.05, 0.001, "FAIL", None), (0.95, 0.001, "FAIL", None), (1.0, 0.05, "INCONCLUSIVE", None),
    (1.005, 0.001, "PASS", "EQUIVALENT"), (1.02, 0.001, "INCONCLUSIVE", None),
])
def test_verdicts_of_an_aa(centre: float, scatter: float, verdict: str, qualifier: str | None) -> None:
    """Only equality passes; a difference beyond the margin, to either side, is the instrument's fault."""
    same = difference(plan_of(options={}))
    assert same is not None
    axis, _ = judge(axis_of([centre + scatter * k for k in (-1.5, -0.5, 0, 0.5, 1.5)], 0.02), same, 0.02)
    assert (axis.verdict, axis.qualifier) == (verdict, qualifier)


@pytest.mark.parametrize(("ours", "base", "neutral", "inside", "signs"), [
    ([1.0, 1.01, 0.99], [1.0, 1.0, 1.0], True, True, "=+-"),
    ([1.1, 1.1, 1.1], [1.0, 1.0, 1.0], False, False, "+++"),
    ([1.01, 2.02, 3.03], [1.0, 2.0, 3.0], False, True, "+++"),
    ([1.02, 1.04, 1.03], [1.0, 1.0, 1.0], False, False, "+++"),
])
def test_neutral_is_inside_the_spread_without_a_direction(
    ours: list[float], base: list[float], neutral: bool, inside: bool, signs: str
) -> None:
    """The third: both arms drift by 100 % and ours is 1 % ahead in every block; inside the spread, said so, and yet a direction."""
    found = neutrality(axis_of(ours, 0.02, base), 0.02)
    assert found is not None and (found.neutral, found.inside, found.signs) == (neutral, inside, signs)


def test_a_neutral_gap_is_never_faster() -> None:
    """The one-sided bound clears 1 and the two-sided interval does not: a PASS, without the word that says more."""
    found = difference(plan_of())
    assert found is not None
    axis = axis_of([1.01, 1.0006, 1.012, 1.001, 1.003], 0.02)
    assert axis.qualifier == "FASTER" and axis.interval is not None and axis.interval[0] < 1
    judged, noise = judge(axis, found, 0.02)
    assert noise is not None and noise.neutral and (judged.verdict, judged.qualifier) == ("PASS", "EQUIVALENT")


def test_equivalence_needs_both_bounds() -> None:
    for centre, wanted in ((1.0, True), (0.975, False), (1.025, False), (1 / 0.975, False)):
        found = neutrality(axis_of([centre * k for k in (0.999, 1.0, 1.001)], 0.02), 0.02)
        assert found is not None and found.equivalent is wanted


def test_one_block_has_no_neutrality(tmp_path: Path) -> None:
    assert neutrality(axis_of([1.0], 0.02), 0.02) is None
    assert summary_of(tmp_path, **{**AB, "performance": 1})["verdict"] == "INCONCLUSIVE"


def test_an_aa_tells_its_false_alarms(tmp_path: Path) -> None:
    series = make_series(tmp_path / "series", **{**AA, "performance": 10})
    summary = build_report(series)
    share = summary["pairs"][0]["ab"]["alarms"]["total_throughput"]
    assert share["n"] == 2 and summary["pairs"][0]["ab"]["alarms"]["peak_pss"] is None
    assert f"total throughput: {share['k']} of 2 intervals leave out 1" in (series / layout.REPORT).read_text()
    assert summary_of(tmp_path / "b", **AB)["pairs"][0]["ab"]["alarms"]["total_throughput"] is None, "an A/B may differ"
