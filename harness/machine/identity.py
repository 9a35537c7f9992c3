"""Which machine and which state of the repository a series ran on."""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.machine import host
from harness.machine.gpu import Gpu, GpuUnreadable


def machine_record() -> dict[str, Any]:
    """The machine as evidence keeps it.  `gpus` is empty without an NVIDIA driver and None when the driver cannot be read."""
    cpu = host.cpu_info()
    try:
        with Gpu() as gpu:
            gpus: list[dict[str, Any]] | None = [asdict(identity) for identity in gpu.identities()]
    except GpuUnreadable:
        gpus = None
    return {
        "host": host.host_hash(),
        "cpu": cpu.model,
        "cores": cpu.cores,
        "cpu_flags_sha256": hashlib.sha256(" ".join(cpu.flags).encode()).hexdigest() if cpu.flags else None,
        "memory_bytes": host.memory_bytes(),
        "kernel": host.kernel(),
        "boot_id": host.boot_id(),
        "gpus": gpus,
        "python": platform.python_version(),
    }


def repository_record(root: Path) -> dict[str, Any]:
    """The state of the git checkout at `root`: `commit`, `dirty` (changed or untracked files), `diff_sha256` (of `git diff HEAD` and the
    untracked files' names and bytes), `binding` (the commit alone says what ran).  All None but `binding`, which is False, without one.
    """
    commit, status = _git(root, "rev-parse", "HEAD"), _git(root, "status", "--porcelain", "-z", "--untracked-files=all")
    if commit is None or status is None:
        return {"commit": None, "dirty": None, "diff_sha256": None, "binding": False}
    dirty = bool(status)
    return {
        "commit": commit.decode().strip(),
        "dirty": dirty,
        "diff_sha256": _diff_sha256(root) if dirty else None,
        "binding": not dirty,
    }


def _diff_sha256(root: Path) -> str | None:
    diff = _git(root, "diff", "--binary", "--no-ext-diff", "--no-textconv", "HEAD")
    untracked = _git(root, "ls-files", "--others", "--exclude-standard", "-z", "--full-name", ":/")
    top = _git(root, "rev-parse", "--show-toplevel")
    if diff is None or untracked is None or top is None:
        return None
    digest = hashlib.sha256(diff)
    for name in sorted(filter(None, untracked.split(b"\0"))):
        path = Path(top.decode().rstrip("\n")) / name.decode(errors="surrogateescape")
        content = str(path.readlink()).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        digest.update(name + b"\0" + hashlib.sha256(content).digest())
    return digest.hexdigest()


def _git(root: Path, *arguments: str) -> bytes | None:
    """What git prints, or None when it is not there or fails."""
    git = shutil.which("git")
    if git is None:
        return None
    # Taking no optional locks: a measured checkout is only looked at.
    command = [git, "--no-optional-locks", "-C", str(root), "-c", "core.fsmonitor=false", *arguments]
    try:
        done = subprocess.run(command, check=False, capture_output=True, timeout=60, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
