"""Where a tile of a request's tokens lies in a layer's paged cache; shared by the attention kernels.

The look-up is apart from its use: a kernel looks up the next tile while it reads this one, so no read waits for a block number.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def blocks_of(table, start, end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Blocks of the tile of tokens from `start` on: one where a tile lies in one block, else one a token; 0 from `end` on."""
    if BLOCK_SIZE % TILE == 0:
        blocks = tl.load(table + start // BLOCK_SIZE, mask=start < end, other=0)
    else:
        tokens = start + tl.arange(0, TILE)
        blocks = tl.load(table + tokens // BLOCK_SIZE, mask=tokens < end, other=0)
    return blocks


@triton.jit
def places_of(blocks, start, block_stride, token_stride, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Offsets [TILE] in the cache of the tokens from `start` on, which lie in `blocks`."""
    if BLOCK_SIZE % TILE == 0:
        places = blocks.to(tl.int64) * block_stride + (start % BLOCK_SIZE + tl.arange(0, TILE)) * token_stride
    else:
        places = blocks.to(tl.int64) * block_stride + (start + tl.arange(0, TILE)) % BLOCK_SIZE * token_stride
    return places
