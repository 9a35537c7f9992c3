"""Each case of a calibration is as expected on the evidence of its fault, and not on the evidence of a healthy or a blind instrument."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.analysis import calibration
from harness.analysis.calibration import SERIES, Evidence, Unfit, held_intervals, injected_shares, judge_calibration, slowdowns
from harness.evidence.schema import EvidenceError
from harness.report.build import load_summary
from tests.harness.calibration_factory import BUSY, make_calibration, make_one


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Evidence]:
    folder = make_calibration(tmp_path_factory.mktemp("calibration"))
    return {name: Evidence(*load_summary(folder / name)) for name in SERIES}


@pytest.fixture
def evidence(made: dict[str, Evidence]) -> dict[str, Evidence]:
    return copy.deepcopy(made)


def case(record: dict[str, Any], name: str) -> dict[str, Any]:
    return next(dict(row) for row in record["cases"] if row["case"] == name)


def remade(folder: Path, name: str, **changes: Any) -> Evidence:
    return Evidence(*load_summary(make_one(name, folder / name, **changes)))


def test_every_fault_gets_exactly_its_verdict(made: dict[str, Evidence]) -> None:
    record = judge_calibration(made)
    got = {row["case"]: (row["got"], row["ok"]) for row in record["cases"]}
    assert got == {
        "A/A": ("PASS", True), "busy wait, 1 %": ("PASS, seen", True), "busy wait, 3 %": ("FAIL, seen", True),
        "busy wait, 10 %": ("FAIL, seen", True), "intervals of 3 blocks": (got["intervals of 3 blocks"][0], True),
        "tail stall": ("FAIL on ITL p99, PASS on throughput", True), "leak": ("FAIL on peak PSS", True),
        "wrong token": ("INCONCLUSIVE", True), "doubled count": ("ERROR", True), "killed arm": ("ERROR", True),
        "foreign process": ("VOID", True),
    }
    assert record["ok"] and record["coverage"]["n"] == 48 and record["blocks"] == 10
    assert record["detectable"] == pytest.approx(made["times"].summary["pairs"][0]["axes"]["total_throughput"]["detectable"])
    assert record["series"] == {name: one.series.head for name, one in made.items()}


def test_true_sizes_are_what_the_arm_counted(evidence: dict[str, Evidence]) -> None:
    found = {one.arm: one for one in slowdowns(evidence["times"])}
    for arm, share in BUSY.items():
        assert (found[arm].asked, found[arm].true) == (share, pytest.approx(share, rel=1e-3))
        assert found[arm].measured == pytest.approx(share, abs=0.003) and found[arm].seen
    legs = [leg for leg in evidence["times"].series.legs("slow10") if leg.result]
    for leg in legs:
        assert leg.result is not None
        leg.result["counters"]["injected_ns"] *= 2
    assert {one.arm: one.true for one in slowdowns(evidence["times"])}["slow10"] == pytest.approx(0.2, rel=1e-3)


@pytest.mark.parametrize("value", [None, "gone"])
def test_an_unreadable_truth_is_no_truth(evidence: dict[str, Evidence], value: str | None) -> None:
    counters = evidence["times"].series.legs("slow3")[4].result["counters"]  # type: ignore[index]
    counters["injected_ns"] = None
    if value == "gone":
        del counters["injected_ns"]
    with pytest.raises(Unfit, match=r"performance-5-slow3: field `counters.injected_ns` is None"):
        injected_shares(evidence["times"].series, "slow3")
    record = judge_calibration(evidence)
    assert not record["ok"] and (record["detectable"], record["slowdowns"], record["coverage"]) == (None, [], None)


def test_a_fault_that_did_not_fire_shows_nothing(tmp_path: Path, evidence: dict[str, Evidence]) -> None:
    """A 1 % wait that never was passes the margin, as it should have; it is not as expected all the same."""
    evidence["times"] = remade(tmp_path, "times", injected={**BUSY, "slow1": 0.0})
    row = case(judge_calibration(evidence), "busy wait, 1 %")
    assert row["got"].startswith("PASS") and not row["ok"]


def test_an_instrument_that_is_blind_or_sees_ghosts_is_not_as_expected(tmp_path: Path, evidence: dict[str, Evidence]) -> None:
    steps = dict.fromkeys(["a", *BUSY, "b"], 1000)
    evidence["times"] = remade(tmp_path / "blind", "times", step_us=steps)
    record = judge_calibration(evidence)
    wrong = [row["case"] for row in record["cases"] if not row["ok"]]
    assert wrong == ["busy wait, 3 %", "busy wait, 10 %", "intervals of 3 blocks"], "1 % is inside the margin, seen or not"
    assert [one["seen"] for one in record["slowdowns"]] == [False] * 3
    for ghost in (900, 1100):
        evidence["times"] = remade(tmp_path / str(ghost), "times", step_us={**steps, "b": ghost})
        assert (case(judge_calibration(evidence), "A/A")["got"], case(judge_calibration(evidence), "A/A")["ok"]) == ("FAIL", False)


def test_a_noisy_instrument_must_still_see_ten_per_cent(tmp_path: Path, evidence: dict[str, Evidence]) -> None:
    evidence["times"] = remade(tmp_path, "times", noise=0.25, seed=4)
    record = judge_calibration(evidence)
    assert record["detectable"] > 0.05
    assert case(record, "busy wait, 3 %")["expected"] == "FAIL or INCONCLUSIVE"
    assert case(record, "busy wait, 10 %")["expected"] == "FAIL" and not record["ok"]


def test_coverage_needs_forty_intervals_that_hold_the_truth(tmp_path: Path, evidence: dict[str, Evidence]) -> None:
    assert held_intervals(evidence["times"]).n == 3 * 2 * 8, "three slowed arms, two healthy ones, windows of three in ten blocks"
    evidence["times"] = remade(tmp_path / "few", "times", performance=8)
    row = case(judge_calibration(evidence), "intervals of 3 blocks")
    assert row["got"].endswith("of 36") and not row["ok"]
    evidence["times"] = remade(tmp_path / "off", "times", injected={arm: share + 0.04 for arm, share in BUSY.items()})
    found = held_intervals(evidence["times"])
    assert found.value < 0.85 and not case(judge_calibration(evidence), "intervals of 3 blocks")["ok"]


def test_coverage_is_nominal_when_noise_is(monkeypatch: pytest.MonkeyPatch, evidence: dict[str, Evidence]) -> None:
    """Normal noise of any size, truths that differ block by block: 95 % of the windows' intervals hold them."""
    rng = np.random.default_rng(7)
    shares = {arm: list(share * (1 + 0.1 * rng.random(4000))) for arm, share in BUSY.items()}
    logs = {arm: np.log1p([-one for one in shares.get(arm, [0.0] * 4000)]) + rng.normal(0, 0.02, 4000) for arm in ("a", "b", *BUSY)}
    axis = calibration.compare_arms(evidence["times"], "total_throughput", "b", "a")
    monkeypatch.setattr(calibration, "injected_shares", lambda series, arm: shares[arm])
    monkeypatch.setattr(calibration, "compare_arms", lambda one, name, ours, base: dataclasses.replace(
        axis, per_block=tuple(np.exp(logs[ours] - logs[base]))))
    assert held_intervals(evidence["times"]).value == pytest.approx(0.95, abs=0.02)


