"""Greedy choice on the card: the best of each slice of the vocabulary, then the best slice.  See sample.py.

Both stages prefer the lower index among equals, so the lowest id wins as in vLLM.  Ids that a request may not choose yet are never
candidates; which these are is read from its slot (slots.py), so the host need not say it each step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels import slots as columns

FREE_FROM, SUPPRESSED, SUPPRESSED_IDS = (
    tl.constexpr(column) for column in (columns.FREE_FROM, columns.SUPPRESSED, columns.SUPPRESSED_IDS))
SLICE = 4096


@triton.jit
def _slice_kernel(logits, state, slots, positions, best, best_ids, vocab, stride, parts, SLICE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    ids = part * SLICE + tl.arange(0, SLICE)
    values = tl.load(logits + row * vocab + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    slot = tl.load(slots + row)
    own = state + tl.maximum(slot, 0).to(tl.int64) * stride
    restricted = (slot >= 0) & (tl.load(positions + row) < tl.load(own + FREE_FROM))
    for number in range(0, tl.where(restricted, tl.load(own + SUPPRESSED), 0)):
        values = tl.where(ids == tl.load(own + SUPPRESSED_IDS + number), float("-inf"), values)
    top, at = tl.max(values, axis=0, return_indices=True)
    tl.store(best + row * parts + part, top)
    tl.store(best_ids + row * parts + part, part * SLICE + at)


@triton.jit
def _row_kernel(best, best_ids, chosen, parts, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    _, at = tl.max(tl.load(best + row * parts + part, mask=part < parts, other=float("-inf")), axis=0, return_indices=True)
    tl.store(chosen + row, tl.load(best_ids + row * parts + at))


def greedy(logits: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Ids [S] int32 from logits [S, vocab], for the requests in slots [S] (-1: none) whose inputs stood at positions [S]."""
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, SLICE)
    best = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    best_ids = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    chosen = torch.empty(rows, dtype=torch.int32, device=logits.device)
    _slice_kernel[(rows, parts)](logits, state, slots, positions, best, best_ids, vocab, state.stride(0), parts, SLICE=SLICE, num_warps=4)
    _row_kernel[(rows,)](best, best_ids, chosen, parts, PARTS=triton.next_power_of_2(parts), num_warps=1)
    return chosen
