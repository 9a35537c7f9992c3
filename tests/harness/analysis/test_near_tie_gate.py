"""What a near-tie record does to a series: it judges where no reference is, voids what is wrong, and excuses nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.analysis.gates import NOT_JUDGED
from harness.analysis.summary import summarize
from harness.evidence.schema import load_series
from tests.harness.analysis.test_near_tie import row
from tests.harness.series_factory import Outputs, make_series

WRONG = {"label": "wrong", "request": 2, "position": 1, "ours": 3, "oracle": 49, "gap": 4e-5, "worst_gap": 4e-5, "worst_position": 1}


def record(**arm: Any) -> dict[str, Any]:
    """A record of 8 requests, one of them a near-tie; `arm` changes what it says of ours."""
    ours = {"legs": ["memory-1-on"], "of": 8, "identical": 7, "near_ties": 1, "wrong": 0}
    return {"head": "ab" * 32, "band": 3e-5, "arms": [ours | {"requests": [row("identical"), row("near-tie")]} | arm]}


def judged(path: Path, found: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
    return summarize(load_series(make_series(path / "series", **changes)), found)


NO_GATE = {"planned_gate": False, "gate": None}


def test_without_a_reference_a_verdict_waits_for_the_record(tmp_path: Path) -> None:
    summary = judged(tmp_path, None, **NO_GATE)
    assert (summary["verdict"], summary["exit_code"], summary["near_tie"]) == ("INCONCLUSIVE", 2, None)
    assert summary["reasons"] == [f"no verdict: {NOT_JUDGED}"]
    assert summary["pairs"][0]["axes"]["total_throughput"]["ratio"] is not None, "shown, not judged"


def test_a_healthy_record_judges_where_no_reference_is(tmp_path: Path) -> None:
    summary = judged(tmp_path, record(), **NO_GATE)
    assert (summary["verdict"], summary["qualifier"]) == ("PASS", "FASTER")
    assert [row["label"] for row in summary["near_tie"]["arms"][0]["requests"]] == ["near-tie"]


@pytest.mark.parametrize("changes", [NO_GATE, {}], ids=["no gate", "gate passed"])
def test_what_is_wrong_voids_whatever_else_passed(tmp_path: Path, changes: dict[str, Any]) -> None:
    found = record(identical=7, near_ties=0, wrong=1, requests=[row("identical"), WRONG])
    summary = judged(tmp_path, found, **changes)
    assert (summary["verdict"], summary["exit_code"]) == ("VOID", 3)
    assert summary["reasons"] == ["near-tie: 1 of 8 outputs of memory-1-on are wrong by the oracle's own band (3e-05 nats), first request "
                                  "2, position 1: 3 for 49, gap 4e-05, worst gap 4e-05 at position 1"]
    assert {axis["verdict"] for pair in summary["pairs"] for axis in pair["axes"].values()} == {"INCONCLUSIVE"}


@pytest.mark.parametrize(("arm", "phase", "repetition"), [("off", "memory", 1), ("off", "performance", 3), ("on", "performance", 2)])
def test_our_arms_must_still_agree_with_each_other_in_every_repetition(tmp_path: Path, arm: str, phase: str, repetition: int) -> None:
    """A record excuses a difference from the oracle, never one between ours."""
    def other(name: str, of: str, number: int, outputs: Outputs) -> Outputs:
        return [[9, *outputs[0][1:]], *outputs[1:]] if (name, of, number) == (arm, phase, repetition) else outputs

    summary = judged(tmp_path, record(), tokens=other, **NO_GATE)
    assert summary["verdict"] == "INCONCLUSIVE" and any("wrong tokens" in reason for reason in summary["reasons"])


def test_a_planned_gate_is_not_replaced(tmp_path: Path) -> None:
    summary = judged(tmp_path, record(), gate={"ok": False, "passed": 3})
    assert summary["verdict"] == "INCONCLUSIVE" and "the correctness gate passed 3 of 4 cases" in summary["reasons"][0]


def test_a_plan_without_an_oracle_has_nobody_to_ask(tmp_path: Path) -> None:
    summary = judged(tmp_path, None, arms=(("on", "ours"), ("off", "ours")), pairs=(("on", "off"),), **NO_GATE)
    assert summary["pairs"][0]["withheld"][-1] == "no verdict: the plan has no correctness gate"
