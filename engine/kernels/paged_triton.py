"""Where a tile of a request's tokens lies in a layer's paged cache; shared by the attention kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def places_of(table, start, end, block_stride, token_stride, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Offsets [TILE] of tokens from `start` on; those from `end` on must be masked.  One look-up where a tile lies in one block."""
    if BLOCK_SIZE % TILE == 0:
        block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
        places = block * block_stride + (start % BLOCK_SIZE + tl.arange(0, TILE)) * token_stride
    else:
        tokens = start + tl.arange(0, TILE)
        blocks = tl.load(table + tokens // BLOCK_SIZE, mask=tokens < end, other=0).to(tl.int64)
        places = blocks * block_stride + tokens % BLOCK_SIZE * token_stride
    return places