def test_the_truth_of_an_interval_is_the_mean_of_its_own_blocks(monkeypatch: pytest.MonkeyPatch, evidence: dict[str, Evidence]) -> None:
    """An interval of three blocks is so wide that no share of coverage would tell another block's truth from theirs."""
    asked: list[float] = []
    shares = {arm: [share * (1 + 0.1 * block) for block in range(10)] for arm, share in BUSY.items()}
    monkeypatch.setattr(calibration, "injected_shares", lambda series, arm: shares[arm])
    monkeypatch.setattr(calibration, "coverage", lambda intervals, truths: asked.extend(truths))
    held_intervals(evidence["times"])
    means = {arm: [float(np.log1p([-one for one in of[at: at + 3]]).mean()) for at in range(8)] for arm, of in shares.items()}
    assert asked == pytest.approx([one for arm in BUSY for _ in ("a", "b") for one in means[arm]])


def test_a_stall_that_shows_nowhere_or_in_the_mean_is_not_as_expected(tmp_path: Path, evidence: dict[str, Evidence]) -> None:
    evidence["tail"] = remade(tmp_path / "none", "tail", stalls={})
    assert not case(judge_calibration(evidence), "tail stall")["ok"]
    evidence["tail"] = remade(tmp_path / "mean", "tail", step_us={"tail": 1100, "a": 1000})
    row = case(judge_calibration(evidence), "tail stall")
    assert row["got"] == "FAIL on ITL p99, FAIL on throughput" and not row["ok"]
    evidence["tail"] = remade(tmp_path / "unfired", "tail", injected={"tail": 0.0})
    assert not case(judge_calibration(evidence), "tail stall")["ok"]


