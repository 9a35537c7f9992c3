"""The process-tree memory sampler on real processes, and the summary of its stream."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import textwrap
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import harness
from harness.evidence import layout
from harness.leg import memory
from harness.leg.memory_summary import read_rows, summarise_memory
from harness.series.leg import _memory_reasons
from legs.protocol import MARKS as MARKS_FILE
from legs.protocol import read_marks

ROOT = Path(harness.__file__).parents[1]
MIB = 1 << 20

# --- real processes ---

CHILD = "import time; x = bytearray(512 << 20); x[::4096] = b'x' * (len(x) // 4096); time.sleep(1.0)"
ARM = f"""
    import json, subprocess, sys, threading, time
    def mark(name):
        with open("marks.jsonl", "a") as sink:
            sink.write(json.dumps({{"mark": name, "t_ns": time.monotonic_ns()}}) + "\\n")
    mark("imported")
    time.sleep(0.3)
    worker = threading.Thread(target=lambda: subprocess.run([sys.executable, "-S", "-c", {CHILD!r}]))
    mark("load_start"); worker.start(); worker.join(); mark("loaded")
    mark("ready"); mark("first_token"); time.sleep(1.2); mark("last_token")
    time.sleep(0.1)
"""


def run_sampled(folder: Path, arm: str) -> list[dict[str, Any]]:
    """Run `arm` below a stand-in for the guard, which is the root, and sample it until the root ends."""
    launcher = f"import subprocess, sys; input(); subprocess.run([sys.executable, '-S', '-c', {textwrap.dedent(arm)!r}])"
    root = subprocess.Popen([sys.executable, "-c", launcher], cwd=folder, stdin=subprocess.PIPE)
    (folder / "root").write_text(str(root.pid))
    sampler = start_sampler(root.pid, folder)
    try:
        deadline = time.monotonic() + 10
        while not (folder / "memory.jsonl.gz.partial").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert root.stdin is not None
        root.stdin.write(b"\n")
        root.stdin.close()
        assert root.wait(30) == 0
        assert sampler.wait(10) == 0
    finally:
        root.kill()
        sampler.kill()
        root.wait()
        sampler.wait()
    return read_rows(folder / "memory.jsonl.gz")


def start_sampler(root: int, folder: Path) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "harness.leg.memory", "--root-pid", str(root), "--out", str(folder / "memory.jsonl.gz")]
    return subprocess.Popen([*argv, "--marks", str(folder / "marks.jsonl"), "--period", "0.2"], cwd=ROOT, stdin=subprocess.PIPE)


def test_check_16_a_child_of_a_worker_thread_that_takes_512_mib_is_in_the_peak(tmp_path: Path) -> None:
    rows = run_sampled(tmp_path, ARM)
    marks = [json.loads(line) for line in (tmp_path / "marks.jsonl").read_text().splitlines()]
    summary = summarise_memory(rows, marks)
    assert summary["peak_pss"] == pytest.approx(512 * MIB, rel=0.05)
    assert summary["peak_pss"] > 512 * MIB
    assert summary["peak"]["phase"] == "load_start"
    assert summary["peak"]["processes"] == 2
    assert sum(summary["peak"][part] for part in ("pss_anon", "pss_file", "pss_shmem")) == pytest.approx(summary["peak_pss"], rel=0.001)
    assert summary["peak"]["pss_anon"] > 512 * MIB
    assert 0 < summary["stable_pss"] < 64 * MIB
    assert summary["stable_passes"] >= 2
    assert summary["peak_missed"] == []
    assert summary["complete"]
    assert all(row["mem_available"] > 0 for row in rows[:-1])
    assert rows[-1]["kind"] == "end"
    assert not (tmp_path / "memory.jsonl.gz.partial").exists()


def test_cadence_marks_and_root_left_out(tmp_path: Path) -> None:
    rows = run_sampled(tmp_path, ARM)
    rss, pss = ([row for row in rows if row["kind"] == kind] for kind in ("rss", "pss"))
    root = int((tmp_path / "root").read_text())
    assert all(process["pid"] != root for row in rows[:-1] for process in row["processes"]), "the root itself is not of the leg"
    ready = next(line["t_ns"] for line in map(json.loads, (tmp_path / "marks.jsonl").read_text().splitlines()) if line["mark"] == "ready")
    before, after = ([row["gap_s"] for row in rss[1:] if (row["t_ns"] > ready + 0.2e9) is late] for late in (False, True))
    assert sorted(after)[len(after) // 2] == pytest.approx(0.2, rel=0.25)
    assert sorted(before)[len(before) // 2] < 0.05, "closer until the arm is ready"
    for earlier, later in pairwise(pss):
        if later["trigger"] == "period":
            assert later["gap_s"] >= max(0.2, 4 * earlier["cost_s"]) * 0.99
    marks = [json.loads(line)["t_ns"] for line in (tmp_path / "marks.jsonl").read_text().splitlines()]
    marked = [row["t_ns"] for row in pss if row["trigger"] == "mark"]
    assert marked
    assert all(any(0 <= row - mark < 0.5e9 for row in marked) for mark in marks)


BRIEF = """
import time

