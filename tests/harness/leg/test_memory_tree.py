"""The passes of the memory sampler on made-up /proc trees and a made-up NVML."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from harness.leg import memory
from harness.leg.memory import MarksWatch, TreeReader
from harness.leg.memory_summary import summarise_memory
from harness.machine.gpu_memory import GpuMemory
from tests.harness.machine.fake_nvml import FakeNvml

MIB = 1 << 20


class Tree:
    """A /proc of processes below 10."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder / "proc"
        self.add(10, [])

    def add(self, pid: int, children: list[int], pss_kb: int = 1000, state: str = "S", thread: int | None = None) -> None:
        task = self.proc / str(pid) / "task"
        for tid in {pid, thread or pid}:
            (task / str(tid)).mkdir(parents=True)
            (task / str(tid) / "children").write_text("")
        (task / str(thread or pid) / "children").write_text("".join(f"{child} " for child in children))
        folder = self.proc / str(pid)
        folder.joinpath("stat").write_text(f"{pid} (name (x) {pid}) {state} 1 1 1 0 -1 0 0 0 0 0 5 5 0 0 20 0 1 0 {pid}00 0 0\n")
        folder.joinpath("status").write_text(f"RssAnon:\t{pss_kb} kB\nRssFile:\t8 kB\nRssShmem:\t0 kB\nVmHWM:\t{pss_kb + 8} kB\n")
        rollup = f"00-01 ---p 00000000 00:00 0  [rollup]\nPss: {pss_kb} kB\nPss_Anon: {pss_kb} kB\nPss_File: 0 kB\nPss_Shmem: 0 kB\n"
        folder.joinpath("smaps_rollup").write_text(rollup)

    def link(self, parent: int, children: list[int]) -> None:
        (self.proc / str(parent) / "task" / str(parent) / "children").write_text("".join(f"{child} " for child in children))


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    made = Tree(tmp_path)
    made.link(10, [11])
    made.add(11, [12, 13], thread=99)
    made.add(12, [])
    made.add(13, [])
    return made


def test_pass_over_children_of_every_thread(tree: Tree) -> None:
    row = TreeReader(10, tree.proc).pss("period")
    assert [process["pid"] for process in row["processes"]] == [11, 12, 13]
    assert not row["partial"]
    assert summarise_memory([row], [])["peak_pss"] == 3 * 1000 * 1024
    assert row["processes"][0]["name"] == "name (x) 11"


def test_dead_but_unreaped_process_holds_nothing(tree: Tree) -> None:
    tree.add(14, [], state="Z")
    (tree.proc / "14" / "smaps_rollup").write_text("")
    tree.link(12, [14])
    row = TreeReader(10, tree.proc).pss("period")
    assert not row["partial"]
    assert [process["pid"] for process in row["processes"]] == [11, 12, 13]


