"""The device side: what lasts between steps (cache, block tables, last ids by slot), and running one step over it.

Two runners with the same acts: `Runner` for the host's own processor, `CardRunner` for a card, where a step is only queued by `launch`.
"""

from __future__ import annotations

import gc
import math
import mmap
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.batch import Batch, SlotBatch, SlotFields, flatten, pack, pack_slots
from engine.graphs import DecodeGraphs
from engine.kernels import dispatch as ops
from engine.kernels import slots as columns
from engine.kernels.devices import CARD
from engine.kernels.gdn import GdnState
from engine.kernels.transfer import PinnedRing
from engine.layers.attention import Caches
from engine.models.config import ModelConfig
from engine.models.llama import Llama
from engine.request import Request
from engine.scheduler import Step


def make_runner(model: Llama, resolved: dict[str, Any]) -> Runner | CardRunner:
    """The runner for the device that the model's weights are on, under the engine's resolved options."""
    sizes = (resolved["num_blocks"], resolved["block_size"], resolved["max_num_seqs"], resolved["max_model_len"])
    if model.embed.device.type == CARD:
        return CardRunner(model, *sizes, depth=resolved["depth"], eager=resolved["enforce_eager"])
    return Runner(model, *sizes)


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
        shape = (config.full_layers, num_blocks, block_size, 2 * config.num_kv_heads, config.head_dim)
        self.last_sampled = torch.zeros(max_num_seqs, dtype=torch.int64)
        self.caches = Caches(
            _zeros(shape, dtype=self.dtype), torch.zeros(max_num_seqs, -(-max_model_len // block_size), dtype=torch.int64),
            gdn_states(config, max_num_seqs, self.dtype, _zeros))
        self.sampler_calls = {"greedy": 0, "greedy_masked": 0}
        self.graph_replays = 0
        self.most_suppressed = sys.maxsize

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


class Arriving(NamedTuple):
    """Ids of a launched step on their way to pinned memory: `ids` [S] holds them once `there` has happened."""

    ids: torch.Tensor
    there: torch.cuda.Event


class CardRunner:
    """Queues steps on a card's stream in the order they are launched; only `collect` waits.

    A slot's state stays on the card (slots.py).  A step that only decodes says nothing to the card but which slots take part, and that
    only when it changed; any other step is one packed upload.  Ids come back on a stream of their own, so that the next step need not wait.
    """

    def __init__(
        self, model: Llama, num_blocks: int, block_size: int, max_num_seqs: int, max_model_len: int, *, depth: int, eager: bool
    ) -> None:
        config, device = model.config, model.embed.device
        self.model = model
        self.block_size = block_size
        self.tile_rows = ops.tile_rows(model.embed.dtype)
        self.state = torch.zeros(max_num_seqs, columns.BLOCKS + -(-max_model_len // block_size), dtype=torch.int32, device=device)
        shape = (config.full_layers, num_blocks, block_size, 2 * config.num_kv_heads, config.head_dim)
        self.caches = Caches(
            torch.zeros(shape, dtype=model.embed.dtype, device=device), self.state[:, columns.BLOCKS :],
            gdn_states(config, max_num_seqs, model.embed.dtype, partial(torch.zeros, device=device)))
        self.ring = PinnedRing(depth + 2, 1 << 16)
        self.sampler_calls = {"greedy": 0, "greedy_masked": 0}
        self.most_suppressed = columns.MOST_SUPPRESSED
        self.graphs = DecodeGraphs(max_num_seqs, eager)
        rows = self.graphs.sizes[-1]
        self.seats = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self.tick = torch.zeros(1, dtype=torch.int32, device=device)
        self.handed = torch.zeros(2, rows, dtype=torch.int32, device=device)
        self._seated: list[int] = []
        self._ticks = 0
        self._arrivals = [torch.empty(rows, dtype=torch.int32, pin_memory=True) for _ in range(depth + 1)]
        self._homeward = torch.cuda.Stream()
        self._prepare()

    @property
    def graph_replays(self) -> int:
        return self.graphs.replays

    @torch.inference_mode()
    def launch(self, step: Step) -> Arriving | None:
        """Queue `step` behind all steps launched before it; its ids are for `collect`."""
        count = sum(row.samples for row in step.rows)
        if step.is_mixed:
            self._mixed(step)
        else:
            self._seat([row.request.slot for row in step.rows])
            self.graphs.run(count, self._decode)
        if not count:
            return None
        self.sampler_calls["greedy_masked" if any(row.suppress for row in step.rows) else "greedy"] += 1
        return self._bring_home(count)

    def collect(self, launched: Arriving | None) -> list[int]:
        """Wait for a step and return its ids in row order."""
        if launched is None:
            return []
        launched.there.synchronize()
        ids: list[int] = launched.ids.tolist()
        return ids

    def _prepare(self) -> None:
        """Build what decode steps need, on empty seats; what exists by then is no garbage, and no collection need look at it again."""
        with torch.inference_mode():
            self.graphs.prepare(self._decode)
        self.tick.zero_()
        gc.collect()
        gc.freeze()

    def _decode(self, rows: int) -> None:
        """A whole decode step of the first `rows` seats, from each slot's last id to its next: no input but the device's own state."""
        slots = self.seats[:rows]
        ids, positions, places, lengths = ops.begin(self.state, slots, self.tick, self.block_size)
        batch = SlotBatch(
            token_ids=ids, positions=positions, cache_rows=places, slots=slots, lengths=lengths, tiles=None, segments=None,
            sample_rows=None)
        self._sample(self.model.forward(batch, self.caches), slots, positions)

    def _mixed(self, step: Step) -> None:
        """A step with prompt tokens, launched kernel by kernel."""
        batch, there = self.lay_out(step, pack_slots(step, self.block_size, self.tile_rows, self.state.shape[1]))
        hidden = self.model.forward(batch, self.caches)
        if there.sample_rows.numel():
            self.tick += 1
            self._sample(hidden, there.sample_slots, there.sample_positions)

    def lay_out(self, step: Step, fields: SlotFields[np.ndarray]) -> tuple[SlotBatch, SlotFields[torch.Tensor]]:
        """A packed step on the card: the slots it admits are written, the ids its decodes begin with filled in."""
        there = self._upload(fields)
        if step.admitted:
            self.state.index_copy_(0, there.admitted.long(), there.states.view(len(step.admitted), -1))
        last_ids = self.state[:, columns.LAST_ID].index_select(0, there.last_slots)
        there.token_ids.index_copy_(0, there.last_rows.long(), last_ids)
        batch = SlotBatch(
            token_ids=there.token_ids, positions=there.positions, cache_rows=there.cache_rows, slots=there.slots, lengths=there.lengths,
            tiles=there.tiles.view(-1, 4), segments=there.segments.view(-1, 4), sample_rows=there.sample_rows)
        return batch, there

    def _sample(self, hidden: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """Greedy ids of hidden [S, hidden]; each slot moves on by one."""
        ids = ops.greedy_slots(self.model.logits(hidden), self.state, slots, positions)
        ops.advance(self.state, slots, positions, ids, self.tick, self.handed)

    def _seat(self, slots: list[int]) -> None:
        """Tell the card which slot each row of a decode step is."""
        if slots != self._seated:
            seats = np.full(self.seats.shape[0], -1, np.int32)
            seats[: len(slots)] = slots
            with self.ring.lend(seats.nbytes) as held:
                held.numpy().view(np.int32)[:] = seats
                self.seats.copy_(held.view(torch.int32), non_blocking=True)
            self._seated = slots

    def _upload(self, fields: SlotFields[np.ndarray]) -> SlotFields[torch.Tensor]:
        """The fields on the card, in one copy."""
        parts, begins = flatten(fields)
        size = sum(part.size for part in parts)
        with self.ring.lend(4 * size) as held:
            np.concatenate(parts, out=held.numpy().view(np.int32))
            there = held.view(torch.int32).to(self.state.device, non_blocking=True)
        return SlotFields(*(there[begin : begin + field.size] for begin, field in zip(begins, fields, strict=True)))

    def _bring_home(self, count: int) -> Arriving:
        """Start the copy of the ids that the step just queued hands out; the device keeps those of two steps, so none waits for it."""
        self._ticks += 1
        target = self._arrivals[self._ticks % len(self._arrivals)][:count]
        self._homeward.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._homeward):
            target.copy_(self.handed[self._ticks % 2, :count], non_blocking=True)
            there = torch.cuda.Event()
            there.record()
        return Arriving(target, there)


def gdn_states(config: ModelConfig, slots: int, dtype: torch.dtype, zeros: Callable[..., torch.Tensor]) -> tuple[GdnState, ...]:
    """Each gated delta net layer's states of all slots, made by `zeros(shape, dtype=...)`; nothing for a model without such layers."""
    sizes = config.linear
    if sizes is None:
        return ()
    recurrent = (slots, sizes.value_heads, sizes.value_dim, sizes.key_dim)
    return tuple(
        GdnState(zeros((slots, sizes.conv_width - 1, sizes.channels), dtype=dtype), zeros(recurrent, dtype=torch.float32))
        for kind in config.layer_kinds if kind == "linear_attention")


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose pages come into memory when first written, so that a cache costs what is used of it (NumPy's come as huge pages)."""
    lazy = mmap.mmap(-1, max(1, math.prod(shape) * dtype.itemsize))
    return torch.frombuffer(lazy, dtype=dtype, count=math.prod(shape)).view(shape)
