"""What the program of planted near-tie faults says of a judgement; serving and scoring are in tests/e2e/test_near_tie_faults.py."""

from __future__ import annotations

from typing import Any

import pytest

from tools.bench.near_tie_faults import HEALTHY, failures, faults_of


def judged(**wrong: int) -> dict[str, Any]:
    return {"arms": [{"legs": [name], "wrong": count} for name, count in wrong.items()]}


@pytest.mark.parametrize(("wrong", "missed"), [
    ({HEALTHY: 0, "swapped": 1, "stale": 16}, []),
    ({HEALTHY: 0, "swapped": 0, "stale": 16}, ["swapped: no output is called wrong"]),
    ({HEALTHY: 0, "stale": 16}, ["swapped: no output is called wrong"]),
    ({HEALTHY: 2, "swapped": 1, "stale": 1}, ["healthy: 2 outputs are called wrong"]),
], ids=["all caught", "one missed", "one not served", "healthy wrong"])
def test_every_fault_must_be_called_wrong_and_the_healthy_engine_not(wrong: dict[str, int], missed: list[str]) -> None:
    assert failures(judged(**wrong), ["swapped", "stale"]) == missed


def test_faults_of_float32_kernels_are_planted_only_where_these_run() -> None:
    both, bfloat16, card = (
        {fault.__name__ for fault in faults_of(*where)} for where in (("cpu", "float32"), ("cpu", "bfloat16"), ("cuda", "bfloat16")))
    assert bfloat16 == card == {name for name in both if not name.startswith("reach_")} and len(card) == 7
