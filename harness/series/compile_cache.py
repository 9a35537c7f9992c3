"""What an arm finds compiled already, and whether it compiled anew: the caches of its just-in-time compilers before and after a leg.

An arm that compiles in one leg and finds the result in the next is not the same machine twice, so every leg tells its state.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Mapping
from pathlib import Path

State = dict[str, dict[str, int] | None]
"""By cache: `files`, `bytes` (0 where there is no folder: cold) and `newest_ns`, the latest modification (0 without a file; time since the
epoch); None where the folder cannot be read."""


def cache_folders(environment: Mapping[str, str]) -> dict[str, Path]:
    """Where an arm with this environment keeps what it compiles: each cache's own variable, else its default (torch's cache_dir_utils,
    triton's knobs, vLLM's envs, FlashInfer's jit/env, engine/kernels/cpu/build.py)."""
    home = Path(environment.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir)
    user = re.sub(r'[\\/:*?"<>|]', "_", pwd.getpwuid(os.getuid()).pw_name)
    defaults = {
        "inductor": ("TORCHINDUCTOR_CACHE_DIR", Path(environment.get("TMPDIR", "/tmp")) / f"torchinductor_{user}"),
        "triton": ("TRITON_CACHE_DIR", Path(environment.get("TRITON_HOME") or home) / ".triton" / "cache"),
        "vllm": ("VLLM_CACHE_ROOT", home / ".cache" / "vllm"),
        "engine": ("", home / ".cache" / "vllm-parity"),
        "flashinfer": ("", Path(environment.get("FLASHINFER_WORKSPACE_BASE") or home) / ".cache" / "flashinfer"),
    }
    return {name: Path(environment.get(variable) or default) for name, (variable, default) in defaults.items()}


def cache_state(environment: Mapping[str, str]) -> State:
    """The caches of an arm as they are now."""
    return {name: _measure(folder) for name, folder in cache_folders(environment).items()}


def _measure(folder: Path) -> dict[str, int] | None:
    state = {"files": 0, "bytes": 0, "newest_ns": 0}
    if not folder.exists():
        return state
    errors: list[OSError] = []
    for place, _, names in os.walk(folder, onerror=errors.append):
        for name in names:
            try:
                found = os.lstat(os.path.join(place, name))
            except FileNotFoundError:  # a lock or scratch file that has just gone
                continue
            state["files"] += 1
            state["bytes"] += found.st_size
            state["newest_ns"] = max(state["newest_ns"], found.st_mtime_ns)
    return None if errors else state


def compiled_anew(before: State, after: State, window_ns: tuple[int, int] | None) -> list[str]:
    """Notes of a leg in which a cache grew, or cannot be read.  `window_ns`: its measured window (time since the epoch), if it had one."""
    notes = []
    for name, now in after.items():
        was = before[name]
        if was is None or now is None:
            notes.append(f"compile cache {name}: cannot be read, so whether the arm compiled is not known")
        elif now["files"] > was["files"] or now["bytes"] > was["bytes"]:
            inside = window_ns is not None and window_ns[0] <= now["newest_ns"] <= window_ns[1]
            notes.append(f"compile cache {name} ({'warm' if was['files'] else 'cold'} before): the arm compiled anew, {was['files']} to "
                         f"{now['files']} files, the last of them {'WITHIN' if inside else 'outside'} its measured window")
    return notes
