"""How an oracle's environment comes to lie in .oracles/NAME: from its lock by pip, or from a kit carried to a machine without an index."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from harness.oracle import (
    STAMP,
    Oracle,
    OracleError,
    describe_oracle,
    oracle_folder,
    oracle_lock,
    pythons,
    refusals,
    site_interpreter,
)
from harness.oracle_role import wrong_identity
from legs.protocol import sha256

KIT_ARCHIVE, KIT_IDENTITY = "kit.tar.xz", "kit.json"


def install_oracle(oracle: Oracle, root: Path, progress: Callable[[str], None], kit: Path | None = None) -> None:
    """Build .oracles/NAME from its lock, or from the folder `kit` (tools/bench/oracle_kit.py); do nothing when that is done.  Safe to run
    again after any failure.

    Raises :class:`OracleError` when this machine is not one the oracle is for or the kit is not of its lock (nothing is touched then),
    when pip fails, or when the result is not what the oracle file says.
    """
    if reasons := refusals(oracle):
        raise OracleError(f"oracle {oracle.name} cannot be installed here: {'; '.join(reasons)}")
    folder, lock = oracle_folder(oracle, root), oracle_lock(oracle, root)
    digest = sha256(lock.read_bytes())
    if kit is not None:
        _check_kit(oracle, kit, digest)
    if describe_oracle(oracle, root)["installed"]:
        progress(f"{oracle.name}: installed already")
        return
    if folder.exists():
        progress(f"{oracle.name}: removing an unfinished or outdated environment")
        shutil.rmtree(folder)
    if kit is not None:
        progress(f"{oracle.name}: unpacking the kit")
        folder.mkdir(parents=True)
        _run(["tar", "--extract", "--xz", "--no-same-owner", "--file", str(kit / KIT_ARCHIVE), "--directory", str(folder)], "tar", progress)
    elif oracle.obtain.way == "site":
        _pip(oracle, [str(site_interpreter(oracle)), "-m", "pip", "install", "--no-compile", "--target", str(folder)], lock, progress)
    else:
        progress(f"{oracle.name}: making the environment")
        _run([pythons()[oracle.machine.python], "-m", "venv", str(folder)], "venv", progress)
        _pip(oracle, [str(folder / "bin" / "python"), "-m", "pip", "install", "--require-hashes"], lock, progress)
    progress(f"{oracle.name}: checking what was installed")
    _verify(oracle, folder, root)
    (folder / STAMP).write_text(digest + "\n")
    progress(f"{oracle.name}: ready ({oracle.identity.distribution} {oracle.identity.version})")


def _check_kit(oracle: Oracle, kit: Path, digest: str) -> None:
    if oracle.obtain.way != "site":
        raise OracleError(f"oracle {oracle.name} has an environment of its own and comes from its lock alone; leave --kit away")
    try:
        identity = json.loads((kit / KIT_IDENTITY).read_bytes())
        found, wanted, pins = sha256((kit / KIT_ARCHIVE).read_bytes()), identity["sha256"], identity["pins_sha256"]
    except (OSError, ValueError, KeyError) as error:
        raise OracleError(f"kit {kit.name}: {KIT_IDENTITY} or {KIT_ARCHIVE} cannot be read ({type(error).__name__}: {error}); "
                          "make one with `python -m tools.bench.oracle_kit build FOLDER`") from error
    if found != wanted:
        raise OracleError(f"kit {kit.name}: {KIT_ARCHIVE} has sha256 {found}, {KIT_IDENTITY} says {wanted}; carry the kit over again")
    if pins != digest:
        raise OracleError(f"kit {kit.name}: made from another list of versions than legs/oracles/{oracle.obtain.lock}; make it again")


def _pip(oracle: Oracle, install: list[str], lock: Path, progress: Callable[[str], None]) -> None:
    total = sum(1 for line in lock.read_text().splitlines() if "==" in line and not line.startswith("#"))
    seen = 0

    def count(line: str) -> None:
        nonlocal seen
        if line.startswith("Collecting "):
            seen += 1
            progress(f"{oracle.name}: {seen} of {total}: {line.split()[1]}")
        elif line.startswith("Installing"):
            progress(f"{oracle.name}: unpacking {total} packages, {oracle.obtain.megabytes} MB (a minute or two)")

    _run([*install, "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--progress-bar", "off", "--requirement", str(lock)],
         "pip", count)


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
    site = oracle.obtain.way == "site"
    python = site_interpreter(oracle) if site else folder / "bin" / "python"
    environment = {"PYTHONPATH": os.pathsep.join(map(str, (root, folder) if site else (root,))), "PATH": "/usr/bin:/bin"}
    asked = subprocess.run([str(python), "-P", "-c", code], env=environment, capture_output=True, text=True, check=False)
    if asked.returncode:
        raise OracleError(f"oracle {oracle.name}: the new interpreter fails: {asked.stderr.strip().splitlines()[-1:]}")
    told = json.loads(asked.stdout)
    if reasons := wrong_identity(oracle, {**told, "name": oracle.identity.engine, "version": told["distribution_version"]}):
        raise OracleError(f"oracle {oracle.name}: what was installed is not what its file says: {'; '.join(reasons)}")
