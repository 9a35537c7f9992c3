"""The planted faults of test_faults.py for a card, whose steps are other code: decodes are a captured graph, a slot's state lives there.

Planted before the engine is made, so that graphs are captured with them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.kernels import dispatch
from engine.kernels import slots as columns
from engine.models.llama import Llama
from engine.runner import CardRunner
from tests.engine.test_faults import residual_dropped

Patch = pytest.MonkeyPatch


def decode_position_plus_one(patch: Patch) -> None:
    """Decodes rotated one position too far, in graphs and in mixed steps."""
    forward = Llama.forward

    def faulty(self: Llama, batch: Any, caches: Any) -> torch.Tensor:
        positions = batch.positions.clone()
        positions[: batch.lengths.shape[0]] += 1
        return forward(self, dataclasses.replace(batch, positions=positions), caches)

    patch.setattr(Llama, "forward", faulty)


def chunk_position_plus_one(patch: Patch) -> None:
    """A prompt's second chunk rotated one position too far."""
    forward = Llama.forward

    def faulty(self: Llama, batch: Any, caches: Any) -> torch.Tensor:
        positions = batch.positions.clone()
        for first, rows, start, _ in [] if batch.segments is None else batch.segments.tolist():
            if start:
                positions[first : first + rows] += 1
        return forward(self, dataclasses.replace(batch, positions=positions), caches)

    patch.setattr(Llama, "forward", faulty)


def blocks_swapped(patch: Patch) -> None:
    """The first two entries of a block table exchanged."""
    lay_out = CardRunner.lay_out

    def faulty(self: CardRunner, step: Any, fields: Any) -> Any:
        found = lay_out(self, step, fields)
        for request in step.admitted:
            table = self.state[request.slot, columns.BLOCKS : columns.BLOCKS + 2]
            table.copy_(table.flip(0))
        return found

    patch.setattr(CardRunner, "lay_out", faulty)


def mask_off_by_one(patch: Patch) -> None:
    """Each query of a chunk sees the token after it."""
    attention = dispatch.attention_slots

    def faulty(query: Any, cache: Any, tables: Any, slots: Any, lengths: Any, tiles: Any, scale: float) -> torch.Tensor:
        if tiles is not None:
            tiles = tiles.clone()
            tiles[:, 2] += 1
        return attention(query, cache, tables, slots, lengths, tiles, scale)

    patch.setattr(dispatch, "attention_slots", faulty)


def length_off_by_one(patch: Patch) -> None:
    """A decode does not see its own token."""
    attention = dispatch.attention_slots

    def faulty(query: Any, cache: Any, tables: Any, slots: Any, lengths: Any, tiles: Any, scale: float) -> torch.Tensor:
        return attention(query, cache, tables, slots, torch.where(lengths > 1, lengths - 1, lengths), tiles, scale)

    patch.setattr(dispatch, "attention_slots", faulty)


def stale_last_id(patch: Patch) -> None:
    """Decodes of a graph are fed the id before the last one.  Padding has a row of its own, behind the slots'."""
    begin = dispatch.begin
    held: list[torch.Tensor] = []

    def faulty(state: torch.Tensor, slots: torch.Tensor, tick: torch.Tensor, block_size: int) -> tuple[torch.Tensor, ...]:
        ids, positions, places, lengths = begin(state, slots, tick, block_size)
        if not held:  # the first call is no capture
            held.append(torch.zeros(state.shape[0] + 1, dtype=ids.dtype, device=ids.device))
        rows = torch.where(slots >= 0, slots, state.shape[0]).long()
        stale = held[0][rows]
        held[0][rows] = ids
        return stale, positions, places, lengths

    patch.setattr(dispatch, "begin", faulty)


FAULTS: list[Callable[[Patch], None]] = [
    decode_position_plus_one, chunk_position_plus_one, blocks_swapped, mask_off_by_one, length_off_by_one, residual_dropped, stale_last_id,
]
