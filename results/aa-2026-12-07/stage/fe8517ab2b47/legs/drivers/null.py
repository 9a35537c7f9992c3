"""The null engine: one id for every request in flight at each step, at once.  What remains of a leg's time is the client's own.

Run through the same client over the same corpus as the arms, it tells the highest rate that client could ever show
(harness/analysis/ceiling.py).  It loads nothing, so it needs no checkpoint.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from legs.client import Delta
from legs.drivers.common import STAGE, main
from legs.protocol import COMMON_OPTIONS, PROTOCOL, LegRequest, Marks, ProtocolError, sha256

ID = 0
"""The one id it answers with; in every vocabulary."""


class NullArm:
    """Counts each request's ids down; keeps nothing else."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.left: dict[int, int] = {}
        self.steps = 0

    def submit(self, index: int, prompt: Sequence[int]) -> None:
        self.left[index] = self.max_tokens

    def step(self) -> Sequence[Delta]:
        self.steps += 1
        deltas = []
        for index, left in list(self.left.items()):
            if left == 1:
                del self.left[index]
            else:
                self.left[index] = left - 1
            deltas.append(Delta(index, [ID], "length" if left == 1 else None))
        return deltas

    def who(self) -> dict[str, Any]:
        return {
            "name": "null", "distribution": "vllm-parity", "version": f"protocol {PROTOCOL}", "commit": None, "packages": {},
            "record_sha256": _code_sha256(STAGE), "missing": [],
        }

    def device(self) -> dict[str, Any]:
        return {"kind": "none", "name": platform.machine(), "count": 0}

    def resolved(self) -> dict[str, Any]:
        return {**dict.fromkeys(COMMON_OPTIONS), "depth": 1, "attention_backend": None}

    def counters(self) -> dict[str, Any]:
        return {
            "steps": self.steps, "mixed_steps": None, "preemptions": 0, "prefix_cache_queries": 0, "prefix_cache_hits": 0,
            "sampler_calls": None,
        }

    def pids(self) -> list[int]:
        return [os.getpid()]

    def close(self) -> None:
        """Nothing outlives the process."""


def build(request: LegRequest, model_path: Path, marks: Marks) -> NullArm:
    """The arm; `model_path` is not looked at.  Raises :class:`ProtocolError` when an option is declared: it has none."""
    if request.options:
        raise ProtocolError(f"options {sorted(request.options)}: the null engine has none; declare nothing")
    marks("load_start")
    marks("loaded")
    return NullArm(request.max_tokens)


def _code_sha256(root: Path) -> str:
    """One hash over the Python files of legs/ below `root`: their relative paths and contents, sorted."""
    files = sorted((root / "legs").rglob("*.py"))
    return sha256("".join(f"{path.relative_to(root)} {sha256(path.read_bytes())}\n" for path in files).encode())


if __name__ == "__main__":
    main(build)
