"""The device side: what lasts between steps (cache, block tables, last ids by slot), and running one step over it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from engine.batch import Batch, pack
from engine.kernels import dispatch as ops
from engine.layers.attention import Caches
from engine.models.llama import Llama
from engine.request import Request
from engine.scheduler import Step


class Launched(NamedTuple):
    """Ids [S] of a launched step, on the device."""

    ids: torch.Tensor


class Runner:
    """Runs steps in the order they are launched.  On a CPU a step has run when `launch` returns; nothing relies on it.

    A slot's last sampled id stays in `last_sampled` [slots], where the next step finds it: so that step can be launched before this
    one's ids were read.
    """

    def __init__(self, model: Llama, num_blocks: int, block_size: int, max_num_seqs: int, max_model_len: int) -> None:
        self.model = model
        self.block_size = block_size
        self.dtype = model.embed.dtype
        config = model.config
        shape = (config.num_layers, num_blocks, block_size, 2 * config.num_kv_heads, config.head_dim)
        self.last_sampled = torch.zeros(max_num_seqs, dtype=torch.int64)
        self.caches = Caches(_zeros(shape, self.dtype), torch.zeros(max_num_seqs, -(-max_model_len // block_size), dtype=torch.int64))
        self.sampler_calls = {"greedy": 0, "greedy_masked": 0}

    @torch.inference_mode()
    def launch(self, step: Step) -> Launched:
        """Run `step` after all steps launched before it; its ids are for `collect`."""
        for request in step.admitted:
            self.admit(request)
        batch = pack(step, self.caches.block_tables, self.block_size, self.dtype)
        self.fill_last_ids(batch)
        hidden = self.model.forward(batch, self.caches)
        if not batch.sample_rows.numel():
            return Launched(batch.sample_rows)
        ids = self.sample(self.model.logits(hidden), batch)
        self.last_sampled[batch.sample_slots] = ids
        return Launched(ids)

    def collect(self, launched: Launched) -> list[int]:
        """Wait for a step and return its ids in row order."""
        ids: list[int] = launched.ids.tolist()
        return ids

    def admit(self, request: Request) -> None:
        """Write the block table of a slot's new owner; it holds until the request leaves."""
        table = self.caches.block_tables[request.slot]
        table.zero_()
        table[: len(request.blocks)] = torch.tensor(request.blocks, dtype=torch.int64)

    def fill_last_ids(self, batch: Batch) -> None:
        """Give each decode row the id its slot sampled last."""
        batch.token_ids[batch.last_rows] = self.last_sampled[batch.last_slots]

    def sample(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Greedy ids [S] from logits [S, vocab]; ids a request may not choose yet are set to -inf first."""
        if batch.masked_ids.numel():
            logits[batch.masked_samples, batch.masked_ids] = float("-inf")
        self.sampler_calls["greedy_masked" if batch.masked_ids.numel() else "greedy"] += 1
        return ops.greedy(logits)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose pages come into memory when first written, so that a cache costs what is used of it."""
    lazy = np.zeros(int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(lazy).view(dtype).view(shape)
