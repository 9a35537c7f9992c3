"""The oracle's driver: vLLM's own engine class behind the common client, one file for its CPU and its CUDA builds.

vLLM runs as it comes: engine core and workers in processes of their own.  What a leg reports as resolved is asked of a worker through
vLLM's extension hook (:class:`WorkerProbe`), after start-up, so it is what runs and not what was asked for.  Its statistics are on:
they prove that nothing was preempted or served from a prefix cache, and cost 0.13 ms a step in this process (8 in flight, measured).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
from collections.abc import Sequence
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from legs.client import Delta
from legs.drivers.common import main
from legs.protocol import TOP, LegRequest, Marks, ProtocolError

ENGINE_ARGUMENTS = {
    "dtype": "dtype",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_num_seqs": "max_num_seqs",
    "max_model_len": "max_model_len",
    "block_size": "block_size",
    "num_blocks": "num_gpu_blocks_override",
    "enable_prefix_caching": "enable_prefix_caching",
    "enable_chunked_prefill": "enable_chunked_prefill",
    "enforce_eager": "enforce_eager",
    "language_model_only": "language_model_only",
    "gdn_prefill_backend": "gdn_prefill_backend",
}
"""Declared option to vLLM's engine argument.  The last two are vLLM's own, needed to serve Qwen3.5 without its vision tower."""

DEPTHS = {1: False, 2: True}
"""`depth` to vLLM's `async_scheduling`."""

COUNTERS = {
    "preemptions": "vllm:num_preemptions",
    "prefix_cache_queries": "vllm:prefix_cache_queries",
    "prefix_cache_hits": "vllm:prefix_cache_hits",
}

TOLD_PACKAGES = ("torch", "transformers", "triton", "numpy", "xgrammar", "flashinfer-python", "intel-openmp", "psutil")
"""Installed packages whose versions identify the build beside vLLM's own."""


def engine_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """vLLM engine arguments for the declared `options`.

    `threads` binds the CPU build's OpenMP threads to the first so many processors this process may use (it has no engine argument).
    Raises :class:`ProtocolError` for an option or a value that vLLM does not have.
    """
    arguments: dict[str, Any] = {}
    for name, value in options.items():
        if name in ENGINE_ARGUMENTS:
            arguments[ENGINE_ARGUMENTS[name]] = value
        elif name == "depth" and value in DEPTHS:
            arguments["async_scheduling"] = DEPTHS[value]
        elif name == "load" and value == "default":
            continue
        elif name == "threads" and isinstance(value, int) and 0 < value <= len(os.sched_getaffinity(0)):
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(os.sched_getaffinity(0))[:value]))
        elif name == "device":
            continue
        else:
            raise ProtocolError(f"options.{name}: {value!r} is not something this driver can ask of vLLM; it knows "
                                f"{', '.join((*ENGINE_ARGUMENTS, 'depth', 'load', 'threads', 'device'))}")
    return arguments


def _read(root: Any, path: str) -> Any:
    """The attribute at a dotted path as a JSON value, or None where this release has no such attribute."""
    for name in path.split("."):
        root = getattr(root, name, None)
    if isinstance(root, Enum):
        return root.name
    return root if root is None or isinstance(root, (bool, int, float, str)) else str(root).removeprefix("torch.")


