"""The process-tree memory sampler of a memory leg, in a process of its own.

    python -m harness.leg.memory --root-pid GUARD --out memory.jsonl.gz --marks marks.jsonl --period 0.2

Every `period` it reads the resident parts of each process below the root (cheap); a pass over their PSS (dear: the kernel walks every
page table) comes every max(period, 4 x the last pass's cost), at each new line of the marks file, and when the tree has grown past
all it was at earlier passes.  Until the arm is ready the resident parts are read every 10 ms, and kept when they are due or a new
height: a loader's peak, with two copies of the weights, may last no longer than a tenth of a second.  It ends when the root is gone or its
standard input closes.  The stream is gzipped JSON lines under `FILE.partial`, renamed to `FILE` when it is complete.

Rows: {"kind": "rss" | "pss" | "end", "t_ns", "cost_s", "gap_s", "partial", "mem_available", "processes": [...], and for pss
"trigger": "period" | "mark" | "growth", "cgroup"}.  `t_ns` is CLOCK_MONOTONIC when the pass began, `gap_s` the time since the pass of the
same kind before it, `mem_available` the machine's MemAvailable, `cgroup` what harness.leg.cgroup tells.  A process of a PSS pass has
`gpu`, its bytes on all GPUs (harness.machine.gpu_memory).  Sizes are in bytes; a value that could not be read is null.  A pass is partial
when a process vanished or could not be read within it: it is no total.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import select
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from harness.leg.cgroup import cgroup_memory
from harness.machine import host
from harness.machine.gpu_memory import GpuMemory

STATUS_FIELDS = {"rss_anon": "RssAnon", "rss_file": "RssFile", "rss_shmem": "RssShmem", "hwm": "VmHWM"}
"""Of /proc/PID/status.  VmHWM is the kernel's own record of the process's peak resident size: what a sampler may have missed."""
PSS_FIELDS = {"pss": "Pss", "pss_anon": "Pss_Anon", "pss_file": "Pss_File", "pss_shmem": "Pss_Shmem"}
"""Of /proc/PID/smaps_rollup: each page's size divided by the number of processes that map it."""
COST_FACTOR = 4
STARTUP_PERIOD_S = 0.01
GROWTH = 1.02
"""A tree this many times as large as at any pass before is worth a pass of its own."""


class TreeReader:
    """Reads passes over the tree below `root`, without `root` itself.  `proc` is the root of the /proc tree to read, `gpu` reads NVML."""

    def __init__(self, root: int, proc: Path = host.PROC, gpu: GpuMemory | None = None) -> None:
        self._root, self._proc, self._gpu = root, proc, gpu or GpuMemory()
        self._last_ns: dict[str, int] = {}

    def root_is_alive(self) -> bool:
        """False once the root has ended, be it reaped or not."""
        times = host.process_times(self._root, self._proc)
        return times is not None and times.state not in "ZX"

    def rss(self) -> dict[str, Any]:
        """One pass over RSS parts and VmHWM."""
        return self._pass("rss", "status", STATUS_FIELDS)

    def pss(self, trigger: str) -> dict[str, Any]:
        """One pass over PSS and its parts, GPU memory beside them."""
        row = self._pass("pss", "smaps_rollup", PSS_FIELDS)
        pids = {process["pid"] for process in row["processes"]}
        held = self._gpu.by_pid(pids)
        for process in row["processes"]:
            process["gpu"] = held[process["pid"]]
        cost_s = (time.monotonic_ns() - row["t_ns"]) / 1e9
        return {**row, "cost_s": cost_s, "cgroup": cgroup_memory(pids, self._root, self._proc), "trigger": trigger}

    def _pass(self, kind: str, file: str, fields: Mapping[str, str]) -> dict[str, Any]:
        began = time.monotonic_ns()
        members = self._members()
        rows: list[dict[str, Any]] = []
        for pid, (name, start_ticks) in sorted(members.items()):
            rows.append({"pid": pid, "start_ticks": start_ticks, "name": name, **_read_fields(self._proc / str(pid) / file, fields)})
        last = self._last_ns.get(kind)
        self._last_ns[kind] = began
        # Pages are shared between processes: with one that came or went meanwhile, the parts are no sum of one moment.
        partial = any(row[field] is None for row in rows for field in fields) or self._members().keys() != members.keys()
        return {
            "kind": kind,
            "t_ns": began,
            "cost_s": (time.monotonic_ns() - began) / 1e9,
            "gap_s": None if last is None else (began - last) / 1e9,
            "partial": partial,
            "mem_available": host.memory_bytes("MemAvailable", self._proc),
            "processes": rows,
        }

    def _members(self) -> dict[int, tuple[str, int]]:
        """(name, start_ticks) by pid of the tree's processes that hold memory: not the dead that wait to be reaped."""
        members = {}
        for pid in host.tree([self._root], self._proc) - {self._root}:
            times = host.process_times(pid, self._proc)
            if times is not None and times.state not in "ZX":
                members[pid] = (times.name, times.start_ticks)
        return members


