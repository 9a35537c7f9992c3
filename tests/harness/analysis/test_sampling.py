"""What stands beside a peak: by hand, and that an unread value is never a number."""

from __future__ import annotations

from typing import Any

import pytest

from harness.analysis.sampling import sampling

S = 10**9


def row(kind: str, at: float, cost: float, gap: float | None, partial: bool = False, **extra: Any) -> dict[str, Any]:
    return {"kind": kind, "t_ns": round(at * S), "cost_s": cost, "gap_s": gap, "partial": partial, "processes": [{"pid": 1}], **extra}


ROWS = [
    row("rss", 0.0, 0.001, None), row("pss", 0.1, 0.010, None), row("rss", 0.2, 0.001, 0.2), row("pss", 0.3, 0.030, 0.2),
    row("pss", 0.9, 0.020, 0.6), row("pss", 1.0, 0.020, 0.1), {"kind": "end", "t_ns": 2 * S, "reason": "root ended", "period_s": 0.2},
]


def test_by_hand() -> None:
    found = sampling(ROWS)
    assert found["period_s"] == 0.2 and found["interval_s"] == pytest.approx(0.2)
    assert found["mean_cost_s"] == pytest.approx(0.020) and found["max_cost_s"] == 0.030
    assert found["cost_share"] == pytest.approx(0.082 / 1.0)


def test_what_the_stream_does_not_tell_is_null() -> None:
    assert (sampling(ROWS)["available_min"], sampling(ROWS)["gpu_peak"]) == (None, None)
    assert sampling(ROWS[:-1])["period_s"] is None
    assert set(sampling([]).values()) == {None}


def test_peak_of_a_control_group_of_its_own() -> None:
    groups = [None, {"current": 1, "peak": None}, {"current": 5, "peak": 9}, {"current": 2, "peak": 8}]
    assert sampling([row("pss", 0.1, 0.01, None, cgroup=group) for group in groups])["cgroup_peak"] == 9
    assert sampling([row("pss", 0.1, 0.01, None, cgroup=group) for group in groups[:2]])["cgroup_peak"] is None


def test_available_memory_is_the_lowest_and_null_when_one_row_left_it_unread() -> None:
    told = [{**entry, "mem_available": 5000 - number} for number, entry in enumerate(ROWS[:-1])]
    assert sampling(told)["available_min"] == 4995
    assert sampling([*told, row("pss", 1.1, 0.01, 0.1, mem_available=None)])["available_min"] is None


def test_gpu_bytes_are_summed_over_the_tree_and_null_when_one_process_was_unread() -> None:
    passes = [row("pss", 0.1, 0.01, None, processes=[{"gpu": 3}, {"gpu": 4}]), row("pss", 0.2, 0.01, 0.1, processes=[{"gpu": 5}]),
              row("pss", 0.3, 0.01, 0.1, partial=True, processes=[{"gpu": 900}])]
    assert sampling(passes)["gpu_peak"] == 7
    assert sampling([row("pss", 0.1, 0.01, None, processes=[{"gpu": 0}])])["gpu_peak"] is None, "nothing was ever seen"
    assert sampling([*passes, row("pss", 0.4, 0.01, 0.1, processes=[{"gpu": None}, {"gpu": 1}])])["gpu_peak"] is None
    assert sampling([*passes, row("pss", 0.4, 0.01, 0.1, processes=[{"pid": 2}])])["gpu_peak"] is None