class WorkerProbe:
    """Mixed into vLLM's worker class: tells how the worker's process resolved its settings."""

    def parity_probe(self) -> dict[str, Any]:
        import torch

        config, runner = self.vllm_config, self.model_runner  # type: ignore[attr-defined]
        groups = [group for layers in getattr(runner, "attn_groups", []) for group in layers]
        asynchronous = _read(config, "scheduler_config.async_scheduling")
        extra = getattr(config, "additional_config", None) or {}
        return {
            "device": _read(config, "device_config.device_type"),
            "dtype": _read(config, "model_config.dtype"),
            "max_num_batched_tokens": _read(config, "scheduler_config.max_num_batched_tokens"),
            "max_num_seqs": _read(config, "scheduler_config.max_num_seqs"),
            "max_model_len": _read(config, "model_config.max_model_len"),
            "block_size": _read(config, "cache_config.block_size"),
            "num_blocks": _read(runner, "kv_cache_config.num_blocks"),
            "enable_prefix_caching": _read(config, "cache_config.enable_prefix_caching"),
            "enable_chunked_prefill": _read(config, "scheduler_config.enable_chunked_prefill"),
            "enforce_eager": _read(config, "model_config.enforce_eager"),
            "depth": None if asynchronous is None else 1 + asynchronous,
            "threads": torch.get_num_threads(),
            "load": "default" if _read(config, "load_config.load_format") in ("auto", "safetensors", "hf") else None,
            "load_format": _read(config, "load_config.load_format"),
            "attention_backend": ",".join(sorted({group.backend.get_name() for group in groups})) or None,
            "compilation_mode": _read(config, "compilation_config.mode"),
            "compilation_backend": _read(config, "compilation_config.backend"),
            "cudagraph_mode": _read(config, "compilation_config.cudagraph_mode"),
            "kv_cache_dtype": _read(config, "cache_config.cache_dtype"),
            "executor": _read(config, "parallel_config.distributed_executor_backend"),
            "model_runner": type(runner).__module__,
            "gdn_prefill_backend": extra.get("gdn_prefill_backend") if isinstance(extra, dict) else None,
            "language_model_only": _read(config, "model_config.multimodal_config.language_model_only"),
        }


class Given(NamedTuple):
    """Scores as :class:`legs.drivers.scoring.Scores` has them."""

    ids: list[int]
    logprobs: list[float]
    top: list[list[tuple[int, float]]]


def _given(ids: list[int], rows: Sequence[dict[int, Any]]) -> Given:
    """From vLLM's rows of {id: Logprob}: each holds the :data:`TOP` likeliest, and the row's own id even where it is not among them."""
    top = [sorted((one.rank, token, one.logprob) for token, one in row.items() if one.rank <= TOP) for row in rows]
    return Given(ids, [row[token].logprob for token, row in zip(ids, rows, strict=True)],
                 [[(token, value) for _, token, value in at] for at in top])