open("marks.jsonl", "w").close()
time.sleep(0.5)
data = bytearray(512 << 20)  # zero pages: nothing is resident yet
for at in range(0, len(data), 4096):
    data[at] = 1
time.sleep(0.08)
del data
time.sleep(0.6)
"""


def test_a_peak_of_a_tenth_of_a_second_before_ready_is_caught(tmp_path: Path) -> None:
    rows = run_sampled(tmp_path, BRIEF)
    summary = summarise_memory(rows, [])
    assert summary["peak_missed"] == []
    assert summary["peak_pss"] == pytest.approx(512 * MIB, rel=0.05)
    assert any(row.get("trigger") == "growth" for row in rows)
    kept = [row for row in rows if row["kind"] == "rss"]
    heights = [memory._resident(row) for row in kept]
    due = sum(height <= max(heights[:number], default=-1) for number, height in enumerate(heights))
    assert due <= (kept[-1]["t_ns"] - kept[0]["t_ns"]) / 0.2e9 + 1, "only what is due or a new height is kept"


TINY = """
import json, time

def mark(name):
    with open("marks.jsonl", "a") as sink:
        sink.write(json.dumps({"mark": name, "t_ns": time.monotonic_ns()}) + "\\n")

mark("load_start")
weights = bytearray(1 << 20)
weights[::4096] = b"x" * 256
mark("ready"); mark("first_token")
time.sleep(0.6)
held = next(int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if line.startswith("Pss:"))
mark("last_token")
open("held", "w").write(str(held * 1024))
"""
"""A model of 1 MiB: what the interpreter takes is most of it."""


def test_check_16_stable_pss_works_on_a_tiny_model(tmp_path: Path) -> None:
    """No threshold of size tells when the model is there, the arm's marks do; the process reads its own PSS meanwhile."""
    rows = run_sampled(tmp_path, TINY)
    summary = summarise_memory(rows, read_marks(tmp_path))
    assert summary["stable_passes"] >= 1
    assert summary["stable_pss"] == pytest.approx(int((tmp_path / "held").read_text()), rel=0.1)
    assert _memory_reasons(tmp_path) == []


def test_a_missed_peak_or_an_unreadable_pss_voids_the_leg(tmp_path: Path) -> None:
    marks = [{"mark": mark, "t_ns": t_ns} for mark, t_ns in (("first_token", 3 * 10**9), ("last_token", 6 * 10**9))]
    (tmp_path / MARKS_FILE).write_text("".join(json.dumps(line) + "\n" for line in marks))

    def reasons(*rows: dict[str, Any]) -> list[str]:
        (tmp_path / layout.MEMORY).write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
        return _memory_reasons(tmp_path)

    fine = [rss_row((1, 1000, 1040)), pss_row(4, 900), {"kind": "end", "period_s": 0.2}]
    assert reasons(*fine) == []
    assert reasons(rss_row((1, 1000, 1060)), *fine[1:]) == [
        "a peak was missed: n1 (pid 1) once held 1060 bytes by VmHWM, and 1000 is the most that was sampled of it"]
    assert reasons(fine[0], pss_row(7, 900), fine[2]) == ["stable_pss is unreadable"]
    assert reasons(fine[0], pss_row(4, 900, partial=True), fine[2]) == ["peak_pss is unreadable", "stable_pss is unreadable"]
    (tmp_path / layout.MEMORY).unlink()
    assert _memory_reasons(tmp_path) == ["the memory sampler left no stream"]


