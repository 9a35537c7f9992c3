"""What the host side costs and can do: PSS passes, pinned memory in PSS, page-cache eviction, disk rates."""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from harness.machine import host

GIB = 1 << 30
PAGE = mmap.PAGESIZE
BLOCK = 8 << 20
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
PSS_FIELDS = ("Rss", "Pss", "Pss_Anon", "Pss_File", "Pss_Shmem", "AnonHugePages", "Locked")


def seconds(act: Callable[[], Any]) -> float:
    """Wall time of `act`."""
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def rollup(pid: int | str = "self") -> dict[str, int]:
    """PSS_FIELDS of /proc/PID/smaps_rollup in bytes.  Raises OSError where it cannot be read."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    found = {name: int(value.split()[0]) * 1024 for name, _, value in (line.partition(":") for line in lines[1:])}
    return {name: found[name] for name in PSS_FIELDS if name in found}


def tree_pass(root: int, repeats: int = 5) -> dict[str, Any]:
    """PSS of a process tree and what reading it costs: one walk of the tree and one smaps_rollup a process, `repeats` times."""
    walls, cpus = [], []
    readings: dict[int, dict[str, int]] = {}
    for _ in range(repeats):
        cpu, wall = time.process_time(), time.perf_counter()
        readings = {pid: rollup(pid) for pid in sorted(host.tree([root]))}
        walls.append((time.perf_counter() - wall) * 1e3)
        cpus.append((time.process_time() - cpu) * 1e3)
    processes = [{"name": (host.process_times(pid) or (None, "?"))[1], **told} for pid, told in readings.items()]
    return {"processes": processes, "pss": sum(told["Pss"] for told in readings.values()), "wall_ms": walls, "cpu_ms": cpus}


def pss_pass_cost(size: int = 8 * GIB) -> dict[str, Any]:
    """Cost of a PSS pass over this process while it holds `size` bytes of touched private anonymous memory."""
    before = rollup()
    area = mmap.mmap(-1, size, flags=PRIVATE)
    touch = seconds(lambda: np.frombuffer(area, dtype=np.uint8)[::PAGE].__setitem__(slice(None), 1))
    walls = [seconds(rollup) * 1e3 for _ in range(7)]
    held = rollup()
    area.close()
    return {"bytes": size, "touch_s": touch, "wall_ms": walls, "median_ms": statistics.median(walls),
            "pss_moved": held["Pss"] - before["Pss"], "huge_page_bytes": held["AnonHugePages"]}


def _moved(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: after[name] - before[name] for name in before}


def pinned_in_pss(size: int = GIB) -> dict[str, Any]:
    """How far PSS moves when `size` bytes are pinned, by cudaHostAlloc and by cudaHostRegister on touched private anonymous memory."""
    import torch

    torch.empty(1, device="cuda")
    out: dict[str, Any] = {"bytes": size}
    before, available = rollup(), host.memory_bytes("MemAvailable")
    allocated = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    out["cuda_host_alloc"] = _moved(before, rollup())
    allocated.fill_(1)
    out["cuda_host_alloc_touched"] = _moved(before, rollup())
    after = host.memory_bytes("MemAvailable")
    out["cuda_host_alloc_available_fell"] = None if available is None or after is None else available - after
    before = rollup()
    area = mmap.mmap(-1, size, flags=PRIVATE)
    view = np.frombuffer(area, dtype=np.uint8)
    view[::PAGE] = 1
    out["anonymous_touched"] = _moved(before, rollup())
    code = int(torch.cuda.cudart().cudaHostRegister(view.ctypes.data, size, 0))
    out["cuda_host_register_code"] = code
    out["cuda_host_register"] = _moved(before, rollup())
    if code == 0:
        torch.cuda.cudart().cudaHostUnregister(view.ctypes.data)
    return out


def resident_pages(path: Path) -> int:
    """Pages of a file in the page cache, by mincore(2).  Raises OSError where the call fails."""
    size = path.stat().st_size
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as source, mmap.mmap(source.fileno(), size, prot=mmap.PROT_READ) as area:
        view = np.frombuffer(area, dtype=np.uint8)
        flags = np.zeros((size + PAGE - 1) // PAGE, dtype=np.uint8)
        failed = libc.mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size), flags.ctypes.data_as(ctypes.c_void_p))
        del view
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return int((flags & 1).sum())


def evict(path: Path) -> float:
    """Write back and drop a file's pages (fdatasync, POSIX_FADV_DONTNEED); seconds it took."""
    with path.open("rb+") as source:
        def drop() -> None:
            os.fdatasync(source.fileno())
            os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return seconds(drop)


def read_rate(path: Path, threads: int, direct: bool) -> float:
    """Bytes per second of reading a whole file in 8 MiB blocks with `threads` readers, past the page cache if `direct`."""
    size = path.stat().st_size
    descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))

    def reader(offsets: Iterable[int]) -> int:
        buffer = mmap.mmap(-1, BLOCK)
        return sum(os.preadv(descriptor, [buffer], offset) for offset in offsets)

    try:
        with ThreadPoolExecutor(threads) as pool:
            start = time.perf_counter()
            read = sum(pool.map(reader, [range(first * BLOCK, size, threads * BLOCK) for first in range(threads)]))
            spent = time.perf_counter() - start
    finally:
        os.close(descriptor)
    if read != size:
        raise OSError(f"{read} of {size} bytes read")
    return size / spent


def file_system(folder: Path) -> str | None:
    """Type of the file system that `folder` lies on, from /proc/self/mounts."""
    mounts = [line.split() for line in host.read_text("self/mounts").splitlines()]
    here = [(len(fields[1]), fields[2]) for fields in mounts if folder.resolve().is_relative_to(fields[1])]
    return max(here, key=lambda found: found[0])[1] if here else None


def disk(folder: Path, size: int) -> dict[str, Any]:
    """Eviction and read rates on the file system of `folder`, over one file of `size` bytes of random data that is removed at the end.

    Cold means cold for this machine's page cache; a virtual disk may still be cached by its host.
    """
    path = folder / "platform-facts.scratch"
    out: dict[str, Any] = {"file_system": file_system(folder), "bytes": size, "pages": size // PAGE}
    block = os.urandom(BLOCK)
    try:
        with path.open("wb") as sink:
            out["write_s"] = seconds(lambda: [sink.write(block) for _ in range(size // BLOCK)])
        out["resident_after_write"] = resident_pages(path)
        out["mincore_s"] = seconds(lambda: resident_pages(path))
        out["evict_just_written_s"] = evict(path)
        out["resident_after_evict"] = resident_pages(path)
        cold = out["cold_direct_bytes_per_s"] = {}
        for threads in (1, 4, 16):
            cold[str(threads)] = read_rate(path, threads, direct=True)
        out["resident_after_direct"] = resident_pages(path)
        out["cold_buffered_bytes_per_s"] = {"1": read_rate(path, 1, direct=False)}
        out["resident_after_buffered"] = resident_pages(path)
        out["warm_bytes_per_s"] = {str(threads): read_rate(path, threads, direct=False) for threads in (1, 4, 16)}
        out["evict_clean_s"] = evict(path)
        out["resident_after_second_evict"] = resident_pages(path)
    finally:
        path.unlink(missing_ok=True)
    return out
