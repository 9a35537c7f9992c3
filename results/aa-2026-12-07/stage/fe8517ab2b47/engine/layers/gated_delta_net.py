"""The gated delta rule of one layer over a mixed batch: decodes in one call, then prompt chunks, each from and to its slot's state."""

from __future__ import annotations

import torch

from engine.batch import Batch, SlotBatch
from engine.kernels import dispatch as ops
from engine.kernels.gdn import GdnState, GdnWeights


def gated_delta_net(projected: torch.Tensor, weights: GdnWeights, state: GdnState, batch: Batch | SlotBatch) -> torch.Tensor:
    """projected [T, C + Hv * V + 2 * Hv] (see `gdn.Projected`) of the batch's tokens -> [T, Hv * V]; the slots' states move on.

    A row at position 0 begins a request, so whatever its slot holds is another's and is not read.
    """
    if isinstance(batch, SlotBatch):
        return ops.gdn_slots(projected, weights, state, batch.slots, batch.lengths, batch.segments)
    decodes = batch.decode_slots.shape[0]
    parts = []
    if decodes:
        parts.append(ops.gdn_decode(projected[:decodes], weights, state, batch.decode_slots, batch.positions[:decodes] == 0))
    for first, length, total, slot in batch.chunks:
        parts.append(ops.gdn_prefill(projected[first : first + length], weights, state, slot, total == length))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
