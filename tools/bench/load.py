"""What each way of loading a checkpoint costs, alone: in one run, on the same files, with a cold and with a warm page cache.

    python -m tools.bench.load run OUT.json MODEL [--device cuda] [--cold N] [--warm N] [--readers N] [--only WAY ...]
                                [--oracle NAME] [--commit HASH]
    python -m tools.bench.load table PAGE.md RECORD.json ...

Ways: `plain` reads the files past the page cache with as many threads as the loader, into small buffers that are used again: what the
storage gives.  `one-thread` reads through the page cache in one thread and copies to the device.  `direct` and `staged` are the
engine's loaders, `safetensors` that library's own load to the device; `vllm` is the oracle's figure from its own log.

Cold: the files' pages were evicted and mincore(2) counted none.  Warm: it counted every one.  A repeat without that proof is refused.
Cold is cold for this machine: what a virtual disk's host keeps is not known.  Ways take turns within a repeat.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import re
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.loader import direct
from engine.loader.header import read_headers
from engine.loader.load import FILE_DTYPES, load
from engine.models.build import MODELS
from engine.models.config import read_config
from harness.machine.page_cache import evict, resident_pages
from legs.drivers.engine import code_sha256
from legs.protocol import to_json
from tools.bench.platform_host import file_system

ROOT = Path(__file__).resolve().parents[2]
COLD_SHARE, WARM_FACTOR = 0.9, 3.0
"""What direct loading is held to: cold, at least this share of `plain`; warm, at least this multiple of `one-thread`."""
COLD_WAYS = ("plain", "direct", "staged", "safetensors", "vllm")
WARM_WAYS = ("one-thread", "direct", "staged", "safetensors", "vllm")
NOTED = re.compile(r"Loading weights took ([0-9.]+) seconds")
ORACLE = """
import sys
from vllm import LLM
LLM(model=sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, max_num_seqs=1, gpu_memory_utilization=0.5)
"""


def files_of(model: Path) -> list[Path]:
    """The files that hold the checkpoint's tensors."""
    return sorted({entry.file for entry in read_headers(model).values()})


def plain(paths: Sequence[Path], readers: int) -> None:
    """Read all files past the page cache; block by block, in order, shared by `readers` threads."""
    open_files = [(os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC), path.stat().st_size) for path in paths]
    blocks = deque((descriptor, at) for descriptor, size in open_files for at in range(0, size, direct.WINDOW))

    def reader() -> int:
        buffer, read = mmap.mmap(-1, direct.WINDOW), 0
        with suppress(IndexError):
            while True:
                descriptor, at = blocks.popleft()
                read += os.preadv(descriptor, [buffer], at)
        return read

    try:
        with ThreadPoolExecutor(readers) as pool:
            read = sum(future.result() for future in [pool.submit(reader) for _ in range(readers)])
    finally:
        for descriptor, _ in open_files:
            os.close(descriptor)
    if read != sum(size for _, size in open_files):
        raise OSError(f"{read} bytes read of {sum(size for _, size in open_files)}")


def one_thread(paths: Sequence[Path], device: str) -> list[torch.Tensor]:
    """Read all files through the page cache in one thread, each window copied on before the next is read."""
    window = torch.empty(direct.WINDOW, dtype=torch.uint8)
    view, made = direct.as_bytes(window), []
    for path in paths:
        size = path.stat().st_size
        target = torch.empty(size, dtype=torch.uint8, device=device)
        with path.open("rb", buffering=0) as source:
            at = 0
            while at < size:
                count = source.readinto(view)
                target[at : at + count].copy_(window[:count])
                at += count
        made.append(target)
    return made


def ours(model: Path, device: str, way: str) -> dict[str, torch.Tensor]:
    """The engine's parameters, in the dtype of the files."""
    config = read_config(model)
    kind = MODELS[config.architecture]
    dtypes = {FILE_DTYPES[entry.dtype] for entry in read_headers(model).values()}
    return load(model, kind.parameters(config), lambda name: kind.ignored(config, name), dtypes.pop(), way, device)


def safetensors(paths: Sequence[Path], device: str) -> list[dict[str, torch.Tensor]]:
    """safetensors' own way: `load_file` to the device; on the host, where that maps the files and reads nothing, each tensor is copied."""
    from safetensors.torch import load_file

    made = [load_file(path, device=device) for path in paths]
    return [{name: tensor.clone() for name, tensor in held.items()} for held in made] if device == "cpu" else made


