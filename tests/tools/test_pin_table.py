"""The table is derived from stamps alone, names the fastest, and refuses records that do not belong together."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from legs.protocol import sha256, to_gzip, to_json
from tools.bench.pin_configs import NAMES, RAW_PREFIX, parse
from tools.bench.pin_table import derive, fastest, page, pass_row, same_at_commit

MS = 1_000_000


def traces(step_ms: int, requests: int = 16, outputs: int = 10) -> list[dict[str, Any]]:
    """Requests submitted together; the first id after 100 ms, then one every `step_ms`."""
    stamps = [[(100 + step_ms * n) * MS, 1] for n in range(outputs)]
    same = {"prompt_tokens": 100, "scheduled_ns": 0, "submitted_ns": 0, "stamps": stamps, "end_ns": stamps[-1][0], "finish": "length"}
    return [{"index": index, **same} for index in range(requests)]


def record(folder: Path, name: str, step_ms: int | None, commit: str = "c") -> None:
    passes = [] if step_ms is None else [{"traces": traces(step_ms), "iterations": None, "outputs_sha256": "0"}] * 3
    rest = {"ready_s": 5.0} if passes else {"error": "exit status 1"}
    raw = {"commit": commit, "code_sha256": {"a": "b"}, "name": name, "passes": passes, **rest}
    (folder / f"{RAW_PREFIX}{name}.json.gz").write_bytes(to_gzip(to_json(raw)))


def test_a_pass_by_hand() -> None:
    row = pass_row({"traces": traces(10), "iterations": {"count": 11}, "outputs_sha256": "x"})
    assert row["total_tok_s"] == pytest.approx(16 * 110 / 0.190)
    assert (row["mean_ttft_ms"], row["mean_tpot_ms"], row["itl_p50_ms"], row["itl_p95_ms"]) == pytest.approx((100, 10, 10, 10))
    assert (row["steps"], row["steps_told"]) == (10, 11)


def test_the_fastest_and_what_is_missing(tmp_path: Path) -> None:
    record(tmp_path, "sync-process", 8)
    record(tmp_path, "async-process", 9)
    record(tmp_path, "async-inprocess", None)
    table = derive(tmp_path)
    assert table["fastest"] == "sync-process"
    assert set(table["not_run"]) == set(NAMES) - {"sync-process", "async-process", "async-inprocess"}
    text = page(table)
    assert "sync-process **fastest**" in text and "failed: exit status 1" in text and text.count("**fastest**") == 1


def test_overlapping_passes_are_told_and_one_alone_is_not_the_fastest() -> None:
    def row(name: str, *rates: float) -> dict[str, Any]:
        median = sorted(rates)[len(rates) // 2] if rates else None
        return {"name": name, "median_tok_s": median, "passes": [{"total_tok_s": rate} for rate in rates]}

    assert fastest([row("a", 10, 9, 8), row("b", 8.5, 8, 7), row("c", 7, 6, 5), row("d")]) == ("a", ["b"])
    assert fastest([row("a", 10, 9, 8), row("d")]) == (None, [])


def test_records_of_different_code_are_refused(tmp_path: Path) -> None:
    record(tmp_path, "sync-process", 8)
    record(tmp_path, "async-process", 9, commit="d")
    with pytest.raises(ValueError, match="different code"):
        derive(tmp_path)


def test_code_that_is_not_the_commits_is_named(tmp_path: Path) -> None:
    name = "legs/__init__.py"
    head = subprocess.run(["git", "show", f"HEAD:{name}"], capture_output=True, check=False)
    if head.returncode:
        pytest.skip("not inside a repository")
    right = sha256(head.stdout)
    assert same_at_commit("HEAD", {name: right}) == {name: True}
    assert same_at_commit("HEAD", {name: "0" * 64}) == {name: False}
    assert same_at_commit("HEAD", {"no/such/file": right}) == {"no/such/file": None}
    record(tmp_path, "sync-process", 8)
    assert "could not be compared: a." in page(derive(tmp_path))


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="run the configurations first"):
        derive(tmp_path)


def test_unknown_configurations_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["run", "out", "--only", "nonsense"])
    assert "nonsense" in capsys.readouterr().err
