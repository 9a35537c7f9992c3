"""What Linux tells about this machine and its processes, read from /proc.

Every function takes `proc`, the root of the tree it reads, so that a test can lay out a machine of its own.  A value that cannot be
read is None, never 0.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
PF_KTHREAD = 0x00200000
"""Flag of a kernel thread in field 9 of /proc/PID/stat (include/linux/sched.h)."""


class ProcessTimes(NamedTuple):
    """One process's line of /proc/PID/stat; times in clock ticks (see :data:`TICKS_PER_S`)."""

    pid: int
    name: str
    state: str
    parent: int
    is_kernel: bool
    cpu_ticks: int
    """User and system time of the process itself, all threads, living and dead."""
    reaped_ticks: int
    """User and system time of children that it has waited for."""
    start_ticks: int
    """When it started, in ticks after boot: with the pid, an identity."""


class CpuTimes(NamedTuple):
    """The first line of /proc/stat in clock ticks, summed over all cores since boot."""

    busy: int
    """user, nice, system, irq and softirq."""
    steal: int
    idle: int
    """idle and iowait."""

    @property
    def total(self) -> int:
        return self.busy + self.steal + self.idle


TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def read_text(name: str, proc: Path = PROC) -> str:
    """A file below `proc`, or the empty string when it cannot be read."""
    try:
        return (proc / name).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def boot_id(proc: Path = PROC) -> str | None:
    """The kernel's random id of this boot."""
    return read_text("sys/kernel/random/boot_id", proc).strip() or None


def host_hash(machine_id: Path = Path("/etc/machine-id")) -> str:
    """Names a machine in evidence without giving its name away: 12 hexadecimal digits of a SHA-256.

    The host name alone does not tell virtual machines of one image apart, so the machine id and the boot id are hashed with it; a machine
    is therefore one boot of one machine, which is all that numbers may be compared within.
    """
    known = machine_id.read_text(encoding="ascii", errors="replace").strip() if machine_id.is_file() else ""
    return hashlib.sha256(f"{socket.gethostname()}\0{known}\0{boot_id()}".encode()).hexdigest()[:12]


def kernel(proc: Path = PROC) -> str | None:
    """The kernel's release, as `uname -r` prints it."""
    return read_text("sys/kernel/osrelease", proc).strip() or None


class CpuInfo(NamedTuple):
    """What /proc/cpuinfo says of the first core, and how many logical cores there are."""

    model: str | None
    cores: int | None
    flags: tuple[str, ...]


def cpu_info(proc: Path = PROC) -> CpuInfo:
    """CPU model, number of logical cores, sorted feature flags."""
    lines = [line.partition(":") for line in read_text("cpuinfo", proc).splitlines()]
    fields: dict[str, str] = {}
    for key, _, value in lines:
        fields.setdefault(key.strip(), value.strip())
    cores = sum(key.strip() == "processor" for key, _, _ in lines)
    flags = fields.get("flags") or fields.get("Features") or ""
    return CpuInfo(fields.get("model name"), cores or None, tuple(sorted(flags.split())))


def memory_bytes(field: str = "MemTotal", proc: Path = PROC) -> int | None:
    """A field of /proc/meminfo in bytes."""
    for line in read_text("meminfo", proc).splitlines():
        key, _, value = line.partition(":")
        if key == field:
            return int(value.split()[0]) * 1024
    return None


def load_1(proc: Path = PROC) -> float | None:
    """The one-minute load average."""
    text = read_text("loadavg", proc)
    return float(text.split()[0]) if text else None


def cpu_times(proc: Path = PROC) -> CpuTimes | None:
    """All cores' time since boot.  Guest time is inside user time (proc(5)) and so is not added again."""
    head = read_text("stat", proc).partition("\n")[0].split()
    if len(head) < 9 or head[0] != "cpu":
        return None
    user, nice, system, idle, iowait, irq, softirq, steal = map(int, head[1:9])
    return CpuTimes(user + nice + system + irq + softirq, steal, idle + iowait)


def pids(proc: Path = PROC) -> list[int]:
    """Every process that shows under `proc`."""
    return [int(name) for name in os.listdir(proc) if name.isdigit()]


def process_times(pid: int, proc: Path = PROC) -> ProcessTimes | None:
    """One process's times, or None when it is gone.  A name may hold spaces and parentheses, so fields count from the last `)`."""
    head, _, tail = read_text(f"{pid}/stat", proc).rpartition(")")
    if not head:
        return None
    fields = tail.split()
    utime, stime, cutime, cstime = map(int, fields[11:15])
    return ProcessTimes(
        pid=pid,
        name=head.partition("(")[2],
        state=fields[0],
        parent=int(fields[1]),
        is_kernel=bool(int(fields[6]) & PF_KTHREAD),
        cpu_ticks=utime + stime,
        reaped_ticks=cutime + cstime,
        start_ticks=int(fields[19]),
    )


def all_times(proc: Path = PROC) -> dict[int, ProcessTimes]:
    """The times of every process, by pid."""
    return {pid: times for pid in pids(proc) if (times := process_times(pid, proc)) is not None}


def command_line(pid: int, limit: int = 200, proc: Path = PROC) -> str:
    """A process's command line in `limit` characters, or its name in brackets when it has none, or `?`."""
    text = read_text(f"{pid}/cmdline", proc).replace("\0", " ").strip()
    if not text:
        name = read_text(f"{pid}/comm", proc).strip()
        return f"[{name}]" if name else "?"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def brief_command(pid: int, proc: Path = PROC) -> str:
    """A process's command line fit for evidence: its first five words, of paths the last part, without the values of `--option=value`."""
    text = read_text(f"{pid}/cmdline", proc)
    if not text.strip("\0 "):
        return command_line(pid, proc=proc)
    words = text.strip("\0").split("\0")
    brief = [word.partition("=")[0] + "=..." if "=" in word else word.rstrip("/").rpartition("/")[2] for word in words[:5]]
    return " ".join(brief)[:80] + (" ..." if len(words) > 5 else "")


def tree(roots: Iterable[int], proc: Path = PROC) -> set[int]:
    """The living processes among `roots` and all their descendants.

    Reads /proc/PID/task/TID/children of every thread: a child forked by a worker thread shows under that thread alone.
    """
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        if pid in found:
            continue
        try:
            threads = os.listdir(proc / str(pid) / "task")
        except OSError:
            continue
        found.add(pid)
        for thread in threads:
            waiting += map(int, read_text(f"{pid}/task/{thread}/children", proc).split())
    return found