def vllm(name: str, model: Path) -> float:
    """Start the oracle's engine in its own interpreter; the seconds that its log says its weights took.  Raises OSError without them."""
    from harness.oracle import load_oracle
    from harness.series.arms import launch

    oracle = load_oracle(name, ROOT)
    arm = {"driver": "vllm", "environment": {**oracle.environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}}
    command = launch(arm, ROOT, model, oracle, ROOT)
    done = subprocess.run([command.argv[0], "-P", "-c", ORACLE, str(model.resolve())], env=command.environment, capture_output=True,
                          text=True, check=False)
    if (found := NOTED.search(done.stdout + done.stderr)) is None:
        raise OSError(f"{name} said nothing of its weights; it ended with {done.returncode}: {done.stderr[-500:]}")
    return float(found[1])


def settle(device: str) -> None:
    """Wait for the device, and let go of what was loaded."""
    gc.collect()
    if device != "cpu":
        torch.cuda.synchronize()


def storage_bytes() -> int:
    """Bytes that this process had storage fetch so far (read_bytes of /proc/self/io)."""
    return int(re.findall(r"read_bytes: (\d+)", Path("/proc/self/io").read_text(encoding="ascii"))[0])


def resident(paths: Sequence[Path]) -> int:
    """Pages of the files in the page cache."""
    total = 0
    for path in paths:
        with path.open("rb") as source:
            total += resident_pages(source.fileno())
    return total


