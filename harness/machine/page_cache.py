"""Evicts files from the page cache and proves it, so that every leg loads its model from storage and counts file pages alike."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.machine import host

IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")
"""File systems whose files are in memory and nowhere else."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
_MAP_FAILED = ctypes.c_void_p(-1).value


def evict(paths: Iterable[Path]) -> dict[str, Any]:
    """Ask the kernel to drop every page of `paths` (regular files) and count with mincore(2) what stayed.

    Returns `proven` (True: no page is resident; False: some are; None: this user cannot know), `pages_before`, `pages_after` (None where
    unknown), `reasons` (a line a cause, with the files it holds for and the cure), and `files` (names only).  The kernel reports every page
    of a file as resident to a user who neither owns it nor may write to it: there eviction is asked for but cannot be proven.
    """
    files = [_evict(path) for path in paths]
    provable = all(file["provable"] for file in files)
    stayed = any(file["provable"] and file["pages_after"] for file in files)
    before, after = ([file[key] for file in files] for key in ("pages_before", "pages_after"))
    return {
        "proven": False if stayed else True if provable else None,
        "pages_before": sum(before) if provable else None,
        "pages_after": sum(after) if provable else None,
        "reasons": _reasons(files),
        "files": [file["name"] for file in files],
    }


def resident_pages(descriptor: int) -> int:
    """How many pages of the file are in the page cache.  Raises OSError."""
    length = os.fstat(descriptor).st_size
    if length == 0:
        return 0
    address = _libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), "mmap failed")
    try:
        pages = ctypes.create_string_buffer(-(-length // mmap.PAGESIZE))
        if _libc.mincore(address, length, pages) != 0:
            raise OSError(ctypes.get_errno(), "mincore failed")
        # Only the lowest bit of each byte has a meaning (mincore(2)).
        return sum(byte & 1 for byte in pages.raw)
    finally:
        _libc.munmap(address, length)


def _evict(path: Path) -> dict[str, Any]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        before = resident_pages(descriptor)
        with suppress(OSError):  # a file system without it has nothing dirty that would stay
            os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        after = resident_pages(descriptor)
        provable = os.geteuid() in (0, state.st_uid) or os.access(path, os.W_OK, effective_ids=True)
    finally:
        os.close(descriptor)
    cause = None
    if not provable:
        cause = (f"not provable: to a user who neither owns a file (it is uid {state.st_uid}'s) nor may write to it the kernel calls every "
                 "page of it resident; copy the model to files of your own, or run as their owner")
    elif after:
        cause = _why_stayed(filesystem(path))
    return {"name": path.name, "pages_before": before, "pages_after": after, "provable": provable, "cause": cause}


def _why_stayed(kind: str | None) -> str:
    if kind in IN_MEMORY:
        return f"pages stayed: on {kind} they are the file itself and cannot leave memory; copy the model to a disk"
    return (f"pages stayed: a process maps or writes it, or its file system ({kind or 'unknown'}) keeps them; end that process, or copy "
            "the model to a local disk (ext4, xfs)")


def _reasons(files: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line a cause: a model of a hundred files tells it once."""
    named: dict[str, list[str]] = {}
    for file in files:
        if file["cause"]:
            named.setdefault(file["cause"], []).append(file["name"])
    return [f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}: {cause}" for cause, names in named.items()]


def filesystem(path: Path, proc: Path = host.PROC) -> str | None:
    """The type of the file system that `path` lies on, by the mount table; None when that cannot be read."""
    real, found = path.resolve(), dict[Path, str]()
    for line in host.read_text("self/mounts", proc).splitlines():
        fields = line.split()
        if len(fields) > 2:
            place = Path(fields[1].encode().decode("unicode_escape"))  # the kernel writes a space as \\040
            if real.is_relative_to(place):
                found[place] = fields[2]
    return found[max(found, key=lambda place: len(place.parts))] if found else None
