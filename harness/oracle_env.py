"""Which CUDA toolkit an oracle compiles with, and whether driver, toolkit, torch and the oracle's own extensions fit each other.

Told before a series: a mismatch shows otherwise only after minutes of loading, or in a kernel that a driver rejects.
"""

from __future__ import annotations

import mmap
import os
import platform
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.machine.gpu import Gpu, GpuUnreadable
from harness.oracle import Oracle, OracleError, oracle_folder

VARIABLE = "VLLM_CUDA_HOME"
_DEFAULT_HOME = Path("/usr/local/cuda")
_LIBRARY = re.compile(rb"libcudart\.so\.(\d+)")


@dataclass(frozen=True, kw_only=True)
class OracleEnv:
    """What VLLM_CUDA_HOME made of an arm's environment; `record` is fit for evidence."""

    variables: dict[str, str]
    """To set on top of the arm's own; empty when the variable is unset."""
    record: dict[str, Any]
    """{"state": "unset" | "set", "toolkit": version or None}."""


def resolve_oracle_env(environment: Mapping[str, str]) -> OracleEnv:
    """The toolkit that `environment` (the shell's) chooses for an oracle that may compile just in time.

    Unset changes nothing at all.  Set to a toolkit, that toolkit and no other: CUDA_HOME, and its `bin` first on PATH.  Raises
    :class:`OracleError` when it is set to a folder that holds none.
    """
    value = environment.get(VARIABLE)
    if value is None:
        return OracleEnv(variables={}, record={"state": "unset", "toolkit": None})
    home = Path(value)
    if not value or not home.is_absolute() or not os.access(home / "bin" / "nvcc", os.X_OK):
        raise OracleError(f"{VARIABLE}={value!r}: there is no bin/nvcc in it; name a CUDA toolkit by its full path, or unset the variable")
    path = os.pathsep.join(filter(None, (str(home / "bin"), environment.get("PATH"))))
    return OracleEnv(variables={"CUDA_HOME": str(home), "PATH": path}, record={"state": "set", "toolkit": toolkit_version(home)})


def toolkit_version(home: Path) -> str | None:
    """A toolkit's `major.minor`, from CUDA_VERSION in its cuda.h (1000 x major + 10 x minor), or None."""
    try:
        text = (home / "include" / "cuda.h").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"#define\s+CUDA_VERSION\s+(\d+)", text)
    return f"{int(found[1]) // 1000}.{int(found[1]) % 1000 // 10}" if found else None


@dataclass(frozen=True, kw_only=True)
class Versions:
    """Each `major.minor`, `extension` a major alone; None where it is not there or cannot be read."""

    driver: str | None
    """The newest CUDA that the driver takes, PTX included."""
    toolkit: str | None
    torch: str | None
    extension: str | None
    """Of the libcudart that the oracle's compiled extensions link."""
    libc: str | None


def diagnose_versions(versions: Versions) -> list[str]:
    """Reasons why these versions do not go together, each with its cure; empty when they do.

    A toolkit that is not there compiles nothing, so it is in no one's way.
    """
    driver, toolkit, torch, libc = (_parts(text) for text in (versions.driver, versions.toolkit, versions.torch, versions.libc))
    if driver is None:
        return ["the driver's CUDA version is unreadable; check that nvidia-smi works for this user"]
    reasons = []
    if torch is not None and torch[0] > driver[0]:
        reasons.append(f"torch is built for CUDA {versions.torch}, the driver takes CUDA {versions.driver} at most: update the driver")
    if toolkit is not None and toolkit > driver:
        reasons.append(f"toolkit {versions.toolkit} makes PTX that this driver rejects when it loads it (cudaErrorUnsupportedPtxVersion), "
                       f"after a clean build: the driver takes CUDA {versions.driver} at most; name an older toolkit in {VARIABLE}, or "
                       "update the driver")
    if toolkit is not None and torch is not None and toolkit[0] != torch[0]:
        reasons.append(f"toolkit {versions.toolkit} and torch for CUDA {versions.torch} are of two majors, and mixed headers do not "
                       f"compile: name a toolkit {torch[0]}.x in {VARIABLE}")
    if toolkit is not None and versions.extension is not None and str(toolkit[0]) != versions.extension:
        reasons.append(f"the oracle's extensions link libcudart.so.{versions.extension}, the toolkit is {versions.toolkit}: name a toolkit "
                       f"{versions.extension}.x in {VARIABLE}")
    if toolkit == (13, 0) and libc is not None and libc >= (2, 42):
        reasons.append(f"headers of toolkit 13.0 collide with those of glibc {versions.libc} (rsqrt): name a newer toolkit in {VARIABLE}")
    return reasons


def read_versions(oracle: Oracle, root: Path, environment: Mapping[str, str]) -> Versions:
    """The versions that an arm of `oracle` would meet here.  Raises :class:`OracleError` as resolve_oracle_env does."""
    chosen = resolve_oracle_env(environment)
    toolkit = chosen.record["toolkit"] if chosen.variables else toolkit_version(_found_home(environment))
    build = re.search(r"\+cu(\d+)(\d)$", oracle.identity.torch)
    name, libc = platform.libc_ver()
    return Versions(
        driver=_driver(), toolkit=toolkit, torch=f"{build[1]}.{build[2]}" if build else None,
        extension=_extension(oracle_folder(oracle, root), oracle.identity.engine), libc=libc if name == "glibc" else None,
    )


def refuse_unfit(oracle: Oracle, root: Path, environment: Mapping[str, str]) -> dict[str, Any] | None:
    """The versions as a record; None for an oracle without an accelerator.  Raises :class:`OracleError` when they do not go together."""
    if oracle.machine.accelerator != "cuda":
        return None
    versions = read_versions(oracle, root, environment)
    if reasons := diagnose_versions(versions):
        raise OracleError(f"oracle {oracle.name} cannot run here: {'; '.join(reasons)}")
    return asdict(versions)


def _parts(text: str | None) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", text or "")
    return (int(found[1]), int(found[2])) if found else None


def _found_home(environment: Mapping[str, str]) -> Path:
    """The toolkit that a compiler looked up on PATH belongs to, else the usual place."""
    compiler = shutil.which("nvcc", path=environment.get("PATH"))
    return Path(compiler).resolve().parents[1] if compiler else _DEFAULT_HOME


def _driver() -> str | None:
    try:
        with Gpu() as gpu:
            return next((identity.cuda_driver for identity in gpu.identities()), None)
    except GpuUnreadable:
        return None


def _extension(folder: Path, engine: str) -> str | None:
    """The major of the libcudart that the first of the engine's compiled extensions names."""
    for path in sorted(folder.rglob(f"{engine}/_C*.so")):
        with path.open("rb") as source, mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if found := _LIBRARY.search(data):
                return found[1].decode()
    return None
