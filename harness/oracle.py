"""The pinned vLLM builds: what a pin is (legs/oracles/NAME.toml), where its environment lies, and which role a leg of it had.

An oracle file is the only place that names a version.  Its environment lies in .oracles/NAME, apart from ours.
"""

from __future__ import annotations

import functools
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.oracle_role import role_of
from harness.strict import SpecError, build, read_toml
from legs.protocol import sha256

__all__ = [
    "Oracle", "OracleError", "describe_oracle", "list_oracles", "load_oracle", "oracle_python", "oracle_site", "role_of",
]

SCHEMA = 1
WAYS = ("lock", "site")
ACCELERATORS = ("none", "cuda")
STAMP = "installed.sha256"
"""In an environment's folder, written last: the hash of the lock it was built from."""


class OracleError(RuntimeError):
    """An oracle that cannot be had here; the message says what was found and what to do."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What the engine says of itself, inside its process.  `record_sha256` as legs.drivers.vllm.identity has it; empty: not known."""

    engine: str
    distribution: str
    version: str
    torch: str
    record_sha256: str


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the build needs: CPython `major.minor`, `uname -m`, flags of /proc/cpuinfo, accelerator `none` or `cuda`."""

    python: str
    machine: str
    cpu_flags: tuple[str, ...]
    accelerator: str


@dataclass(frozen=True, kw_only=True)
class Obtain:
    """`lock`: an environment built from a lock of hashed wheels.  `site`: a folder of packages beside the machine's own interpreter
    and torch.  `lock` names the list of exact versions, a file beside the oracle's.
    """

    way: str
    megabytes: int
    lock: str


@dataclass(frozen=True, kw_only=True)
class Oracle:
    schema: int
    name: str
    title: str
    identity: Identity
    left_out: dict[str, str]
    """Requirements of the distribution that are not installed, each with the reason."""
    machine: Machine
    obtain: Obtain
    environment: dict[str, str]
    production: dict[str, Any]
    """Resolved settings that a leg in the role `pin` has."""


def oracles_folder(root: Path) -> Path:
    return root / "legs" / "oracles"


def load_oracle(name: str, root: Path) -> Oracle:
    """Read legs/oracles/NAME.toml strictly.  Raises :class:`SpecError` naming file, field and value."""
    path = oracles_folder(root) / f"{name}.toml"
    if not path.is_file() or path.stem != name:
        raise SpecError(f"legs/oracles/{name}.toml", "oracle", name, f"there is no such file; oracles: {', '.join(_names(root))}")
    oracle = build(Oracle, read_toml(path), path.name)
    obtain, accelerator, eager = oracle.obtain, oracle.machine.accelerator, oracle.production.get("enforce_eager")
    for field, value, good, advice in (
        ("schema", oracle.schema, oracle.schema == SCHEMA, f"this version reads schema {SCHEMA}"),
        ("name", oracle.name, oracle.name == name, "must be the file's own name"),
        ("obtain.way", obtain.way, obtain.way in WAYS, f"one of {', '.join(WAYS)}"),
        ("machine.accelerator", accelerator, accelerator in ACCELERATORS, f"one of {', '.join(ACCELERATORS)}"),
        ("production.enforce_eager", eager, isinstance(eager, bool), "true or false: it tells the roles `pin` and `eager` apart"),
    ):
        if not good:
            raise SpecError(path.name, field, value, advice)
    return oracle


def list_oracles(root: Path) -> list[Oracle]:
    """All oracles of the repository, by name."""
    return [load_oracle(name, root) for name in _names(root)]


def _names(root: Path) -> list[str]:
    return sorted(path.stem for path in oracles_folder(root).glob("*.toml"))


def oracle_folder(oracle: Oracle, root: Path) -> Path:
    return root / ".oracles" / oracle.name


def oracle_python(oracle: Oracle, root: Path) -> Path:
    """The interpreter that runs this oracle.  Raises :class:`OracleError` when its environment is missing, unfinished or outdated."""
    folder = oracle_folder(oracle, root)
    stamp = folder / STAMP
    if not stamp.is_file():
        raise OracleError(f"oracle {oracle.name} is not installed: run `parity oracle install {oracle.name}`")
    if stamp.read_text().strip() != sha256(oracle_lock(oracle, root).read_bytes()):
        raise OracleError(f"oracle {oracle.name} was installed from another lock: run `parity oracle install {oracle.name}`")
    return site_interpreter(oracle) if oracle.obtain.way == "site" else folder / "bin" / "python"


def oracle_site(oracle: Oracle, root: Path) -> Path | None:
    """The folder of packages to put on the arm's search path beside the stage, for an oracle obtained as `site`."""
    return oracle_folder(oracle, root) if oracle.obtain.way == "site" else None