def test_too_few_samples_have_no_percentile(tmp_path: Path, evidence: dict[str, Evidence]) -> None:
    evidence["tail"] = remade(tmp_path, "tail", max_tokens=32)
    row = case(judge_calibration(evidence), "tail")
    assert "itl_p99: unreadable in block 1, 2, 3, 4" in row["got"] and not row["ok"]


def test_a_leak_that_is_not_seen_is_not_as_expected(tmp_path: Path, evidence: dict[str, Evidence]) -> None:
    assert "peak PSS +38" in case(judge_calibration(evidence), "leak")["measured"], "1.5 times the stable 256 MiB, as the recipe climbs"
    evidence["leak"] = remade(tmp_path, "leak", pss_mib={"leak": 900, "a": 900})
    assert not case(judge_calibration(evidence), "leak")["ok"]


@pytest.mark.parametrize(("series", "name", "changes"), [
    ("token", "wrong token", {"tokens": None}),
    ("count", "doubled count", {"reasons": "output_tokens: result.json counted 65, the plan says 64"}),
    ("killed", "killed arm", {"reasons": "the arm exited with 1"}),
    ("foreign", "foreign process", {"reasons": "foreign cpu: pid 9 (cron: cron)"}),
    ("foreign", "foreign process", {"reasons": "steal: the hypervisor (parity-company: )"}),
    ("count", "doubled count", {"statuses": {"performance-1": ["void"] * 3}}), ("killed", "killed arm", {"statuses": {}}),
    ("foreign", "foreign process", {"statuses": {}}), ("foreign", "foreign process", {"statuses": {"performance-1": ["failed"] * 3}}),
])
def test_another_reason_or_verdict_is_not_as_expected(
    tmp_path: Path, evidence: dict[str, Evidence], series: str, name: str, changes: dict[str, Any]
) -> None:
    assert case(judge_calibration(evidence), name)["ok"]
    evidence[series] = remade(tmp_path, series, **changes)
    record = judge_calibration(evidence)
    assert not case(record, name)["ok"] and not record["ok"]


@pytest.mark.parametrize(("changes", "said"), [
    ({"statuses": {"performance-2": ["void"] * 3}}, "the last is void: planted void"), ({"gate": {"passed": 3}}, "passed 3 of 4 cases"),
    ({"performance": 1}, "one block gives no interval"),
    ({"tokens": lambda arm, phase, r, outputs: [[1] * 8] * len(outputs) if arm == "slow1" and r == 2 else outputs}, "wrong tokens"),
])
def test_a_series_without_numbers_is_not_as_expected(
    tmp_path: Path, evidence: dict[str, Evidence], changes: dict[str, Any], said: str
) -> None:
    evidence["times"] = remade(tmp_path, "times", **changes)
    record = judge_calibration(evidence)
    assert not record["ok"] and record["detectable"] is None and said in case(record, "slowdowns")["got"]


def test_contention_leaves_nothing_to_judge(evidence: dict[str, Evidence]) -> None:
    evidence["times"].summary["contention"]["contended"] = True
    assert judge_calibration(evidence)["detectable"] is None


def test_two_machines_are_refused(evidence: dict[str, Evidence]) -> None:
    evidence["leak"].series.record["machine"]["host"] = "another"
    with pytest.raises(EvidenceError, match="different machines"):
        judge_calibration(evidence)