def _read_fields(path: Path, fields: Mapping[str, str]) -> dict[str, int | None]:
    """`fields` (ours by the kernel's name) of a file of `Name:  N kB` lines, in bytes; None for each that could not be read."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found: dict[str, int] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        parts = value.split()
        if len(parts) == 2 and parts[1] == "kB" and parts[0].isdigit():
            found[key] = int(parts[0]) * 1024
    return {ours: found.get(theirs) for ours, theirs in fields.items()}


class MarksWatch:
    """Tells when the arm's marks file has grown by a line."""

    def __init__(self, path: Path) -> None:
        self._path, self._lines, self._size = path, 0, -1
        self.ready = False
        """Whether the arm has set its mark `ready`."""

    def has_new(self) -> bool:
        """True once for each call after which the file had more complete lines than before."""
        try:
            size = os.stat(self._path).st_size
            if size == self._size:
                return False
            data = self._path.read_bytes()
        except OSError:
            return False
        lines = data.count(b"\n")
        self._size, grown, self._lines = size, lines > self._lines, lines
        self.ready = self.ready or b'"ready"' in data
        return grown


def sample(
    reader: TreeReader, marks: MarksWatch, period_s: float, emit: Callable[[dict[str, Any]], None], stop: Callable[[float], bool]
) -> None:
    """Sample until the root is gone or `stop(seconds)`, which sleeps that long, says so; ends with one row of kind `end`."""
    next_rss = next_kept = next_pss = next_growth = time.monotonic()
    highest = covered = 0
    reason = "root ended"
    while reader.root_is_alive():
        now = time.monotonic()
        if now >= next_rss:
            row = reader.rss()
            resident = _resident(row)
            if now >= next_kept or resident > highest:
                emit(row)
                next_kept = max(next_kept + period_s, now) if now >= next_kept else next_kept
            highest = max(highest, resident)
            next_rss = max(next_rss + (period_s if marks.ready else min(period_s, STARTUP_PERIOD_S)), now)
        marked = marks.has_new()
        grown = highest > GROWTH * covered and now >= next_growth
        if marked or grown or now >= next_pss:
            row = reader.pss("mark" if marked else "growth" if grown else "period")
            emit(row)
            covered = highest
            next_growth = now + 2 * row["cost_s"]
            next_pss = now + row["cost_s"] + max(period_s, COST_FACTOR * row["cost_s"])
        if stop(max(0.001, min(next_rss, next_pss, now + period_s / 4) - time.monotonic())):
            reason = "told to stop"
            break
    emit({"kind": "end", "t_ns": time.monotonic_ns(), "reason": reason, "period_s": period_s})


def _resident(row: dict[str, Any]) -> int:
    """Resident bytes of an RSS pass; parts that could not be read do not count, so they never make a new height."""
    return sum(process[part] or 0 for process in row["processes"] for part in ("rss_anon", "rss_file", "rss_shmem"))


def main(argv: list[str] | None = None) -> int:
    """Sample into the file; see the module's head."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root-pid", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--marks", type=Path, required=True)
    parser.add_argument("--period", type=float, default=0.2, help="seconds")
    arguments = parser.parse_args(argv)
    partial = arguments.out.with_name(arguments.out.name + ".partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with os.fdopen(descriptor, "wb") as raw:
        with gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=1, mtime=0) as sink:

            def emit(row: dict[str, Any]) -> None:
                sink.write((json.dumps(row, allow_nan=False) + "\n").encode())

            reader = TreeReader(arguments.root_pid)
            sample(reader, MarksWatch(arguments.marks), arguments.period, emit, _closed(sys.stdin))
        raw.flush()
        os.fsync(raw.fileno())
    os.link(partial, arguments.out)
    partial.unlink()
    return 0


def _closed(stdin: IO[str]) -> Callable[[float], bool]:
    """A sleep that says True when `stdin` was closed meanwhile."""

    def wait(seconds: float) -> bool:
        ready, _, _ = select.select([stdin], [], [], seconds)
        return bool(ready) and os.read(stdin.fileno(), 4096) == b""

    return wait


if __name__ == "__main__":
    raise SystemExit(main())
