"""The bench of loaders: a repeat counts only with proof of its page cache, and the verdicts can go either way."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.engine.checkpoints import make_checkpoint
from tools.bench import load


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, "llama", shard="100KB")
    return folder


def test_a_run_leaves_a_record_with_its_proofs_and_a_table(tmp_path: Path, model: Path) -> None:
    out = tmp_path / "load.json"
    load.main(["run", str(out), str(model), "--cold", "1", "--warm", "2", "--readers", "3", "--commit", "abc"])
    record = json.loads(out.read_bytes())
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    assert (record["bytes"], record["device"], record["readers"], record["commit"]) == (size, "host memory", 3, "abc")
    assert {state: sorted(ways) for state, ways in record["rows"].items()} == {
        "cold": ["direct", "plain", "safetensors", "staged"], "warm": ["direct", "one-thread", "safetensors", "staged"]}
    for rows in record["rows"]["cold"].values():
        assert [row["resident_before"] for row in rows] == [0] and rows[0]["storage_bytes"] >= size
    assert record["rows"]["cold"]["plain"][0]["resident_after"] == 0
    for rows in record["rows"]["warm"].values():
        assert [row["resident_before"] for row in rows] == [record["pages"]] * 2 and all(row["storage_bytes"] == 0 for row in rows)
    page = tmp_path / "load.md"
    assert load.main(["table", str(page), str(out)]) == 0
    rate = record["bytes_per_s"]["warm"]["direct"] / 1e9
    assert f"| warm | direct | {rate:.2f} |" in page.read_text() and str(tmp_path / "model") not in page.read_text()


def rows(**seconds: float) -> dict[str, Any]:
    return {way.replace("_", "-"): [{"seconds": value}] for way, value in seconds.items()}


@pytest.mark.parametrize(("cold", "warm", "cold_holds", "warm_holds"), [
    (rows(plain=0.9, direct=1.0), rows(one_thread=3.0, direct=1.0), True, True),
    (rows(plain=0.89, direct=1.0), rows(one_thread=2.9, direct=1.0), False, False),
    (rows(direct=1.0), rows(direct=1.0), None, None),
    (rows(plain=1.0), rows(), None, None),
])
def test_what_direct_loading_is_held_to(cold: Any, warm: Any, cold_holds: bool | None, warm_holds: bool | None) -> None:
    told = load.judge({"bytes": 1000, "rows": {"cold": cold, "warm": warm}})
    assert (told["cold_holds"], told["warm_holds"]) == (cold_holds, warm_holds)


def test_medians_stand_for_the_repeats() -> None:
    told = load.judge({"bytes": 12, "rows": {"cold": {}, "warm": {"direct": [{"seconds": value} for value in (1.0, 6.0, 3.0)]}}})
    assert told["bytes_per_s"]["warm"]["direct"] == 4.0


@pytest.mark.parametrize("cold", [True, False])
def test_a_repeat_without_proof_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch, cold: bool) -> None:
    monkeypatch.setattr(load, "evict", lambda _: {"proven": None if cold else True, "reasons": ["model: not provable"], "pages_after": 0})
    monkeypatch.setattr(load, "resident", lambda _: 3)
    with pytest.raises(OSError, match="not provable" if cold else r"3 of \d+ pages are in the page cache"):
        load.once(lambda: None, load.files_of(model), "cpu", cold)


def test_plain_reads_every_byte_or_fails(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, read, preadv = load.files_of(model), [], os.preadv

    def short(descriptor: int, buffers: Any, offset: int) -> int:
        read.append(preadv(descriptor, buffers, offset))
        return read[-1] - (len(read) == 2)

    load.plain(paths, 3)
    monkeypatch.setattr(load.os, "preadv", short)
    with pytest.raises(OSError, match=r"\d+ bytes read of \d+"):
        load.plain(paths, 3)
    assert sum(read) == sum(path.stat().st_size for path in paths)


def test_the_oracle_s_figure_is_its_own(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.series.arms.oracle_python", lambda *_: Path("python"))
    monkeypatch.setattr("harness.series.arms.oracle_site", lambda *_: None)
    said = "INFO default_loader.py: Loading weights took 1.25 seconds\n"
    monkeypatch.setattr(load.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, "", said))
    assert load.vllm("vllm-cpu", model) == 1.25
    assert load.once(lambda: 1.25, load.files_of(model), "cpu", cold=False)["seconds"] == 1.25
    monkeypatch.setattr(load.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 1, "", "no such model"))
    with pytest.raises(OSError, match="vllm-cpu said nothing of its weights; it ended with 1: no such model"):
        load.vllm("vllm-cpu", model)