class VllmArm:
    """vLLM's LLMEngine as :class:`legs.drivers.common.Arm`."""

    def __init__(self, request: LegRequest, model: Path) -> None:
        from vllm import EngineArgs, SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.llm_engine import LLMEngine

        arguments = engine_arguments(request.options)
        self._engine = LLMEngine.from_engine_args(EngineArgs(
            model=str(model), skip_tokenizer_init=True, disable_log_stats=False, seed=0,
            worker_extension_cls=f"{__spec__.name}.{WorkerProbe.__name__}", **arguments,
        ))
        self._sampling = SamplingParams(
            temperature=0.0, max_tokens=request.max_tokens, min_tokens=request.min_tokens, ignore_eos=request.ignore_eos,
            detokenize=False, output_kind=RequestOutputKind.DELTA,
        )
        self._submitted = 0

    def submit(self, index: int, prompt: Sequence[int]) -> None:
        from vllm import TokensPrompt

        self._submitted += 1
        self._engine.add_request(f"{self._submitted}-{index}", TokensPrompt(prompt_token_ids=list(prompt)), self._sampling)

    def step(self) -> list[Delta]:
        return [
            Delta(int(output.request_id.rpartition("-")[2]), output.outputs[0].token_ids, output.outputs[0].finish_reason)
            for output in self._engine.step()
        ]

    def score_given(self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]], batch: int) -> list[Given]:
        """Prefill form: vLLM's `prompt_logprobs` over prompt and continuation as one prompt (the one id it must generate is dropped)."""
        given = [list(ids) for ids in continuations]
        whole = [[*prompt, *ids] for prompt, ids in zip(prompts, given, strict=True)]
        found = self._all(whole, batch, max_tokens=1, ignore_eos=True, prompt_logprobs=TOP)
        return [_given(ids, output.prompt_logprobs[-len(ids):]) for ids, output in zip(given, found, strict=True)]

    def score_own(self, prompts: Sequence[Sequence[int]], batch: int) -> list[Given]:
        """Decode form: greedy, with `logprobs` at each step, which vLLM takes before min_tokens masks anything."""
        held = {name: getattr(self._sampling, name) for name in ("max_tokens", "min_tokens", "ignore_eos")}
        found = self._all(prompts, batch, logprobs=TOP, **held)
        return [_given(list(output.outputs[0].token_ids), output.outputs[0].logprobs) for output in found]

    def _all(self, prompts: Sequence[Sequence[int]], batch: int, **sampling: Any) -> list[Any]:
        """The finished outputs of all prompts, in their order, with `batch` in flight."""
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(temperature=0.0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY, **sampling)
        done: dict[int, Any] = {}
        handed = 0
        while len(done) < len(prompts):
            while handed < len(prompts) and handed - len(done) < batch:
                self._submitted += 1
                self._engine.add_request(f"{self._submitted}-{handed}", TokensPrompt(prompt_token_ids=list(prompts[handed])), params)
                handed += 1
            done |= {int(output.request_id.rpartition("-")[2]): output for output in self._engine.step() if output.finished}
        return [done[index] for index in range(len(prompts))]

    def who(self) -> dict[str, Any]:
        import vllm

        return {"name": "vllm", "version": vllm.__version__, "commit": getattr(vllm, "__commit_id__", None), **identity("vllm")}

    def device(self) -> dict[str, Any]:
        from vllm.platforms import current_platform

        kind = current_platform.device_type
        return {"kind": kind, "name": platform.processor() or kind if kind == "cpu" else current_platform.get_device_name(), "count": 1}

    def resolved(self) -> dict[str, Any]:
        told: dict[str, Any] = self._engine.collective_rpc("parity_probe")[0]
        return told

    def counters(self) -> dict[str, Any]:
        totals: dict[str, int] = {}
        for metric in self._engine.get_metrics():
            if isinstance(value := getattr(metric, "value", None), int):
                totals[metric.name] = totals.get(metric.name, 0) + value
        return {"steps": None, "mixed_steps": None, "sampler_calls": {}, **{name: totals.get(metric) for name, metric in COUNTERS.items()}}

    def pids(self) -> list[int]:
        import psutil

        return [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]

    def close(self) -> None:
        with contextlib.suppress(AttributeError):
            self._engine.engine_core.shutdown()


def identity(module: str) -> dict[str, Any]:
    """What the installed distribution that provides `module` says of itself: distribution, packages, record_sha256, missing, python.

    `record_sha256` covers the files that the distribution's RECORD lists with a hash, less those that pip writes for the place of
    installation (launchers, INSTALLER and the like), so that one wheel has one value wherever it is installed; null without a RECORD.
    """
    from packaging.requirements import Requirement

    name = (metadata.packages_distributions().get(module) or [module])[0]
    distribution = metadata.distribution(name)
    needs = [Requirement(line) for line in distribution.requires or []]
    wanted = sorted({need.name.lower().replace("_", "-") for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})})
    return {
        "distribution": name, "distribution_version": distribution.version, "python": platform.python_version(),
        "packages": {package: version for package in TOLD_PACKAGES if (version := _version(package)) is not None} | {"torch": _torch()},
        "record_sha256": _record_sha256(distribution.read_text("RECORD")),
        "missing": [package for package in wanted if _version(package) is None],
    }


def _torch() -> str:
    """torch's version with its build, as in 2.11.0+cu130: some wheels' metadata leave the build out."""
    import torch

    return str(torch.__version__)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _record_sha256(record: str | None) -> str | None:
    if record is None:
        return None
    local = ("dist-info/INSTALLER", "dist-info/REQUESTED", "dist-info/direct_url.json")
    lines = [line for line in record.splitlines() if "sha256=" in line and not line.startswith("..")
             and not line.split(",")[0].endswith(local)]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def build(request: LegRequest, model: Path, marks: Marks) -> VllmArm:
    marks("load_start")
    arm = VllmArm(request, model)
    marks("loaded")
    return arm


if __name__ == "__main__":
    import vllm  # noqa: F401  so that the mark `imported` means what it says; here only, because a spawned child runs this file again

    main(build)
