"""The engine's front door: `LLM` and `SamplingParams`, under vLLM's names where the meaning is the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from engine.config import DTYPES, EngineConfig
from engine.errors import CheckpointError, ConfigError, EngineError, RequestError
from engine.kernels import devices, dispatch
from engine.kv_cache import BlockPool
from engine.loader.load import Note, silent
from engine.loop import Loop, StepOutput
from engine.models.build import build_model
from engine.models.config import ModelConfig, read_config
from engine.request import Request, SamplingParams
from engine.runner import make_runner
from engine.scheduler import Scheduler
from engine.score import TokenScores, score_sequence

__all__ = ["LLM", "CheckpointError", "ConfigError", "EngineError", "RequestError", "RequestOutput", "SamplingParams", "StepOutput",
           "TokenScores"]


@dataclass
class RequestOutput:
    """A finished request of `LLM.generate`."""

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


class LLM:
    """An engine over one checkpoint folder.  `options` are the fields of :class:`engine.config.EngineConfig`; `note` is told how far the
    start has come: context (of the device), read and copied (the weights), captured (what decode steps need is built).

    Raises :class:`ConfigError` for an option and :class:`CheckpointError` for a checkpoint; then no engine exists.
    """

    def __init__(self, model: str | Path, note: Note = silent, **options: Any) -> None:
        config = _engine_config(options)
        self.model_config = read_config(Path(model))
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.resolved = _resolve(config, self.model_config)
        devices.wake(self.resolved["device"])
        note("context")
        built = build_model(
            Path(model), self.model_config, getattr(torch, self.resolved["dtype"]), self.resolved["max_model_len"], self.resolved["load"],
            self.resolved["device"], note)
        self.blocks = BlockPool(self.resolved["num_blocks"], self.resolved["block_size"])
        self.scheduler = Scheduler(self.resolved["max_num_batched_tokens"], self.resolved["max_num_seqs"], self.blocks)
        self.runner = make_runner(built, self.resolved)
        devices.return_freed()
        note("captured")
        self.loop = Loop(self.scheduler, self.runner, self.resolved["depth"])
        self._open: set[str] = set()

    def add_request(self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams | None = None) -> None:
        """Queue a request.  Raises :class:`RequestError` when it can never be served; the others are not touched."""
        params = SamplingParams() if params is None else params
        if request_id in self._open:
            raise RequestError(f"request {request_id}: a request of this id is not finished yet")
        vocab, limit = self.model_config.vocab_size, self.resolved["max_model_len"]
        if not prompt_token_ids:
            raise RequestError(f"request {request_id}: the prompt is empty")
        for token in prompt_token_ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
                raise RequestError(f"request {request_id}: prompt id {token!r} is no integer in 0..{vocab - 1}")
        if len(prompt_token_ids) + params.max_tokens > limit:
            raise RequestError(f"request {request_id}: {len(prompt_token_ids)} prompt tokens and max_tokens {params.max_tokens} "
                               f"exceed max_model_len {limit}")
        if any(token >= vocab for token in params.stop_token_ids):
            raise RequestError(f"request {request_id}: stop_token_ids {params.stop_token_ids} reach beyond the vocabulary of {vocab}")
        request = Request(request_id, prompt_token_ids, params, self.model_config.eos_ids)
        if len(request.suppressed) > self.runner.most_suppressed:
            raise RequestError(f"request {request_id}: {len(request.suppressed)} end-of-sequence and stop ids; "
                               f"this device keeps {self.runner.most_suppressed} a request")
        if (needed := self.blocks.needed(request.cached_tokens)) > self.blocks.usable:
            raise RequestError(f"request {request_id}: needs {needed} KV blocks of {self.blocks.block_size} tokens, "
                               f"the engine has {self.blocks.usable}; raise num_blocks")
        self._open.add(request_id)
        self.scheduler.add(request)

    def step(self) -> list[StepOutput]:
        """Advance by one step; what came out of it.  At depth 2 the first call only fills the pipeline and returns nothing."""
        outputs = self.loop.step()
        self._open.difference_update(output.request_id for output in outputs if output.finish_reason is not None)
        return outputs

    def has_unfinished(self) -> bool:
        return self.loop.has_unfinished

    def generate(
        self, prompts: Iterable[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Serve all `prompts` (token ids), with one `params` for all or one each; outputs in their order.

        Raises :class:`RequestError` for the first prompt that cannot be served; the ones before it are served by later steps.
        """
        held = [list(prompt) for prompt in prompts]
        each = list(params) if isinstance(params, Sequence) else [params] * len(held)
        if len(each) != len(held):
            raise RequestError(f"{len(held)} prompts with {len(each)} sampling parameters; give one for all, or one each")
        outputs = {}
        for index, (prompt, one) in enumerate(zip(held, each, strict=True)):
            name = f"generate-{index}"
            self.add_request(name, prompt, one)
            outputs[name] = RequestOutput(name, prompt)
        while any(output.finish_reason is None for output in outputs.values()):
            for request_id, ids, finish in self.step():
                if request_id in outputs:
                    outputs[request_id].token_ids.extend(ids)
                    outputs[request_id].finish_reason = finish
        return list(outputs.values())

    def score(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], top: int = 20) -> list[TokenScores]:
        """Log-probabilities of given ids, teacher-forced: each sequence is (prompt ids, continuation ids), scored one after the other in
        prefill form; nothing is sampled or masked.  Natural logarithms, computed in float32; `top` likeliest ids at each position.

        Raises :class:`RequestError` for a sequence that cannot be served, and while requests are unfinished.
        """
        if self.has_unfinished():
            raise RequestError("scoring needs the engine to itself: requests are unfinished")
        limit = min(self.resolved["max_model_len"], self.blocks.usable * self.blocks.block_size)
        for index, (prompt, ids) in enumerate(sequences):
            if not prompt or not ids or not all(0 <= token < self.model_config.vocab_size for token in (*prompt, *ids)):
                raise RequestError(f"sequence {index}: prompt and continuation need ids in 0..{self.model_config.vocab_size - 1}")
            if len(prompt) + len(ids) > limit:
                raise RequestError(f"sequence {index}: {len(prompt)} prompt and {len(ids)} given ids exceed the {limit} that fit")
        if not 0 < top <= self.model_config.vocab_size:
            raise RequestError(f"top is {top!r}; it must lie in 1..{self.model_config.vocab_size}")
        return [score_sequence(self.runner, self.scheduler, prompt, ids, top) for prompt, ids in sequences]

    def counters(self) -> dict[str, Any]:
        """Counts since the engine was made.  Nothing is ever preempted, and there is no prefix cache to ask."""
        return {
            "steps": self.loop.steps, "mixed_steps": self.loop.mixed_steps, "preemptions": 0,
            "prefix_cache_queries": 0, "prefix_cache_hits": 0, "sampler_calls": dict(self.runner.sampler_calls),
            "graph_replays": self.runner.graph_replays,
        }


