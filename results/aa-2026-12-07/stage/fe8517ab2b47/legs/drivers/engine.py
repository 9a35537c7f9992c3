"""The arm of the in-repo engine."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import engine
from engine.api import LLM, SamplingParams, TokenScores
from engine.errors import ConfigError, EngineError, RequestError
from engine.kernels import devices
from legs.client import Delta
from legs.drivers.common import STAGE, Arm, main
from legs.drivers.inject import INJECT, Injected
from legs.protocol import TOP, LegRequest, Marks, sha256

FIXED = {"enable_prefix_caching": False, "enable_chunked_prefill": True}
"""Options that have one value here: they may be declared, and any other value is refused."""


class EngineArm:
    """:class:`engine.api.LLM` as the client drives it."""

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        self.llm = llm
        self.params = params

    def submit(self, index: int, prompt: Sequence[int]) -> None:
        self.llm.add_request(str(index), prompt, self.params)

    def step(self) -> Sequence[Delta]:
        return [Delta(int(output.request_id), output.token_ids, output.finish_reason) for output in self.llm.step()]

    def score_given(self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]], batch: int) -> list[TokenScores]:
        """Prefill form, always one sequence at a time: another `batch` is refused."""
        if batch != 1:
            raise RequestError(f"batch is {batch}; this engine scores one sequence at a time")
        return self.llm.score(list(zip(prompts, continuations, strict=True)), top=TOP)

    def who(self) -> dict[str, Any]:
        return {
            "name": "vllm-parity engine", "distribution": "vllm-parity", "version": engine.__version__, "commit": None,
            "packages": packages(), "record_sha256": code_sha256(STAGE), "missing": [],
        }

    def device(self) -> dict[str, Any]:
        kind = self.llm.resolved["device"]
        return {"kind": kind, "name": cpu_name() if kind == devices.HOST else devices.card_name(), "count": 1}

    def resolved(self) -> dict[str, Any]:
        return {**self.llm.resolved, "threads": torch.get_num_threads()}

    def counters(self) -> dict[str, Any]:
        return self.llm.counters()

    def pids(self) -> list[int]:
        return [os.getpid()]

    def close(self) -> None:
        """Nothing outlives the process."""


def build(request: LegRequest, model_path: Path, marks: Marks) -> Arm:
    """Load the checkpoint with the request's options; raises :class:`engine.errors.EngineError` for one that is not built."""
    options = dict(request.options)
    fault = options.pop(INJECT, None)
    for name, value in FIXED.items():
        if (asked := options.pop(name, value)) != value:
            raise ConfigError(f"{name} is {asked!r}; this engine has only {value!r}")
    params = SamplingParams(max_tokens=request.max_tokens, min_tokens=request.min_tokens, ignore_eos=request.ignore_eos)
    marks("load_start")
    llm = LLM(model_path, marks, **options)
    marks("loaded")
    arm = EngineArm(llm, params)
    return arm if fault is None else Injected(arm, request)


def packages() -> dict[str, str]:
    """Versions of what computes: torch, and Triton where it is installed."""
    found = {"torch": str(torch.__version__)}
    with contextlib.suppress(metadata.PackageNotFoundError):
        found["triton"] = metadata.version("triton")
    return found


def code_sha256(root: Path) -> str:
    """One hash over the Python and C++ files of engine/ and legs/ below `root`: their relative paths and contents, sorted."""
    files = sorted(path for part in ("engine", "legs") for path in (root / part).rglob("*") if path.suffix in (".py", ".cpp", ".h"))
    return sha256("".join(f"{path.relative_to(root)} {sha256(path.read_bytes())}\n" for path in files).encode())


def cpu_name() -> str:
    """The processor's name as the system has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    try:
        main(build)
    except EngineError as error:
        sys.exit(f"engine: {error}")
