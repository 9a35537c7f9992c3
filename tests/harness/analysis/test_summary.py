"""What a series says: every verdict, every reason to withhold one, and that nothing unreadable becomes a number."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.metrics import leg_metrics
from harness.analysis.ratios import AXES, GPU_MEMORY, MEMORY
from harness.evidence import layout
from harness.evidence.schema import EvidenceError, load_series
from harness.evidence.store import BrokenSeal
from harness.report.build import summarize_series
from harness.verdict import Exit
from legs import protocol
from tests.harness.series_factory import alter_id, edit_json, make_series, reseal

Ids = list[list[int]]


def summary_of(path: Path, **changes: Any) -> dict[str, Any]:
    return summarize_series(make_series(path / "series", **changes))


def axes_of(summary: dict[str, Any], pair: int = 0) -> dict[str, Any]:
    axes: dict[str, Any] = summary["pairs"][pair]["axes"]
    return axes


def test_a_faster_series_passes(tmp_path: Path) -> None:
    summary = summary_of(tmp_path)
    assert (summary["verdict"], summary["qualifier"], summary["exit_code"], summary["binding"]) == ("PASS", "FASTER", 0, True)
    assert set(axes_of(summary)) == set(AXES) - {GPU_MEMORY}
    axis = axes_of(summary)["total_throughput"]
    assert axis["ratio"] == pytest.approx(1.25, rel=0.01) and len(axis["per_block"]) == 3
    assert axes_of(summary)["peak_pss"]["ratio"] == pytest.approx(1 / 3, rel=0.01) and len(axes_of(summary)["peak_pss"]["per_block"]) == 2
    assert axes_of(summary)["peak_pss"]["qualifier"] == "SMALLER"
    assert [(pair["ours"], pair["base"], pair["roles"]) for pair in summary["pairs"]] == [
        ("on", "pin", ["ours", "pin"]), ("off", "pin", ["ours", "pin"]), ("on", "off", ["ours", "ours"])]


def test_its_numbers_are_those_of_its_legs(tmp_path: Path) -> None:
    summary = summary_of(tmp_path)
    series = load_series(tmp_path / "series")
    for block, on, pin in zip(range(3), series.legs("on")[2:], series.legs("pin")[2:], strict=True):
        ours, base = leg_metrics(on.traces), leg_metrics(pin.traces)
        assert ours.tpot and base.tpot
        per_block = {axis: axes_of(summary)[axis]["per_block"][block] for axis in AXES if axis not in MEMORY}
        assert per_block["total_throughput"] == pytest.approx(ours.total_throughput / base.total_throughput, rel=1e-12)
        assert per_block["ttft_mean"] == pytest.approx(ours.ttft.mean / base.ttft.mean, rel=1e-12)
        assert per_block["tpot_mean"] == pytest.approx(ours.tpot.mean / base.tpot.mean, rel=1e-12)
        assert per_block["e2e_mean"] == pytest.approx(ours.e2e.mean / base.e2e.mean, rel=1e-12)
    assert summary["arms"]["on"]["means"]["stable_pss"] == pytest.approx(300 * 2**20, rel=0.002)


@pytest.mark.parametrize(
    ("on_us", "verdict"), [(800, "PASS"), (1010, "PASS"), (1200, "FAIL"), (1020, "INCONCLUSIVE")],
)
def test_the_verdict_follows_the_speed(tmp_path: Path, on_us: int, verdict: str) -> None:
    summary = summary_of(tmp_path, step_us={"on": on_us, "off": 900, "pin": 1000}, noise=0.002)
    assert summary["verdict"] == verdict and summary["exit_code"] == Exit[verdict]


@pytest.mark.parametrize(("pss", "verdict"), [(300, "PASS"), (1200, "FAIL")])
def test_a_cost_can_be_the_primary_axis(tmp_path: Path, pss: int, verdict: str) -> None:
    summary = summary_of(tmp_path, primary="peak_pss", pss_mib={"on": pss, "off": 600, "pin": 900})
    assert summary["verdict"] == verdict


def test_one_block_has_a_ratio_and_no_verdict(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, performance=1, memory=1)
    axis = axes_of(summary)["total_throughput"]
    assert summary["verdict"] == "INCONCLUSIVE" and axis["ratio"] > 1 and axis["interval"] is None and axis["detectable"] is None
    assert summary["reasons"] == ["total_throughput: one block gives no interval"]


def withheld(summary: dict[str, Any], reason: str, pair: int = 0) -> None:
    """The numbers stand, the verdict does not, and the reason is said at the series, the pair and every axis."""
    assert reason in " | ".join(summary["pairs"][pair]["withheld"])
    for axis in axes_of(summary, pair).values():
        assert axis["verdict"] == "INCONCLUSIVE" and axis["qualifier"] is None and axis["ratio"] is not None
        assert reason in " | ".join(axis["reasons"])
    if pair == 0:
        assert (summary["verdict"], summary["exit_code"], summary["qualifier"]) == ("INCONCLUSIVE", 2, None)
        assert reason in " | ".join(summary["reasons"])


@pytest.mark.parametrize("role", ["eager", "older-release", "reduced-build"])
def test_only_the_pin_gives_a_verdict(tmp_path: Path, role: str) -> None:
    summary = summary_of(tmp_path, arms=(("on", "ours"), ("off", "ours"), ("pin", role)))
    withheld(summary, f"no verdict: {role}")
    withheld(summary, f"no verdict: {role}", pair=1)
    assert summary["pairs"][2]["withheld"] == [] and axes_of(summary, 2)["total_throughput"]["verdict"] == "PASS"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gate": None}, "the correctness gate did not run"),
        ({"planned_gate": False, "gate": None}, "the plan has no correctness gate"),
        ({"gate": {"ok": False, "passed": 3, "failures": [{"arm": "on", "request": 2, "position": 7, "expected": 1, "got": 2}]}},
         "passed 3 of 4 cases, 0 skipped; first: on request 2, position 7"),
        ({"gate": {"passed": 3, "skipped": 1}}, "passed 3 of 4 cases, 1 skipped"),
        ({"gate": {"skipped": 1}}, "passed 4 of 4 cases, 1 skipped"),
        ({"gate": {"failures": [{"arm": "off", "request": 0, "position": 1}]}}, "first: off request 0, position 1"),
        ({"gate": {"passed": 0, "cases": 0}}, "passed 0 of 0 cases"),
        ({"gate": {"ok": False}}, "passed 4 of 4"),
        ({"gate": {"on_off_identical": False}}, "tokens different from each other"),
        ({"gate": {"reference_sha256": "00" * 32}}, "another reference than planned"),
    ],
)
def test_without_a_passed_gate_there_is_no_verdict(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    summary = summary_of(tmp_path, **changes)
    for pair in range(3):
        withheld(summary, reason, pair)


def differ(wrong: Callable[[str, str, int], bool]) -> Callable[[str, str, int, Ids], Ids]:
    return lambda arm, phase, repetition, ids: [[i + wrong(arm, phase, repetition) for i in row] for row in ids]


@pytest.mark.parametrize(
    ("wrong", "legs"),
    [
        (lambda arm, phase, r: arm == "off", "memory-1-on against memory-1-off"),
        (lambda arm, phase, r: arm == "on" and phase == "performance" and r == 3, "memory-1-on against performance-3-on"),
        (lambda arm, phase, r: arm == "off" and phase == "memory" and r == 2, "memory-1-off against memory-2-off"),
    ],
)
def test_wrong_tokens_withhold_every_verdict(tmp_path: Path, wrong: Callable[[str, str, int], bool], legs: str) -> None:
    summary = summary_of(tmp_path, tokens=differ(wrong))
    for pair in range(3):
        withheld(summary, f"no verdict: wrong tokens: {legs} 0/8, first at request 0, position 0", pair)


def test_the_oracles_own_tokens_withhold_nothing(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, tokens=differ(lambda arm, phase, r: arm == "pin" and r > 1))
    assert summary["verdict"] == "PASS"
    assert any(row["kind"] == "self" and row["identical"] == 0 and not row["gated"] for row in summary["tokens"])


def test_one_altered_id_breaks_the_seal_and_resealed_it_withholds(tmp_path: Path) -> None:
    series = make_series(tmp_path / "series")
    alter_id(layout.leg_folder(series, "performance", 2, 1, "on"), request=4, position=6, value=9)
    with pytest.raises(BrokenSeal, match=r"performance-2/attempt-1/on/(outputs.json.gz|result.json): changed"):
        summarize_series(series)
    reseal(series)
    withheld(summarize_series(series), "memory-1-on against performance-2-on 7/8, first at request 4, position 6")


def test_ragged_outputs_are_an_error_and_no_mismatch(tmp_path: Path) -> None:
    """Total counts as planned, but one request short by an id that another has too many: nothing to compare position by position."""
    series = make_series(tmp_path / "series")
    leg = layout.leg_folder(series, "performance", 2, 1, "on")
    traces, outputs = protocol.read_traces(leg), protocol.read_outputs(leg)
    (t, _), *rest = traces[0].stamps
    traces[0] = dataclasses.replace(traces[0], stamps=((t, 2), *rest))
    traces[1] = dataclasses.replace(traces[1], stamps=traces[1].stamps[1:])
    outputs[0].append(outputs[1].pop())
    for name in (protocol.TRACES, protocol.OUTPUTS):
        (leg / name).unlink()
    files = {protocol.TRACES: protocol.write_traces(leg, traces), protocol.OUTPUTS: protocol.write_outputs(leg, outputs)}
    edit_json(leg / protocol.RESULT, lambda result: result.update(files=files))
    reseal(series)
    summary = summarize_series(series)
    assert summary["verdict"] == "ERROR"
    assert summary["reasons"][0].startswith("memory-1-on against performance-2-on: request 0: 8 ids against 9")


def test_two_clients_are_refused(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, clients={"pin": "async"})
    assert (summary["verdict"], summary["exit_code"]) == ("ERROR", 4)
    assert summary["reasons"] == ["refused: clients differ, on is step and pin is async; a ratio over two clients is none"]
    assert [bool(pair["refused"]) for pair in summary["pairs"]] == [True, True, False]
    assert summary["pairs"][0]["axes"] == {} and axes_of(summary, 2)["ttft_mean"]["ratio"] is not None


@pytest.mark.parametrize("dirty", [True, None])
def test_a_changed_tree_is_not_binding_and_keeps_its_verdict(tmp_path: Path, dirty: bool | None) -> None:
    summary = summary_of(tmp_path, dirty=dirty)
    assert (summary["verdict"], summary["binding"]) == ("PASS", False)


@pytest.mark.parametrize(
    ("statuses", "verdict", "reason"),
    [
        (["void", "void", "void"], "VOID", "performance-2: none of 3 attempts is ok, the last is void: planted void"),
        (["void", "failed", "failed"], "ERROR", "performance-2: none of 3 attempts is ok, the last is failed: planted failed"),
        (["hung"], "ERROR", "the last is hung"),
        (["interrupted"], "ERROR", "did not run to its end; go on with `--resume` | not run: performance-2"),
        ([], "ERROR", "not run: performance-2"),
        (["void", "interrupted"], "VOID", "the last is void"),
    ],
)
def test_a_block_that_never_was_decides_the_series(tmp_path: Path, statuses: list[str], verdict: str, reason: str) -> None:
    summary = summary_of(tmp_path, statuses={"performance-2": statuses})
    assert (summary["verdict"], summary["exit_code"], summary["qualifier"]) == (verdict, Exit[verdict], None)
    assert reason in " | ".join(summary["reasons"])
    assert len(axes_of(summary)["total_throughput"]["per_block"]) == 2
    assert axes_of(summary)["total_throughput"]["verdict"] == "INCONCLUSIVE"


def test_error_wins_over_void(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, statuses={"performance-1": ["void"], "memory-2": ["failed"]})
    assert summary["verdict"] == "ERROR" and len(summary["reasons"]) == 2


@pytest.mark.parametrize("phase", ["correctness", "warmup"])
@pytest.mark.parametrize(("status", "verdict"), [("void", "VOID"), ("hung", "ERROR")])
def test_what_comes_before_the_blocks_must_have_run(tmp_path: Path, phase: str, status: str, verdict: str) -> None:
    summary = summary_of(tmp_path, statuses={phase: [status] * 3})
    assert summary["verdict"] == verdict and f"{phase}: none of 3 attempts is ok, the last is {status}" in summary["reasons"][0]


def test_a_gate_that_failed_before_any_timing_voids(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, performance=1, memory=0, statuses={"performance-1": [], "warmup": []}, gate={"ok": False, "passed": 3})
    assert (summary["verdict"], summary["exit_code"]) == ("VOID", 3)
    assert summary["reasons"][0].startswith("no timing on wrong tokens: the correctness gate passed 3 of 4 cases")


def test_a_repeated_block_counts_once_and_is_shown(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, statuses={"performance-2": ["void", "failed", "ok"]})
    assert summary["verdict"] == "PASS" and len(axes_of(summary)["total_throughput"]["per_block"]) == 3
    tried = [(a["attempt"], a["status"]) for a in summary["attempts"] if (a["phase"], a["repetition"]) == ("performance", 2)]
    assert tried == [(1, "void"), (2, "failed"), (3, "ok")]


def test_a_series_that_measured_nothing_is_an_error(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, performance=1, memory=0, statuses={"performance-1": ["failed", "failed", "failed"]})
    assert summary["verdict"] == "ERROR" and summary["pairs"][0]["axes"] == {}
    assert summary["arms"]["on"]["means"]["total_throughput"] is None


def test_a_phase_without_repetitions_voids_its_axes_only(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, memory=0)
    assert summary["verdict"] == "PASS"
    assert (axes_of(summary)["peak_pss"]["verdict"], axes_of(summary)["peak_pss"]["ratio"]) == ("VOID", None)
    assert summary_of(tmp_path / "b", memory=0, primary="peak_pss")["verdict"] == "VOID"


def edit_stream(series: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]], repetition: int = 2) -> None:
    path = layout.leg_folder(series, "memory", repetition, 1, "on") / layout.MEMORY
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    path.write_bytes(protocol.to_gzip("".join(json.dumps(row) + "\n" for row in change(rows)).encode()))
    reseal(series)


@pytest.mark.parametrize(
    ("change", "void"),
    [
        (lambda rows: [{**row, "partial": True} for row in rows], {"peak_pss", "stable_pss"}),
        (lambda rows: [row for row in rows if row["kind"] != "pss"], {"peak_pss", "stable_pss"}),
        (lambda rows: rows[:-1], {"peak_pss", "stable_pss"}),
        (lambda rows: [json.loads(json.dumps(row).replace('"hwm": ', '"hwm": 9')) for row in rows], {"peak_pss"}),
    ],
)
def test_memory_that_was_not_read_voids_its_axis(tmp_path: Path, change: Callable[[Any], Any], void: set[str]) -> None:
    """All passes partial; no PSS pass; a stream without its end; a peak that the sampler missed."""
    series = make_series(tmp_path / "series", primary="peak_pss")
    edit_stream(series, change)
    summary = summarize_series(series)
    assert {axis for axis, row in axes_of(summary).items() if row["verdict"] == "VOID"} == void
    assert (summary["verdict"], summary["exit_code"]) == ("VOID", 3)
    assert summary["reasons"] == ["peak_pss: unreadable in block 2"]
    assert axes_of(summary)["peak_pss"]["ratio"] is None and axes_of(summary)["peak_pss"]["per_block"][1] is None


@pytest.mark.parametrize(
    ("file", "change", "reason"),
    [
        (layout.LEG, lambda leg: leg.update(role="eager"), "performance-2-pin: field `role` differs"),
        (layout.LEG, lambda leg: leg.update(code_sha256="00" * 32), "performance-2-pin: field `code_sha256` differs"),
        (protocol.RESULT, lambda result: result["who"].update(version="0.31.0"), "performance-2-pin: field `who` differs"),
        (protocol.RESULT, lambda result: result["resolved"].update(depth=2), "performance-2-pin: field `resolved` differs"),
    ],
)
def test_an_arm_that_changed_within_the_series_is_an_error(tmp_path: Path, file: str, change: Callable[[Any], Any], reason: str) -> None:
    series = make_series(tmp_path / "series")
    edit_json(layout.leg_folder(series, "performance", 2, 1, "pin") / file, change)
    reseal(series)
    summary = summarize_series(series)
    assert summary["verdict"] == "ERROR" and reason in " | ".join(summary["reasons"])


def test_our_arms_must_run_one_code(tmp_path: Path) -> None:
    series = make_series(tmp_path / "series")
    for leg in series.glob("blocks/*/*/off/leg.json"):
        edit_json(leg, lambda record: record.update(code_sha256="00" * 32))
    reseal(series)
    summary = summarize_series(series)
    assert summary["verdict"] == "ERROR" and "our arms ran different code" in summary["reasons"][0]


def test_throughputs_that_disagree_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No evidence can bring this about past the exact counts; it guards the arithmetic, so the arithmetic is bent here."""
    from harness.analysis import summary as module

    def rounded(traces: Any) -> Any:
        found = leg_metrics(traces)
        return dataclasses.replace(found, request_throughput=round(found.request_throughput, 2))

    monkeypatch.setattr(module, "leg_metrics", rounded)
    summary = summary_of(tmp_path)
    assert summary["verdict"] == "ERROR" and "must agree to 1e-09" in summary["reasons"][0]


def test_unequal_occupancy_is_pointed_out(tmp_path: Path) -> None:
    assert summary_of(tmp_path / "a")["occupancy_warnings"] == []
    summary = summary_of(tmp_path / "b", together=("on", "off"))
    assert [warning.split(":")[0] for warning in summary["occupancy_warnings"]] == ["on/pin", "off/pin"]
    full = {arm: summary["arms"][arm]["performance"][0]["occupancy"] for arm in ("on", "pin")}
    assert full["on"]["mean_in_flight"] > 3.99 and full["on"]["drain"] < 0.001
    assert full["pin"]["mean_in_flight"] < 3.8 and full["pin"]["drain"] > 0.1


def test_equal_evidence_gives_an_equal_summary(tmp_path: Path) -> None:
    assert summary_of(tmp_path / "a") == summary_of(tmp_path / "b")


def test_an_unknown_axis_is_named(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match=r"plan.json: field `verdict.primary` is 'vibes'"):
        summary_of(tmp_path, primary="vibes")


def test_an_unsealed_series_is_not_summarized(tmp_path: Path) -> None:
    with pytest.raises(BrokenSeal, match="not sealed"):
        summary_of(tmp_path, sealed=False)