def _engine_config(options: dict[str, Any]) -> EngineConfig:
    known = EngineConfig.__dataclass_fields__
    if unknown := sorted(options.keys() - known.keys()):
        raise ConfigError(f"option {unknown[0]!r} is unknown; known are {', '.join(known)}")
    return EngineConfig(**options)


def _resolve(config: EngineConfig, model: ModelConfig) -> dict[str, Any]:
    """Every option as this engine will use it.  Raises :class:`ConfigError`, also for a device that is not here."""
    devices.require(config.device)
    dtype = config.dtype or model.dtype
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is not given and the checkpoint's is {dtype!r}; built are {', '.join(DTYPES)}")
    length = config.max_model_len or model.max_position_embeddings
    if length > model.max_position_embeddings:
        raise ConfigError(f"max_model_len is {length}; the checkpoint has {model.max_position_embeddings} positions")
    itemsize = getattr(torch, dtype).itemsize
    block_size = config.block_size or devices.BLOCK_SIZES[config.device]
    block_bytes = block_size * model.full_layers * 2 * model.num_kv_heads * model.head_dim * itemsize
    most = 1 + config.max_num_seqs * -(-length // block_size)
    return {
        "dtype": dtype, "device": config.device, "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_num_seqs": config.max_num_seqs, "max_model_len": length, "block_size": block_size,
        "num_blocks": config.num_blocks or max(2, min(most, devices.cache_bytes(config.device) // block_bytes)),
        "enable_prefix_caching": False, "enable_chunked_prefill": True,
        "enforce_eager": config.device == devices.HOST if config.enforce_eager is None else config.enforce_eager,
        "depth": config.depth or (1 if config.device == devices.HOST else 2), "threads": torch.get_num_threads(), "load": config.load,
        **dispatch.backends(config.device, getattr(torch, dtype)),
    }