def describe_oracle(oracle: Oracle, root: Path) -> dict[str, Any]:
    """The oracle as a person or a machine wants to see it; `state` says why `installed` is false."""
    try:
        oracle_python(oracle, root)
        state = "installed"
    except OracleError as error:
        state = str(error)
    return {
        "name": oracle.name, "title": oracle.title, "distribution": oracle.identity.distribution, "version": oracle.identity.version,
        "torch": oracle.identity.torch, "record_sha256": oracle.identity.record_sha256, "installed": state == "installed", "state": state,
        "refusals": refusals(oracle), "left_out": dict(oracle.left_out), "environment": dict(oracle.environment),
        "production": dict(oracle.production),
    }


def refusals(oracle: Oracle, found: Mapping[str, Any] | None = None) -> list[str]:
    """Reasons why this machine cannot run the oracle, each naming what is needed and what was found; empty when it can.

    `found` defaults to :func:`this_machine`.
    """
    found = this_machine() if found is None else found
    need, reasons = oracle.machine, []
    if found["machine"] != need.machine:
        reasons.append(f"needs a {need.machine} machine, this one is {found['machine']}")
    if missing := sorted(set(need.cpu_flags) - set(found["cpu_flags"])):
        reasons.append(f"needs the CPU flags {', '.join(need.cpu_flags)}; this CPU lacks {', '.join(missing)}")
    if need.accelerator == "cuda" and not found["cuda"]:
        reasons.append("needs an NVIDIA GPU with its driver; this machine has none")
    if found["pythons"].get(need.python) is None:
        there = ", ".join(sorted(found["pythons"])) or "none"
        reasons.append(f"needs CPython {need.python}; found here: {there}")
    return reasons


def this_machine() -> dict[str, Any]:
    """What :func:`refusals` compares: machine, cpu_flags, cuda, pythons {version: path}."""
    flags: list[str] = []
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = (line for line in info.read_text(encoding="utf-8", errors="replace").splitlines() if line.startswith("flags"))
        flags = next(lines, "").partition(":")[2].split()
    return {
        "machine": platform.machine(), "cpu_flags": flags, "cuda": Path("/proc/driver/nvidia/version").exists(), "pythons": pythons(),
    }


@functools.cache
def pythons() -> dict[str, str]:
    """{version: path} of CPython interpreters here, ours first, each asked for its own version (a shim on PATH may lead nowhere)."""
    found: dict[str, str] = {}
    own = getattr(sys, "_base_executable", None) or sys.executable
    for candidate in (own, *map(shutil.which, ("python3.11", "python3.12", "python3.13", "python3"))):
        if not candidate:
            continue
        asked = subprocess.run(
            [candidate, "-c", "import platform as p; print(p.python_implementation(), '.'.join(p.python_version_tuple()[:2]))"],
            capture_output=True, text=True, check=False,
        )
        kind, _, version = asked.stdout.strip().partition(" ")
        if asked.returncode == 0 and kind == "CPython":
            found.setdefault(version, candidate)
    return found


def site_interpreter(oracle: Oracle) -> Path:
    """For packages that lie beside the machine's own torch: the interpreter that runs this, for it sees that torch, else another of the
    right version."""
    if reasons := refusals(oracle):
        raise OracleError(f"oracle {oracle.name} cannot run here: {'; '.join(reasons)}")
    own = ".".join(platform.python_version_tuple()[:2]) == oracle.machine.python
    return Path(sys.executable if own else pythons()[oracle.machine.python])


def oracle_lock(oracle: Oracle, root: Path) -> Path:
    """The list of exact versions that its environment is built from."""
    return oracles_folder(root) / oracle.obtain.lock
