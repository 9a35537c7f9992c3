"""One changed id is found and named; what cannot be compared is an error, never a match."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.analysis.tokens import Divergence, TokensError, diff_dirs, diff_series, diff_tokens
from harness.evidence import layout
from harness.evidence.store import BrokenSeal
from tests.harness.series_factory import alter_id, make_series, reseal

outputs = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), min_size=1, max_size=6)


@given(outputs)
def test_a_file_agrees_with_itself(ids: list[list[int]]) -> None:
    found = diff_tokens(ids, ids)
    assert found.same and (found.identical, found.of, found.divergences) == (len(ids), len(ids), ())


@given(outputs, st.data())
def test_one_changed_id_is_named(ids: list[list[int]], data: st.DataObject) -> None:
    request = data.draw(st.integers(0, len(ids) - 1))
    position = data.draw(st.integers(0, len(ids[request]) - 1))
    other = [list(row) for row in ids]
    other[request][position] += 1
    found = diff_tokens(ids, other)
    assert (found.identical, found.of) == (len(ids) - 1, len(ids)) and not found.same
    assert found.divergences == (Divergence(request=request, position=position, a=ids[request][position], b=ids[request][position] + 1),)


def test_only_the_first_divergence_of_a_request_is_told() -> None:
    found = diff_tokens([[1, 2, 3], [4, 5, 6]], [[1, 9, 9], [4, 5, 6]])
    assert found.divergences == (Divergence(request=0, position=1, a=2, b=9),)


@pytest.mark.parametrize(
    ("a", "b", "names"),
    [
        ([], [], "0 requests"), ([[1]], [[1], [2]], "1 requests against 2"), ([[1, 2]], [[1]], "request 0: 2 ids against 1"),
        ([[1], [1, 2]], [[1], [1, 2, 3]], "request 1: 2 ids against 3"), ([[]], [[]], "request 0: 0 ids"),
    ],
)
def test_ragged_or_short_lists_are_errors(a: list[list[int]], b: list[list[int]], names: str) -> None:
    with pytest.raises(TokensError, match=names):
        diff_tokens(a, b)


@pytest.fixture
def series(tmp_path: Path) -> Path:
    return make_series(tmp_path / "series", performance=2, memory=1)


def test_a_series_agrees_with_itself(series: Path) -> None:
    found = diff_series(series)
    assert found["identical"] is True
    assert {d["kind"] for d in found["diffs"]} == {"self", "ours", "pin"}
    assert all("8/8" in line for line in found["lines"])


def test_one_altered_id_is_named_by_leg_request_and_position(series: Path) -> None:
    leg = layout.leg_folder(series, "performance", 2, 1, "off")
    alter_id(leg, request=5, position=3, value=31_337)
    with pytest.raises(BrokenSeal, match="performance-2/attempt-1/off"):
        diff_series(series)
    reseal(series)
    found = diff_series(series)
    assert found["identical"] is False
    assert "memory-1-off against performance-2-off: 7/8 outputs identical" in found["lines"]
    assert "  request 5, position 3: 504 against 31337" in found["lines"]


def test_our_arms_must_agree_with_each_other(tmp_path: Path) -> None:
    def tokens(arm: str, phase: str, repetition: int, ids: list[list[int]]) -> list[list[int]]:
        return [[i + (arm == "off") for i in row] for row in ids]

    found = diff_series(make_series(tmp_path / "s", tokens=tokens))
    assert found["identical"] is False
    bad = [d for d in found["diffs"] if d["gated"] and d["diff"]["identical"] < d["diff"]["of"]]
    assert [(d["kind"], d["a"], d["b"]) for d in bad] == [("ours", "memory-1-on", "memory-1-off")]


def test_the_other_engines_disagreements_are_reported_and_not_gated(tmp_path: Path) -> None:
    def tokens(arm: str, phase: str, repetition: int, ids: list[list[int]]) -> list[list[int]]:
        return [[i + (arm == "pin") * repetition for i in row] for row in ids]

    found = diff_series(make_series(tmp_path / "s", tokens=tokens))
    assert found["identical"] is True
    assert "memory-1-pin against memory-2-pin: 0/8 outputs identical (reported, not gated)" in found["lines"]


def test_a_series_of_the_other_engine_alone_is_compared_in_full(tmp_path: Path) -> None:
    def tokens(arm: str, phase: str, repetition: int, ids: list[list[int]]) -> list[list[int]]:
        return [[i + repetition for i in row] for row in ids]

    changes = {"arms": (("a", "pin"), ("b", "pin")), "pairs": (("a", "b"),), "step_us": {"a": 9, "b": 9}, "pss_mib": {"a": 9, "b": 9},
               "planned_gate": False, "gate": None}
    assert diff_series(make_series(tmp_path / "s", tokens=tokens, **changes))["identical"] is False
    assert diff_series(make_series(tmp_path / "t", **changes))["identical"] is True


def test_two_series_are_compared_leg_by_leg(series: Path, tmp_path: Path) -> None:
    other = make_series(tmp_path / "other", performance=2, memory=1, seed=9)
    assert diff_dirs(series, other)["identical"] is True
    alter_id(layout.leg_folder(other, "performance", 1, 1, "on"), request=0, position=7, value=1)
    reseal(other)
    found = diff_dirs(series, other)
    assert found["identical"] is False
    assert [line for line in found["lines"] if "position" in line] == ["  request 0, position 7: 8 against 1"]


def test_series_of_other_work_or_other_legs_are_not_compared(series: Path, tmp_path: Path) -> None:
    with pytest.raises(TokensError, match=r"workload.requests: 8 in series, 9 in work"):
        diff_dirs(series, make_series(tmp_path / "work", requests=9, performance=2, memory=1))
    with pytest.raises(TokensError, match=r"performance-3-off, performance-3-on, performance-3-pin"):
        diff_dirs(series, make_series(tmp_path / "more", performance=3, memory=1))


def test_a_missing_series_is_named(tmp_path: Path) -> None:
    with pytest.raises(BrokenSeal, match="nowhere"):
        diff_series(tmp_path / "nowhere")
