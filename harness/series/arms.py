"""How an arm's process is started: its interpreter, its search path and its environment, each of them exactly what is declared."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.oracle import Oracle, oracle_python, oracle_site
from harness.oracle_env import resolve_oracle_env
from legs.protocol import MODEL_VARIABLE, SITE_VARIABLE

PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")
"""Variables that reach an arm from the shell.  Nothing else does: a stray toggle cannot change a measured arm."""

FIXED = {
    "PYTHONDONTWRITEBYTECODE": "1",  # the staged copy is evidence: an arm must not write into it
    "PYTHONHASHSEED": "0",
    "PYTHONNOUSERSITE": "1",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A command ready to start; `shown` is the same without this machine's paths, for the record."""

    argv: list[str]
    environment: dict[str, str]
    shown: list[str]
    oracle_environment: dict[str, Any] | None
    """Which toolkit VLLM_CUDA_HOME chose; None for an arm that has no use for one."""


def launch(arm: Mapping[str, Any], stage: Path, model: Path, oracle: Oracle | None, root: Path) -> Launch:
    """The command of one arm of the plan (an entry of its `arms`).

    Whatever runs in this interpreter runs with `-S`: a development install puts the repository on the search path, and an arm must see
    the staged copy only.
    """
    module = f"legs.drivers.{arm['driver']}"
    python = sys.executable if oracle is None else str(oracle_python(oracle, root))
    site = oracle_site(oracle, root) if oracle is not None else None
    sites = [str(site)] if site else []
    flags = ["-P"]
    if oracle is None or (site and python == sys.executable):
        flags, sites = ["-S", "-P"], [*sites, *package_folders()]
    environment = {name: os.environ[name] for name in PASSED if name in os.environ}
    chosen = resolve_oracle_env(os.environ) if oracle is not None and oracle.machine.accelerator == "cuda" else None
    environment |= {**FIXED, **(chosen.variables if chosen else {}), **arm["environment"]}
    environment["PYTHONPATH"] = os.pathsep.join([str(stage), *sites])
    environment[SITE_VARIABLE] = os.pathsep.join(sites)
    environment[MODEL_VARIABLE] = str(model)
    return Launch(argv=[python, *flags, "-m", module], environment=environment,
                  shown=[oracle.name if oracle else "self", *flags, "-m", module],
                  oracle_environment=chosen.record if chosen else None)


def package_folders() -> list[str]:
    """The folders of installed packages on this interpreter's own search path."""
    return [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]


def foreign_paths(sys_path: list[str]) -> list[str]:
    """Entries of an arm's reported search path that lie outside the stage, the interpreter and the declared package folders."""
    return [entry for entry in sys_path if entry.split(":", 1)[0] not in ("stage", "site", "prefix", "base")]
