"""One checkpoint file open for reading: past the page cache where its pages are not in it, through the page cache where they are.

What is read past the cache (O_DIRECT, open(2)) needs offset, length and memory aligned to the storage's block, so an aligned superset
of the bytes asked for is read.  Nothing here maps a file: cachestat(2) tells what is cached without it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

BLOCK = 4096
"""Bytes that O_DIRECT is aligned to: the largest logical block of common storage.  One that asks for more refuses (EINVAL)."""
SLACK = 2 * BLOCK
"""How much longer than the bytes asked for a buffer must be."""

_CACHESTAT = 451
"""Number of the system call, the same on every architecture (Linux 6.5 and later)."""
_libc = ctypes.CDLL(None, use_errno=True)


class EndedError(EOFError):
    """The file ends at byte `at`, before what was asked for."""

    def __init__(self, at: int) -> None:
        super().__init__(f"the file ends at byte {at}")
        self.at = at


class File:
    """A file's two descriptors.  Its methods may be called by several threads at once."""

    def __init__(self, path: Path) -> None:
        self._cached = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._direct: int | None = None
        try:
            self._direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                os.close(self._cached)
                raise
        self._refused = False

    def close(self) -> None:
        os.close(self._cached)
        if self._direct is not None:
            os.close(self._direct)

    def read(self, begin: int, end: int, buffer: memoryview) -> int:
        """Bring the file's bytes [begin, end) into `buffer` and return where in it they begin.

        `buffer` is at least end - begin + SLACK bytes and starts at a multiple of BLOCK.  A file system that refuses O_DIRECT, be it
        only now (EINVAL), is read through the page cache.  Raises OSError, and EndedError when the file ends before `end`.
        """
        if self._direct is not None and not self._refused and not mostly_cached(self._cached, begin, end):
            first = begin // BLOCK * BLOCK
            try:
                fill(self._direct, buffer[: -(-(end - first) // BLOCK) * BLOCK], first, end - first)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._refused = True
            else:
                return begin - first
        self.read_cached(begin, buffer[: end - begin])
        return 0

    def read_cached(self, begin: int, target: memoryview) -> None:
        """Fill `target`, anywhere in memory, through the page cache.  Raises as `read`."""
        fill(self._cached, target, begin, len(target))


def fill(descriptor: int, target: memoryview, offset: int, needed: int) -> None:
    """Read from `offset` until at least `needed` bytes of `target` are there.  Raises EndedError when the file ends before."""
    done = 0
    while done < needed:
        count = os.preadv(descriptor, [target[done:]], offset + done)
        if count == 0:
            # Another reader may have met the end first: what counts is where it is now.
            raise EndedError(min(offset + done, os.fstat(descriptor).st_size))
        done += count


def mostly_cached(descriptor: int, begin: int, end: int) -> bool:
    """Whether at least half of these bytes lie in the page cache; True too where the kernel does not tell (ENOSYS, EPERM)."""
    span = (ctypes.c_uint64 * 2)(begin, end - begin)
    counts = (ctypes.c_uint64 * 5)()
    if _libc.syscall(_CACHESTAT, descriptor, span, counts, 0) != 0:
        return True
    return counts[0] * mmap.PAGESIZE * 2 >= end - begin
