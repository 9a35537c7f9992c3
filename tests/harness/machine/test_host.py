"""/proc readers on made-up trees and on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.machine import host


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    return tmp_path


def write(proc: Path, name: str, text: str) -> None:
    path = proc / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


STAT = "{pid} ({name}) {state} {parent} 1 1 0 -1 {flags} 1 2 3 4 11 22 33 44 20 0 1 0 {start} 0 0\n"


def test_process_times_with_a_hostile_name(proc: Path) -> None:
    write(proc, "7/stat", STAT.format(pid=7, name="a) S 1 (b", state="R", parent=3, flags=0x00200040, start=987))
    times = host.process_times(7, proc)
    assert times == host.ProcessTimes(7, "a) S 1 (b", "R", 3, True, 33, 77, 987)
    assert host.process_times(8, proc) is None
    assert host.all_times(proc) == {7: times}


def test_cpu_times_leave_guest_time_where_it_is(proc: Path) -> None:
    write(proc, "stat", "cpu  100 10 20 1000 50 3 4 5 60 7\ncpu0 1 1 1 1 1 1 1 1 0 0\n")
    times = host.cpu_times(proc)
    assert times == host.CpuTimes(busy=137, steal=5, idle=1050)
    assert times.total == 1192


@pytest.mark.parametrize("text", ["", "cpu 1 2 3\n", "nonsense\n"])
def test_unreadable_cpu_times_are_none(proc: Path, text: str) -> None:
    write(proc, "stat", text)
    assert host.cpu_times(proc) is None


def test_nothing_readable_is_none_never_zero(proc: Path) -> None:
    assert host.boot_id(proc) is None
    assert host.kernel(proc) is None
    assert host.memory_bytes(proc=proc) is None
    assert host.load_1(proc) is None
    assert host.cpu_info(proc) == host.CpuInfo(None, None, ())
    assert host.command_line(5, proc=proc) == "?"


def test_cpu_info_and_memory(proc: Path) -> None:
    write(proc, "cpuinfo", "processor\t: 0\nmodel name\t: Fast: 3 GHz\nflags\t\t: sse avx2\n\nprocessor\t: 1\nmodel name\t: Fast: 3 GHz\n")
    write(proc, "meminfo", "MemTotal:       2048 kB\nMemAvailable:   1024 kB\n")
    assert host.cpu_info(proc) == host.CpuInfo("Fast: 3 GHz", 2, ("avx2", "sse"))
    assert (host.memory_bytes(proc=proc), host.memory_bytes("MemAvailable", proc)) == (2 << 20, 1 << 20)


def test_tree_reads_every_thread_and_survives_the_gone(proc: Path) -> None:
    write(proc, "1/task/1/children", "2 ")
    write(proc, "2/task/2/children", "")
    write(proc, "2/task/20/children", "3 4 ")
    write(proc, "3/task/3/children", "")
    write(proc, "9/task/9/children", "")
    assert host.tree([1], proc) == {1, 2, 3}
    assert host.tree([3, 9, 77], proc) == {3, 9}


def test_command_lines(proc: Path) -> None:
    write(proc, "5/cmdline", "/opt/x/python\0-m\0job\0--token=secret\0/home/me/file.txt\0more\0")
    write(proc, "6/cmdline", "")
    write(proc, "6/comm", "kworker/0\n")
    assert host.command_line(5, proc=proc) == "/opt/x/python -m job --token=secret /home/me/file.txt more"
    assert host.command_line(5, 20, proc) == "/opt/x/python -m ..."
    assert host.brief_command(5, proc) == "python -m job --token=... file.txt ..."
    assert host.command_line(6, proc=proc) == host.brief_command(6, proc) == "[kworker/0]"


def test_this_machine() -> None:
    assert host.kernel() == os.uname().release
    assert host.cpu_info().cores == os.cpu_count()
    assert len(host.host_hash()) == 12
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
    try:
        assert {os.getpid(), child.pid} <= host.tree([os.getpid()])
        times = host.process_times(child.pid)
        assert times is not None
        assert times.parent == os.getpid()
        assert not times.is_kernel
    finally:
        child.kill()
        child.wait()
    kernel_daemon = host.process_times(2)
    if kernel_daemon is not None and kernel_daemon.name == "kthreadd":
        assert kernel_daemon.is_kernel
