"""From the C++ sources beside this file to a loaded library, or to none: then plain PyTorch serves.

The library is compiled once for sources, compiler, flags, CPU and OpenMP runtime as they are (all in its file name's hash) into the
user's cache folder, not beside the sources: a staged copy of them is evidence and stays as it is.  It is linked to the OpenMP runtime
that PyTorch has loaded, so both share one set of threads and `torch.set_num_threads` holds for both.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SOURCES = ("attention.cpp", "layers.cpp", "linear.cpp", "linear_few.cpp", "linear_many.cpp", "linear_panels.cpp", "rows.cpp")
HEADERS = ("amx.h", "vector.h")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp")
CACHE = Path(".cache", "vllm-parity", "kernels")
"""Below the user's home."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None where there is no x86-64, no g++, no OpenMP runtime of PyTorch's, or it cannot be compiled."""
    compiler, runtime = shutil.which("g++"), openmp_runtime()
    if platform.machine() not in ("x86_64", "AMD64") or compiler is None or runtime is None:
        return None
    try:
        loaded = load(build(compiler, FLAGS, runtime, Path.home() / CACHE))
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return None
    return loaded if loaded.instructions() is not None else None


def load(path: Path) -> ctypes.CDLL:
    """The library at `path`.  Raises OSError when it cannot be loaded."""
    loaded = ctypes.CDLL(str(path))
    loaded.instructions.restype = ctypes.c_char_p
    return loaded


def build(compiler: str, flags: Sequence[str], runtime: Path, cache: Path) -> Path:
    """The library's path inside `cache`; compiled when it is not there.  It appears whole or not at all.

    Raises OSError when `cache` cannot be written and `subprocess.SubprocessError` when the compiler fails.
    """
    version = _run([compiler, "--version"])
    digest = hashlib.sha256("\0".join((version, *flags, str(runtime), _cpu_flags())).encode())
    for name in (*HEADERS, *SOURCES):
        digest.update((FOLDER / name).read_bytes())
    made = cache / f"{digest.hexdigest()[:24]}.so"
    if made.exists():
        return made
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        objects = []
        for name in SOURCES:
            objects.append(str(Path(scratch, name).with_suffix(".o")))
            _run([compiler, *flags, "-c", str(FOLDER / name), "-o", objects[-1]])
        whole = Path(scratch, made.name)
        _run([compiler, "-shared", *objects, str(runtime), "-o", str(whole)])
        os.replace(whole, made)
    return made


def openmp_runtime() -> Path | None:
    """PyTorch's OpenMP runtime as loaded in this process; None when it cannot be told from those that other packages brought along.

    Two of them at once share some symbols and not others, and a loop that begins in one and goes on in the other ends in the void.
    """
    import torch

    try:
        mapped = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    paths = {Path(line.split(maxsplit=5)[5]) for line in mapped if line.count(" ") >= 5 and ".so" in line}
    return choose_runtime(paths, Path(torch.__file__).parent)


def choose_runtime(libraries: Collection[Path], package: Path) -> Path | None:
    """Of loaded `libraries`, the OpenMP runtime that lies in PyTorch's `package` (or its .libs), or else the only one."""
    found = sorted(path for path in libraries if path.name.startswith(("libgomp", "libiomp5", "libomp")))
    own = [path for path in found if path.is_relative_to(package) or path.is_relative_to(package.with_name(package.name + ".libs"))]
    if len(own) == 1:
        return own[0]
    return found[0] if len(found) == 1 else None


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL).stdout


def _cpu_flags() -> str:
    """What -march=native depends on."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "model name"))}))
