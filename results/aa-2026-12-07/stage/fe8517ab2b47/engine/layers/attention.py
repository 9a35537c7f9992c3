"""Attention of one layer over a mixed batch: decodes in one call, then prompt chunks, one by one or as tiles of one call."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.batch import Batch, SlotBatch
from engine.kernels import dispatch as ops
from engine.kernels.gdn import GdnState


@dataclass(frozen=True)
class Caches:
    """What lasts between steps and the model reads: keys and values [full layers, blocks, block_size, 2 * Hkv, D], block tables
    [slots, W], and of each gated delta net layer the slots' states."""

    keys_values: torch.Tensor
    block_tables: torch.Tensor
    states: tuple[GdnState, ...] = ()


def paged_attention(
    query: torch.Tensor, cache: torch.Tensor, block_tables: torch.Tensor, batch: Batch | SlotBatch, scale: float
) -> torch.Tensor:
    """query [T, H, D] of the batch's tokens, whose keys and values are in this layer's `cache` already -> [T, H * D]."""
    if isinstance(batch, SlotBatch):
        return ops.attention_slots(query, cache, block_tables, batch.slots, batch.lengths, batch.tiles, scale).flatten(1)
    if ops.reads_pages(query, cache):
        return ops.attention_pages(query, cache, block_tables, batch.slots, batch.positions, scale).flatten(1)
    decodes = batch.decode_tables.shape[0]
    parts = []
    if decodes:
        parts.append(ops.attention_decode(query[:decodes], cache, batch.decode_tables, batch.decode_mask, scale))
    for first, length, total, slot in batch.chunks:
        blocks = block_tables[slot, : -(-total // cache.shape[1])]
        parts.append(ops.attention_prefill(query[first : first + length], cache, blocks, total, scale))
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.view(query.shape[0], -1)
