"""Record what a machine with one NVIDIA card is and can do, as one JSON file that grows section by section.

    python -m tools.bench.platform_facts OUT.json [--commit HASH] [--only SECTION ...] [--scratch FOLDER]

A section that fails holds its error; a file cut short holds the sections that were done.  The record names the machine by a hash.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from harness.machine import host
from legs.protocol import to_json

DISK_BYTES = 2 << 30
PACKAGES = ("torch", "triton", "transformers", "numpy", "nvidia-ml-py", "safetensors", "nvidia-cublas", "vllm")


def versions() -> dict[str, Any]:
    """Software and host: packages, kernel, processor, memory."""
    import torch

    def version(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    cpu = host.cpu_info()
    return {
        "python": platform.python_version(), "packages": {name: version(name) for name in PACKAGES}, "cuda_of_torch": torch.version.cuda,
        "kernel": host.kernel(), "libc": " ".join(platform.libc_ver()), "cpu": cpu.model, "cores": cpu.cores,
        "memory_bytes_at_start": host.memory_bytes(),
        "huge_pages": host.read_text("transparent_hugepage/enabled", Path("/sys/kernel/mm")).strip() or None,
    }


def sections(scratch: Path) -> dict[str, Callable[[], Any]]:
    """Every section by name, in the order they must run: NVML first, while no process of ours has the card."""
    from tools.bench import platform_host

    def nvml() -> Any:
        from tools.bench import platform_nvml

        return platform_nvml.watch()

    def gpu(name: str) -> Callable[[], Any]:
        def run() -> Any:
            from tools.bench import platform_gpu

            return getattr(platform_gpu, name)()
        return run

    return {
        "nvml": nvml,
        "versions": versions,
        "pss_pass": platform_host.pss_pass_cost,
        "disk": lambda: platform_host.disk(scratch, DISK_BYTES),
        "pinned_in_pss": platform_host.pinned_in_pss,
        **{name: gpu(name) for name in ("transfers", "bandwidth", "matmul", "graph_replay", "dependent_launch", "linears")},
    }


def save(path: Path, record: dict[str, Any]) -> None:
    """Replace `path` with the record so far."""
    scratch = path.with_name(f".{path.name}")
    scratch.write_bytes(to_json(record))
    os.replace(scratch, path)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: 0 when every section asked for has a value, 1 when one holds an error."""
    parser = argparse.ArgumentParser(prog="platform_facts", description="Record what a machine with one NVIDIA card is and can do.")
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("--commit", help="commit of the code, where the machine has no repository")
    parser.add_argument("--only", nargs="+", metavar="SECTION", help="run these sections alone")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="folder on the disk to measure")
    chosen = parser.parse_args(arguments)
    offered = sections(chosen.scratch)
    if unknown := sorted(set(chosen.only or ()) - offered.keys()):
        parser.error(f"--only: {unknown[0]!r} is not a section; they are {', '.join(offered)}")
    record: dict[str, Any] = {"schema": 1, "commit": chosen.commit, "started_utc": datetime.now(UTC).isoformat(timespec="seconds"),
                              "host_sha256_12": host.host_hash(), "sections": {}}
    for name, run in offered.items():
        if chosen.only and name not in chosen.only:
            continue
        start = time.perf_counter()
        try:
            value = {"value": run()}
        except Exception as error:
            value = {"error": f"{type(error).__name__}: {error}"}
        record["sections"][name] = {**value, "took_s": time.perf_counter() - start}
        save(chosen.out, record)
        print(f"{name}: {'error: ' + value['error'] if 'error' in value else 'done'} ({time.perf_counter() - start:.1f} s)", flush=True)
    return int(any("error" in section for section in record["sections"].values()))


if __name__ == "__main__":
    sys.exit(main())
