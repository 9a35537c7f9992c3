"""Causal attention of prompt chunks over paged keys and values, on the card: one launch for all chunks of a step.  See attention.py.

One program a tile of a chunk's rows and query head, flash attention (Dao 2023): keys that every row of the tile may see go without a
mask, the last ones with it.  Tiles are data, so chunks of any number and length are one grid; the batch lists long tiles first.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.paged_triton import blocks_of, places_of


class Tuning(NamedTuple):
    """Keys read at a time, warps a program, tiles in flight."""

    tile: int
    warps: int
    stages: int


HALF_PRECISION, FULL_PRECISION = Tuning(32, 4, 3), Tuning(16, 4, 1)


def tile_rows(dtype: torch.dtype) -> int:
    """Rows of a tile: 128 in bfloat16; fewer in float32, whose products have no matrix unit and must fit the registers."""
    return 128 if dtype == torch.bfloat16 else 16


@triton.jit
def _fold(  # type: ignore[no-untyped-def]
    q, mixed, top, total, keys, values, table, begin, end, last_seen, block_stride, token_stride, scale,
    DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,  # noqa: N803
):
    """Fold keys begin to end into the running softmax; row i sees keys up to last_seen[i], and with MASKED off all of them."""
    dims = tl.arange(0, WIDE)
    blocks = blocks_of(table, begin, end, BLOCK_SIZE, TILE)
    for start in range(begin, end, TILE):
        tokens = start + tl.arange(0, TILE)
        inside = tokens < end
        places = places_of(blocks, start, block_stride, token_stride, BLOCK_SIZE, TILE)[:, None] + dims[None, :]
        blocks = blocks_of(table, start + TILE, end, BLOCK_SIZE, TILE)
        if MASKED or DIM != WIDE:
            seen = inside[:, None] & (dims < DIM)[None, :]
            k = tl.load(keys + places, mask=seen, other=0.0)
            v = tl.load(values + places, mask=seen, other=0.0)
        else:
            k = tl.load(keys + places)
            v = tl.load(values + places)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if MASKED:
            scores = tl.where(inside[None, :] & (tokens[None, :] <= last_seen[:, None]), scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        fade = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[:, None])
        total = total * fade + tl.sum(weights, axis=1)
        mixed = mixed * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = new_top
    return mixed, top, total


@triton.jit
def _prefill_kernel(  # type: ignore[no-untyped-def]
    query, cache, tables, tiles, out, scale, query_stride, table_stride, block_stride, token_stride, head_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr, TILE: tl.constexpr,  # noqa: N803
):
    head = tl.program_id(0)
    tile = tiles + tl.program_id(1) * 4
    first = tl.load(tile).to(tl.int64)
    count = tl.load(tile + 1)
    position = tl.load(tile + 2)
    slot = tl.load(tile + 3).to(tl.int64)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, WIDE)
    kept = (rows < count)[:, None] & (dims < DIM)[None, :]
    q = tl.load(query + (first + rows)[:, None] * query_stride + head * DIM + dims[None, :], mask=kept, other=0.0)
    table = tables + slot * table_stride
    keys = cache + head // GROUP * head_stride
    values = keys + KV_HEADS * head_stride
    mixed = tl.zeros((ROWS, WIDE), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    last_seen = position + rows
    clear = (position + 1) // TILE * TILE
    mixed, top, total = _fold(q, mixed, top, total, keys, values, table, 0, clear, last_seen, block_stride, token_stride, scale,
                              DIM, WIDE, BLOCK_SIZE, TILE, False)
    mixed, top, total = _fold(q, mixed, top, total, keys, values, table, clear, position + count, last_seen, block_stride, token_stride,
                              scale, DIM, WIDE, BLOCK_SIZE, TILE, True)
    target = out + (first + rows)[:, None] * (KV_HEADS * GROUP * DIM) + head * DIM + dims[None, :]
    tl.store(target, mixed / total[:, None], mask=kept)


def attention_prefill(
    query: torch.Tensor, cache: torch.Tensor, tables: torch.Tensor, tiles: torch.Tensor, out: torch.Tensor, scale: float,
    tuning: Tuning | None = None,
) -> None:
    """Into out [T, H, D] (contiguous), for the rows of query [T, H, D] that `tiles` name.

    tiles [N, 4] int32: first row, number of rows (at most `tile_rows`), the first row's position in its request, the request's slot.
    """
    _, heads, dim = query.shape
    kv_heads = cache.shape[2] // 2
    tuning = tuning or (HALF_PRECISION if query.dtype == torch.bfloat16 else FULL_PRECISION)
    _prefill_kernel[(heads, tiles.shape[0])](
        query, cache, tables, tiles, out, scale * math.log2(math.e), query.stride(0), tables.stride(0),
        cache.stride(0), cache.stride(1), cache.stride(2), KV_HEADS=kv_heads, GROUP=heads // kv_heads, DIM=dim,
        WIDE=max(16, triton.next_power_of_2(dim)), BLOCK_SIZE=cache.shape[1], ROWS=tile_rows(query.dtype), TILE=tuning.tile,
        num_warps=tuning.warps, num_stages=tuning.stages)