@pytest.mark.parametrize("how", ["vanishes", "dies", "unreadable", "without a field", "forks"])
def test_pass_that_is_not_of_one_moment_is_no_total(tree: Tree, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read_fields = memory._read_fields

    def reading(path: Path, fields: Any) -> Any:
        if path.parent.name == "12":
            stat = tree.proc / "12" / "stat"
            if how == "vanishes":
                stat.unlink()
                path.unlink()
            elif how == "dies":
                stat.write_text(stat.read_text().replace(") S ", ") Z "))
                path.write_text("")
            elif how == "unreadable":
                path.unlink()
            elif how == "without a field":
                path.write_text("Pss: 5 kB\nPss_Anon: 5 kB\n")
            elif how == "forks":
                tree.add(14, [])
                tree.link(12, [14])
        return read_fields(path, fields)

    monkeypatch.setattr(memory, "_read_fields", reading)
    row = TreeReader(10, tree.proc).pss("period")
    assert row["partial"]
    whole = {**row, "partial": False, "processes": [dict(zip(("pss", "pss_anon", "pss_file", "pss_shmem"), (7, 7, 0, 0), strict=True))]}
    assert summarise_memory([row], [])["peak_pss"] is None
    summary = summarise_memory([row, whole], [])
    assert (summary["peak_pss"], summary["passes"], summary["partial_passes"]) == (7, 1, 1)


def test_available_memory_is_of_each_pass_and_null_when_unreadable(tree: Tree) -> None:
    reader = TreeReader(10, tree.proc)
    assert (reader.rss()["mem_available"], reader.pss("mark")["mem_available"]) == (None, None)
    (tree.proc / "meminfo").write_text("MemTotal:  9 kB\nMemAvailable:  3 kB\n")
    assert (reader.rss()["mem_available"], reader.pss("mark")["mem_available"]) == (3072, 3072)


def process(pid: int, used: int | None) -> SimpleNamespace:
    """An entry of NVML's lists."""
    return SimpleNamespace(pid=pid, usedGpuMemory=used)


class ProcessNvml(FakeNvml):
    """Its lists hold whole entries."""

    def nvmlDeviceGetComputeRunningProcesses(self, card: int) -> list[Any]:  # noqa: N802
        return self._value(card, "compute")

    def nvmlDeviceGetGraphicsRunningProcesses(self, card: int) -> list[Any]:  # noqa: N802
        return self._value(card, "graphics")


def gpu_bytes(tree: Tree, nvml: FakeNvml) -> list[int | None]:
    """By process of the tree, 11 to 13, and that PSS does not suffer."""
    row = TreeReader(10, tree.proc, GpuMemory(nvml, ())).pss("period")
    assert not row["partial"]
    return [entry["gpu"] for entry in row["processes"]]


def test_gpu_bytes_are_the_processes_own_over_all_cards(tree: Tree) -> None:
    nvml = ProcessNvml(
        {"compute": [process(11, 3 * MIB), process(99, 500)], "graphics": [process(11, 3 * MIB)]},
        {"compute": [process(11, 4 * MIB), process(11, MIB), process(12, 5)]},
    )
    assert gpu_bytes(tree, nvml) == [8 * MIB, 5, 0]


def test_check_16_unreadable_gpu_memory_is_null(tree: Tree) -> None:
    """Without a driver, with one that does not answer, and where NVML itself says not available; never 0."""
    failing = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    assert gpu_bytes(tree, ProcessNvml(init_error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)) == [None] * 3
    assert gpu_bytes(tree, ProcessNvml(init_error=pynvml.NVML_ERROR_UNKNOWN)) == [None] * 3
    assert gpu_bytes(tree, ProcessNvml(count_error=pynvml.NVML_ERROR_UNKNOWN)) == [None] * 3
    assert gpu_bytes(tree, ProcessNvml({"compute": failing}, {})) == [None] * 3
    assert gpu_bytes(tree, ProcessNvml({}, {"graphics": failing})) == [None] * 3
    assert gpu_bytes(tree, ProcessNvml({"compute": [process(11, None), process(12, 7)]}, {"compute": [process(11, 9)]})) == [None, 7, 0]


def test_a_control_group_of_the_tree_alone_is_read(tree: Tree, tmp_path: Path) -> None:
    group = tmp_path / "cgroup" / "leg"
    group.mkdir(parents=True)
    (tree.proc / "self").mkdir()
    (tree.proc / "self" / "mounts").write_text(f"proc /proc proc rw 0 0\ncgroup2 {tmp_path}/cgroup cgroup2 rw 0 0\n")
    for pid in (11, 12, 13):
        (tree.proc / str(pid) / "cgroup").write_text("4:memory:/other\n0::/leg\n")
    for name, text in (("cgroup.procs", "10\n11\n12\n13\n"), ("memory.current", "4096\n"), ("memory.peak", "8192\n")):
        (group / name).write_text(text)
    reader = TreeReader(10, tree.proc)
    assert reader.pss("period")["cgroup"] == {"current": 4096, "peak": 8192}
    (group / "memory.peak").unlink()
    assert reader.pss("period")["cgroup"] == {"current": 4096, "peak": None}
    (group / "cgroup.procs").write_text("10\n11\n12\n13\n77\n")
    assert reader.pss("period")["cgroup"] is None, "another process is in it"
    (group / "cgroup.procs").write_text("11\n12\n")
    (tree.proc / "13" / "cgroup").write_text("0::/elsewhere\n")
    (tmp_path / "cgroup" / "elsewhere").mkdir()
    (tmp_path / "cgroup" / "elsewhere" / "cgroup.procs").write_text("13\n")
    assert reader.pss("period")["cgroup"] is None, "one process is not in it"


def test_value_that_cannot_be_read_is_null(tree: Tree) -> None:
    (tree.proc / "12" / "smaps_rollup").unlink()
    row = TreeReader(10, tree.proc).pss("period")
    (process,) = (process for process in row["processes"] if process["pid"] == 12)
    assert process["pss"] is None


def test_root_that_is_dead_but_unreaped_is_gone(tree: Tree) -> None:
    reader = TreeReader(10, tree.proc)
    assert reader.root_is_alive()
    stat = tree.proc / "10" / "stat"
    stat.write_text(stat.read_text().replace(") S ", ") Z "))
    assert not reader.root_is_alive()


def test_marks_are_seen_once_a_line(tmp_path: Path) -> None:
    marks = tmp_path / "marks.jsonl"
    watch = MarksWatch(marks)
    assert not watch.has_new()
    marks.write_text('{"mark": "imported"')
    assert not watch.has_new()
    marks.write_text('{"mark": "imported"}\n')
    assert watch.has_new()
    assert not watch.has_new()
