"""The pinned vLLM builds: what a pin is (legs/oracles/NAME.toml), how its environment is made, and which role a leg of it had.

An oracle file is the only place that names a version.  Its environment lies in .oracles/NAME, apart from ours.
"""

from __future__ import annotations

import functools
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.oracle_role import role_of, wrong_identity
from harness.strict import SpecError, build, read_toml
from legs.protocol import sha256

__all__ = [
    "Oracle", "OracleError", "describe_oracle", "install_oracle", "list_oracles", "load_oracle", "oracle_python", "oracle_site", "role_of",
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
    """`lock`: an environment built from a lock of hashed wheels.  `site`: a folder of packages beside the machine's own interpreter."""

    way: str
    megabytes: int
    lock: str | None = None


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
        ("obtain.lock", obtain.lock, (obtain.lock is not None) == (obtain.way == "lock"), "way `lock` needs it, `site` has none"),
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
    if oracle.obtain.way == "site":
        if not (folder / oracle.identity.engine).is_dir():
            raise OracleError(f"oracle {oracle.name} is not installed: unpack its packages into .oracles/{oracle.name} on a machine with "
                              f"CPython {oracle.machine.python} and torch {oracle.identity.torch}")
        return _interpreter(oracle)
    python, stamp = folder / "bin" / "python", folder / STAMP
    if not python.exists() or not stamp.is_file():
        raise OracleError(f"oracle {oracle.name} is not installed: run `parity oracle install {oracle.name}`")
    if stamp.read_text().strip() != sha256(_lock(oracle, root).read_bytes()):
        raise OracleError(f"oracle {oracle.name} was installed from another lock: run `parity oracle install {oracle.name}`")
    return python


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
        "machine": platform.machine(), "cpu_flags": flags, "cuda": Path("/proc/driver/nvidia/version").exists(), "pythons": _pythons(),
    }


@functools.cache
def _pythons() -> dict[str, str]:
    """CPython interpreters here, ours first, each asked for its own version (a shim on PATH may lead nowhere)."""
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


def _interpreter(oracle: Oracle) -> Path:
    """For packages that lie beside the machine's own torch: the interpreter that runs this, for it sees that torch, else another of the
    right version."""
    if reasons := refusals(oracle):
        raise OracleError(f"oracle {oracle.name} cannot run here: {'; '.join(reasons)}")
    own = ".".join(platform.python_version_tuple()[:2]) == oracle.machine.python
    return Path(sys.executable if own else _pythons()[oracle.machine.python])


def _lock(oracle: Oracle, root: Path) -> Path:
    return oracles_folder(root) / str(oracle.obtain.lock)


def install_oracle(oracle: Oracle, root: Path, progress: Callable[[str], None]) -> None:
    """Build .oracles/NAME from its lock, or do nothing when that is done.  Safe to run again after any failure.

    Raises :class:`OracleError` when this machine is not one the lock is for (nothing is touched then), when pip fails, or when the
    result is not what the oracle file says.
    """
    if reasons := refusals(oracle):
        raise OracleError(f"oracle {oracle.name} cannot be installed here: {'; '.join(reasons)}")
    if oracle.obtain.way != "lock":
        raise OracleError(f"oracle {oracle.name} is not installed by this command: its packages are unpacked into .oracles/{oracle.name}")
    folder, lock = oracle_folder(oracle, root), _lock(oracle, root)
    digest = sha256(lock.read_bytes())
    if describe_oracle(oracle, root)["installed"]:
        progress(f"{oracle.name}: installed already")
        return
    if folder.exists():
        progress(f"{oracle.name}: removing an unfinished or outdated environment")
        shutil.rmtree(folder)
    progress(f"{oracle.name}: making the environment")
    _run([_pythons()[oracle.machine.python], "-m", "venv", str(folder)], "venv", progress)
    _pip(oracle, folder, lock, progress)
    progress(f"{oracle.name}: checking what was installed")
    _verify(oracle, folder, root)
    (folder / STAMP).write_text(digest + "\n")
    progress(f"{oracle.name}: ready ({oracle.identity.distribution} {oracle.identity.version})")


def _pip(oracle: Oracle, folder: Path, lock: Path, progress: Callable[[str], None]) -> None:
    total = sum(1 for line in lock.read_text().splitlines() if "==" in line and not line.startswith("#"))
    seen = 0

    def count(line: str) -> None:
        nonlocal seen
        if line.startswith("Collecting "):
            seen += 1
            progress(f"{oracle.name}: {seen} of {total}: {line.split()[1]}")
        elif line.startswith("Installing"):
            progress(f"{oracle.name}: unpacking {total} packages, {oracle.obtain.megabytes} MB (a minute or two)")

    _run([str(folder / "bin" / "python"), "-m", "pip", "install", "--no-deps", "--require-hashes", "--disable-pip-version-check",
          "--progress-bar", "off", "--requirement", str(lock)], "pip", count)


def _run(command: list[str], what: str, line: Callable[[str], None]) -> None:
    """Run `command`, hand each line of its output to `line`; raise :class:`OracleError` with its last words when it fails."""
    last: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for text in process.stdout:
            last = [*last[-7:], text.rstrip()]
            line(text.rstrip())
    if process.returncode:
        raise OracleError(
            f"{what} failed with exit code {process.returncode}: {' | '.join(last)}. Packages come from where pip is configured to look; "
            "a CPU build of torch is on no default index: name a place that has it in PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL")


def _verify(oracle: Oracle, folder: Path, root: Path) -> None:
    """Have the new interpreter tell its identity, by the code that a leg tells it with, and compare it with the oracle file."""
    code = "import json; from legs.drivers.vllm import identity; print(json.dumps(identity('vllm')))"
    environment = {"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin"}
    asked = subprocess.run([str(folder / "bin" / "python"), "-P", "-c", code], env=environment, capture_output=True, text=True, check=False)
    if asked.returncode:
        raise OracleError(f"oracle {oracle.name}: the new interpreter fails: {asked.stderr.strip().splitlines()[-1:]}")
    told = json.loads(asked.stdout)
    if reasons := wrong_identity(oracle, {**told, "name": oracle.identity.engine, "version": told["distribution_version"]}):
        raise OracleError(f"oracle {oracle.name}: what was installed is not what its file says: {'; '.join(reasons)}")
