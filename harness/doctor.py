"""`parity doctor`: what this machine lacks for a series, and the cure."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.machine.gpu import GpuUnreadable, read_gpus
from harness.machine.identity import repository_record
from harness.machine.idle import check_idle
from harness.machine.idle_rule import IdleLimits
from harness.machine.lock import LockBusy, LockError, SeriesLock, lock_path
from harness.oracle import Oracle, OracleError, describe_oracle, list_oracles
from harness.oracle_env import refuse_unfit
from harness.series.arms import launch
from harness.series.model import LISTING, models_folder

FREE_DISK_GIB = 5
"""An oracle environment is about 2 GiB, a series with its stage a few MiB."""
KERNELS_TIMEOUT_S = 300


def examine(root: Path) -> list[dict[str, Any]]:
    """Findings {name, ok, detail}, in the order a newcomer would mend them.  Runs no leg and leaves nothing behind but
    the lowest use of GPU memory seen, beside the lock."""
    checks: list[tuple[str, Callable[[Path], tuple[bool, str]]]] = [
        ("system", _system), ("disk", _disk), ("memory accounting", _smaps), ("gpu", _gpu), ("lock", _lock), ("idle", _idle),
        ("oracles", _oracles), ("toolkit", _toolkit), ("kernels", _kernels), ("models", _models), ("tree", _tree),
    ]
    findings = []
    for name, check in checks:
        ok, detail = check(root)
        findings.append({"name": name, "ok": ok, "detail": detail})
    return findings


def _system(_: Path) -> tuple[bool, str]:
    found = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    return platform.system() == "Linux", found if platform.system() == "Linux" else f"{found}: series run on Linux only (flock, /proc)"


def _disk(root: Path) -> tuple[bool, str]:
    free = shutil.disk_usage(root).free / 2**30
    return free >= FREE_DISK_GIB, f"{free:.0f} GiB free, {FREE_DISK_GIB} are needed"


def _smaps(_: Path) -> tuple[bool, str]:
    try:
        text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    except OSError as error:
        return False, f"/proc/self/smaps_rollup is unreadable ({error.strerror}): memory legs would be void; use Linux 4.14 or newer"
    return "Pss:" in text, "smaps_rollup is readable" if "Pss:" in text else "smaps_rollup has no Pss: memory legs would be void"


def _gpu(_: Path) -> tuple[bool, str]:
    try:
        gpus = read_gpus()
    except GpuUnreadable as error:
        return False, f"{error}: a series would be refused"
    if gpus is None:
        return True, "no NVIDIA driver: CPU series only"
    return True, "; ".join(f"{gpu.index}: {gpu.name}, utilisation {gpu.utilisation} %" for gpu in gpus)


def _lock(_: Path) -> tuple[bool, str]:
    try:
        path = lock_path(None)
        with SeriesLock(path, "parity doctor") as lock:
            lock.acquire(0.0)
    except (LockBusy, LockError) as error:
        return False, str(error)
    return True, f"{path} is free"


def _idle(_: Path) -> tuple[bool, str]:
    found = check_idle(IdleLimits(wait_max_s=0.0), {os.getpid()}, None, lock_path(None))
    return found["ok"], "idle" if found["ok"] else "; ".join(found["reasons"])


def _oracles(root: Path) -> tuple[bool, str]:
    rows = [describe_oracle(oracle, root) for oracle in list_oracles(root)]
    installed = [row["name"] for row in rows if row["installed"]]
    missing = ", ".join(row["name"] for row in rows if not row["installed"])
    if installed:
        return True, f"installed: {', '.join(installed)}" + (f"; not installed: {missing}" if missing else "")
    return False, f"none installed of {missing}; run `parity oracle install NAME`"


def _toolkit(root: Path) -> tuple[bool, str]:
    """Driver, toolkit, torch and extensions of each installed oracle that needs an accelerator."""
    told = []
    for oracle in list_oracles(root):
        if describe_oracle(oracle, root)["installed"]:
            try:
                versions = refuse_unfit(oracle, root, os.environ)
            except OracleError as error:
                return False, str(error)
            if versions is not None:
                told.append(f"{oracle.name}: " + ", ".join(f"{name} {value or 'unknown'}" for name, value in versions.items()))
    return True, "; ".join(told) or "no installed oracle needs one"


def _kernels(root: Path) -> tuple[bool, str]:
    """One tiny kernel of each extension, in the engine's interpreter and in that of each oracle that this machine can run.

    Inside the lock: on a machine that measures they would be company.
    """
    try:
        device = "cuda" if read_gpus() else "cpu"
        with SeriesLock(lock_path(None), "parity doctor") as lock:
            lock.acquire(0.0)
            fit = [oracle for oracle in list_oracles(root) if describe_oracle(oracle, root)["installed"]]
            found = [_smoke(root, None, device), *(_smoke(root, oracle, _device(oracle)) for oracle in fit)]
    except (GpuUnreadable, LockBusy, LockError, OracleError) as error:
        return False, f"not run: {error}"
    return all(ok for ok, _ in found), "; ".join(text for _, text in found)


def _device(oracle: Oracle) -> str:
    return "cuda" if oracle.machine.accelerator == "cuda" else "cpu"


def _smoke(root: Path, oracle: Oracle | None, device: str) -> tuple[bool, str]:
    """The kernels of one interpreter, started as an arm is."""
    driver, name = ("engine", "engine") if oracle is None else ("vllm", oracle.name)
    command = launch({"driver": driver, "environment": oracle.environment if oracle else {}}, root, root, oracle, root)
    argv = [*command.argv[:-1], "legs.drivers.smoke", driver, device]
    try:
        done = subprocess.run(argv, env=command.environment, capture_output=True, text=True, check=False, timeout=KERNELS_TIMEOUT_S,
                              stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, f"{name} on {device}: {error}"
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"kernel"')]
    told = [f"{row['kernel']} {'ok' if row['ok'] else 'FAILS'} ({row['detail']})" for row in rows]
    if done.returncode or not rows:
        words = done.stderr.strip().splitlines()[-1:] or ["no words"]
        told.append(f"then it ended with {done.returncode}: {words[0][:300]}")
    return done.returncode == 0 and bool(rows) and all(row["ok"] for row in rows), f"{name} on {device}: {', '.join(told)}"


def _models(root: Path) -> tuple[bool, str]:
    found = sorted(path.parent.name for path in models_folder(root).glob(f"*/{LISTING}"))
    return bool(found), ", ".join(found) or f"no checkpoint in {models_folder(root).name}; run `make model`"


def _tree(root: Path) -> tuple[bool, str]:
    record = repository_record(root)
    if record["commit"] is None:
        return True, "not a git checkout: series made here are non-binding"
    return True, f"commit {record['commit'][:12]}" + (", with changes: series made here are non-binding" if record["dirty"] else "")