def test_ends_whole_when_its_input_closes(tmp_path: Path) -> None:
    root = subprocess.Popen(["sleep", "60"])
    sampler = start_sampler(root.pid, tmp_path)
    try:
        while not (tmp_path / "memory.jsonl.gz.partial").exists():
            time.sleep(0.01)
        time.sleep(0.3)
        assert not (tmp_path / "memory.jsonl.gz").exists()
        assert sampler.stdin is not None
        sampler.stdin.close()
        assert sampler.wait(10) == 0
    finally:
        root.kill()
        root.wait()
    assert read_rows(tmp_path / "memory.jsonl.gz")[-1]["reason"] == "told to stop"


def test_never_writes_over_a_stream(tmp_path: Path) -> None:
    (tmp_path / "memory.jsonl.gz").write_text("kept")
    sampler = start_sampler(1 << 22, tmp_path)
    assert sampler.wait(10) != 0
    assert (tmp_path / "memory.jsonl.gz").read_text() == "kept"


# --- the summary ---


def pss_row(t_s: float, *sizes: int, partial: bool = False, cost_s: float = 0.1) -> dict[str, Any]:
    processes = [{"pid": pid, "pss": size, "pss_anon": size, "pss_file": 0, "pss_shmem": 0} for pid, size in enumerate(sizes)]
    return {"kind": "pss", "t_ns": round(t_s * 1e9), "cost_s": cost_s, "partial": partial, "processes": processes}


def rss_row(*processes: tuple[int, int, int | None]) -> dict[str, Any]:
    rows = [
        {"pid": pid, "start_ticks": 1, "name": f"n{pid}", "rss_anon": rss, "rss_file": 0, "rss_shmem": 0, "hwm": hwm}
        for pid, rss, hwm in processes
    ]
    return {"kind": "rss", "t_ns": 0, "cost_s": 0.0, "partial": False, "processes": rows}


MARKS = [{"mark": mark, "t_ns": t_ns} for mark, t_ns in (("load_start", 1e9), ("first_token", 3e9), ("progress", 4e9), ("last_token", 6e9))]


def test_peak_and_stable_stand_on_complete_passes_only() -> None:
    rows = [
        pss_row(0, 5), pss_row(2, 60, 40), pss_row(2.5, 500, partial=True), pss_row(3, 10), pss_row(4, 30), pss_row(5, 20),
        pss_row(5.5, 900, partial=True), pss_row(7, 70, cost_s=0.7),
    ]
    summary = summarise_memory(rows, MARKS)
    assert summary["peak_pss"] == 100
    assert summary["peak"] == {"t_ns": 2e9, "phase": "load_start", "processes": 2, "pss_anon": 100, "pss_file": 0, "pss_shmem": 0}
    assert (summary["stable_pss"], summary["stable_passes"]) == (20, 3)
    assert (summary["passes"], summary["partial_passes"]) == (6, 2)
    assert summary["mean_cost_s"] == pytest.approx(0.2)
    assert summary["max_gap_s"] == pytest.approx(2)
    assert not summary["complete"]


@pytest.mark.parametrize("marks", [[], MARKS[:2], MARKS[3:]])
def test_no_stable_pss_without_both_marks(marks: list[dict[str, Any]]) -> None:
    assert summarise_memory([pss_row(4, 30)], marks)["stable_pss"] is None


def test_nothing_complete_is_null_not_zero() -> None:
    for rows in ([], [pss_row(4, 30, partial=True)], [pss_row(4)]):
        summary = summarise_memory(rows, MARKS)
        assert [summary[name] for name in ("peak_pss", "peak", "stable_pss", "mean_cost_s", "max_gap_s")] == [None] * 5


def test_peak_between_two_samples_is_reported_as_missed() -> None:
    rows = [rss_row((1, 1000, 1000), (2, 100, 100)), rss_row((1, 1000, 1040), (2, 100, 200)), rss_row((1, 900, 1040))]
    assert summarise_memory(rows, [])["peak_missed"] == [{"pid": 2, "name": "n2", "sampled_rss": 100, "hwm": 200}]
    assert summarise_memory([rss_row((1, 1000, 1060))], [])["peak_missed"] == [{"pid": 1, "name": "n1", "sampled_rss": 1000, "hwm": 1060}]
    assert summarise_memory([rss_row((1, 100_000, 100_000), (2, 100, 200))], [])["peak_missed"] == [], "too small to matter"


def test_cut_stream_is_an_error(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"kind": "end"}\n' * 1000)
    (tmp_path / "cut.gz").write_bytes(whole[:-9])
    with pytest.raises(ValueError, match=r"cut\.gz: not a whole stream"):
        read_rows(tmp_path / "cut.gz")
