"""The memory of a control group that a leg's processes have to themselves (cgroup v2)."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from pathlib import Path

from harness.machine import host


def cgroup_memory(pids: AbstractSet[int], root: int, proc: Path = host.PROC) -> dict[str, int | None] | None:
    """`current` and `peak` (memory.current, memory.peak; bytes, None when unreadable) of the group that holds all of `pids` and, beside
    `root`, no other process.  None when there is no such group: a group shared with others tells nothing of the leg.

    What the kernel holds for the leg (page cache, sockets, page tables) is in it, so it is no PSS.
    """
    mount = next((fields[1] for line in host.read_text("self/mounts", proc).splitlines()
                  if len(fields := line.split()) > 2 and fields[2] == "cgroup2"), None)
    groups = {_group(pid, proc) for pid in pids}
    if mount is None or len(groups) != 1 or None in groups:
        return None
    folder = Path(mount) / str(groups.pop()).lstrip("/")
    inside = host.read_text("cgroup.procs", folder).split()
    if not inside or not {int(pid) for pid in inside} <= pids | {root}:
        return None
    return {name: _number(host.read_text(f"memory.{name}", folder)) for name in ("current", "peak")}


def _group(pid: int, proc: Path) -> str | None:
    """A process's group of the unified hierarchy: the line of hierarchy 0 (cgroups(7))."""
    return next((line[3:] for line in host.read_text(f"{pid}/cgroup", proc).splitlines() if line.startswith("0::")), None)


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None
