"""The planted faults of the engine against the real oracle on the real model: its own band calls every one of them wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.machine.lock import SeriesLock
from tools.bench.near_tie_faults import QUICK, ROOT, faults_of, judge_faults

pytestmark = [pytest.mark.oracle, pytest.mark.slow]


@pytest.mark.timeout(600)
def test_the_band_calls_planted_faults_wrong_and_the_healthy_engine_right(tmp_path: Path) -> None:
    folder = tmp_path / "record"
    folder.mkdir()
    with SeriesLock(tmp_path / "lock", "test") as lock:
        lock.acquire(0)
        record = judge_faults(ROOT, folder, ROOT / QUICK, requests=4, ids=16, dtype=None, lock=lock)
    assert record["missed"] == []
    assert 0 < record["band"] < 0.01, "the band comes from float32's own jitter, and is not so wide that anything passes"
    assert {arm["legs"][0] for arm in record["arms"]} == {"healthy", *(fault.__name__ for fault in faults_of("cpu", "float32"))}
    assert record["arms"][0]["near_ties"] + record["arms"][0]["identical"] == 4