def pages(paths: Sequence[Path]) -> int:
    return sum(-(-path.stat().st_size // mmap.PAGESIZE) for path in paths)


def made_cold(paths: Sequence[Path]) -> int:
    """Evict the files; pages that stayed.  Raises OSError when that cannot be proven or is not 0."""
    told = evict(paths)
    if not told["proven"]:
        raise OSError("; ".join(told["reasons"]))
    return int(told["pages_after"])


def made_warm(paths: Sequence[Path]) -> int:
    """Have every page of the files in the page cache; how many those are.  Raises OSError when some will not stay."""
    if resident(paths) != pages(paths):
        for path in paths:
            with path.open("rb", buffering=0) as source:
                while source.read(direct.WINDOW):
                    pass
    if (found := resident(paths)) != pages(paths):
        raise OSError(f"{found} of {pages(paths)} pages are in the page cache after reading all; too little memory is free")
    return found


def once(act: Callable[[], Any], paths: Sequence[Path], device: str, cold: bool) -> dict[str, Any]:
    """One repeat of one way: seconds, and what the page cache and the storage say of it."""
    before = made_cold(paths) if cold else made_warm(paths)
    fetched = storage_bytes()
    began = time.perf_counter()
    made = act()
    if device != "cpu":
        torch.cuda.synchronize()
    spent = time.perf_counter() - began
    row = {"seconds": made if isinstance(made, float) else spent, "storage_bytes": storage_bytes() - fetched,
           "resident_before": before, "resident_after": resident(paths)}
    del made
    settle(device)
    return row


@contextmanager
def readers(count: int) -> Iterator[None]:
    """Direct loading with so many threads, and two buffers more."""
    held = direct.READERS, direct.BUFFERS
    direct.READERS, direct.BUFFERS = count, count + 2
    try:
        yield
    finally:
        direct.READERS, direct.BUFFERS = held


def measure(
    model: Path, device: str, cold: int, warm: int, count: int, oracle: str | None, only: Sequence[str] | None,
) -> dict[str, Any]:
    """All ways, `cold` and `warm` times; rows by state and way.  One load of each is not counted: it makes what later ones find made."""
    paths = files_of(model)
    ways: dict[str, Callable[[], Any]] = {
        "plain": partial(plain, paths, count), "one-thread": partial(one_thread, paths, device),
        "direct": partial(ours, model, device, "direct"), "staged": partial(ours, model, device, "staged"),
        "safetensors": partial(safetensors, paths, device),
    }
    if oracle is not None:
        ways["vllm"] = partial(vllm, oracle, model)
    ways = {name: act for name, act in ways.items() if only is None or name in only}
    out: dict[str, dict[str, list[dict[str, Any]]]] = {"cold": {}, "warm": {}}
    with readers(count):
        for way in ways.keys() - {"plain", "vllm"}:
            once(ways[way], paths, device, cold=False)
        for state, repeats, order in (("cold", cold, COLD_WAYS), ("warm", warm, WARM_WAYS)):
            for turn in range(repeats):
                for way in (name for name in (*order[turn % 2 :], *order[: turn % 2]) if name in ways):
                    row = once(ways[way], paths, device, state == "cold")
                    out[state].setdefault(way, []).append(row)
                    print(f"{state} {way}: {row['seconds']:.3f} s", flush=True)
    return out


def judge(record: dict[str, Any]) -> dict[str, Any]:
    """Medians in bytes per second by state and way, and what direct loading is held to: null where a side was not measured."""
    size = record["bytes"]
    rate = {state: {way: size / statistics.median(row["seconds"] for row in rows) for way, rows in ways.items()}
            for state, ways in record["rows"].items()}

    def over(state: str, base: str) -> float | None:
        found = rate.get(state, {})
        return found["direct"] / found[base] if {"direct", base} <= found.keys() else None

    cold, warm = over("cold", "plain"), over("warm", "one-thread")
    return {
        "bytes_per_s": rate, "cold_over_plain": cold, "warm_over_one_thread": warm,
        "cold_holds": None if cold is None else cold >= COLD_SHARE, "warm_holds": None if warm is None else warm >= WARM_FACTOR,
    }


def page(records: dict[str, dict[str, Any]]) -> str:
    """The table of each record, by file name."""
    lines = ["# Loading a checkpoint", "", "Each way alone, on the same files in one run; seconds of each repeat, and GB/s of the median.",
             "Derived by `python -m tools.bench.load table` from the records named."]
    for source, record in records.items():
        told = judge(record)
        lines += ["", f"## `{source}`", "",
                  f"{record['model']}, {record['bytes'] / 1e9:.2f} GB in {record['files']} files on {record['file_system']}, to "
                  f"{record['device']}; {record['readers']} reader threads, {record['cpus']} CPUs; torch {record['torch']}; "
                  f"code {record['code_sha256'][:12]}.", "",
                  "| page cache | way | GB/s | seconds | from storage, GB | pages cached after |", "|---|---|---|---|---|---|"]
        for state, ways in record["rows"].items():
            for way, rows in ways.items():
                seconds = ", ".join(f"{row['seconds']:.3f}" for row in rows)
                fetched = statistics.median(row["storage_bytes"] for row in rows) / 1e9
                after = "%.0f %%" % (100 * statistics.median(row["resident_after"] for row in rows) / record["pages"])
                own = way == "vllm"
                lines.append(f"| {state} | {way} | {told['bytes_per_s'][state][way] / 1e9:.2f} | {seconds} | "
                             f"{'-' if own else f'{fetched:.2f}'} | {after} |")
        lines.append("")
        for name, value, least, base in (("cold", told["cold_over_plain"], COLD_SHARE, "plain"),
                                         ("warm", told["warm_over_one_thread"], WARM_FACTOR, "one-thread")):
            said = "not measured" if value is None else (
                f"{value:.2f} of {base}'s rate, at least {least} is asked: {'holds' if value >= least else 'FAILS'}")
            lines.append(f"Direct, {name}: {said}.")
    return "\n".join([*lines, ""])


def run(options: argparse.Namespace) -> int:
    """Measure, write the record; 0 when direct loading does what it is held to, else 1."""
    paths = files_of(options.model)
    card = options.device != "cpu"
    record: dict[str, Any] = {
        "schema": 1, "commit": options.commit, "code_sha256": code_sha256(ROOT), "model": options.model.resolve().name,
        "bytes": sum(path.stat().st_size for path in paths), "files": len(paths), "pages": pages(paths),
        "file_system": file_system(options.model), "device": torch.cuda.get_device_name() if card else "host memory",
        "torch": str(torch.__version__), "cpus": os.cpu_count(), "readers": options.readers, "window": direct.WINDOW,
        "rows": measure(options.model, options.device, options.cold, options.warm, options.readers, options.oracle, options.only),
    }
    record |= judge(record)
    options.out.write_bytes(to_json(record))
    print(page({options.out.name: record}))
    return 0 if record["cold_holds"] in (True, None) and record["warm_holds"] in (True, None) else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="load", description="Measure ways of loading a checkpoint.")
    acts = parser.add_subparsers(dest="act", required=True)
    runs = acts.add_parser("run")
    runs.add_argument("out", type=Path)
    runs.add_argument("model", type=Path)
    runs.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    runs.add_argument("--cold", type=int, default=3, help="repeats with a cold page cache")
    runs.add_argument("--warm", type=int, default=5, help="repeats with a warm one")
    runs.add_argument("--readers", type=int, default=direct.READERS)
    runs.add_argument("--only", nargs="+", choices=sorted({*COLD_WAYS, *WARM_WAYS}), help="ways to measure; all when not given")
    runs.add_argument("--oracle", help="name of an installed oracle whose own figure is to stand beside")
    runs.add_argument("--commit", help="commit of the code, where the machine has no repository")
    table = acts.add_parser("table")
    table.add_argument("page", type=Path)
    table.add_argument("records", type=Path, nargs="+")
    options = parser.parse_args(arguments)
    if options.act == "run":
        return run(options)
    options.page.write_text(page({str(path): json.loads(path.read_bytes()) for path in options.records}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
