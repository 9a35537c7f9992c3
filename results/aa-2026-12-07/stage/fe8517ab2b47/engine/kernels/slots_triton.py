"""The two ends of a decode step on the card, so that a whole step is one graph with no word from the host.  See slots.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels import slots as columns

LAST_ID, LENGTH, BLOCKS = (tl.constexpr(column) for column in (columns.LAST_ID, columns.LENGTH, columns.BLOCKS))


@triton.jit
def _begin_kernel(state, slots, tick, ids, positions, places, lengths, stride, BLOCK_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    active = slot >= 0
    own = state + tl.maximum(slot, 0).to(tl.int64) * stride
    position = tl.where(active, tl.load(own + LENGTH), 0)
    block = tl.load(own + BLOCKS + position // BLOCK_SIZE)
    tl.store(ids + row, tl.where(active, tl.load(own + LAST_ID), 0))
    tl.store(positions + row, position)
    tl.store(places + row, tl.where(active, block * BLOCK_SIZE + position % BLOCK_SIZE, 0))
    tl.store(lengths + row, tl.where(active, position + 1, 0))
    if row == 0:
        tl.store(tick, tl.load(tick) + 1)


@triton.jit(do_not_specialize=["count"])
def _advance_kernel(state, slots, positions, ids, tick, handed, count, stride, handed_stride, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    rows = tl.arange(0, ROWS)
    inside = rows < count
    slot = tl.load(slots + rows, mask=inside, other=-1)
    chosen = tl.load(ids + rows, mask=inside, other=0)
    position = tl.load(positions + rows, mask=inside, other=0)
    own = state + slot.to(tl.int64) * stride
    tl.store(own + LAST_ID, chosen, mask=slot >= 0)
    tl.store(own + LENGTH, position + 1, mask=slot >= 0)
    tl.store(handed + tl.load(tick) % 2 * handed_stride + rows, chosen, mask=inside)


def begin(
    state: torch.Tensor, slots: torch.Tensor, tick: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `slots.begin_reference`; everything int32."""
    rows = slots.shape[0]
    made = torch.empty(4, -(-rows // 4) * 4, dtype=torch.int32, device=slots.device)[:, :rows].unbind(0)
    _begin_kernel[(rows,)](state, slots, tick, *made, state.stride(0), BLOCK_SIZE=block_size, num_warps=1)
    return made[0], made[1], made[2], made[3]


def advance(
    state: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor, tick: torch.Tensor, handed: torch.Tensor
) -> None:
    """See `slots.advance_reference`."""
    _advance_kernel[(1,)](state, slots, positions, ids, tick, handed, ids.shape[0], state.stride(0), handed.stride(0),
                          ROWS=triton.next_power_of_2(handed.shape[1]), num_warps=1)
