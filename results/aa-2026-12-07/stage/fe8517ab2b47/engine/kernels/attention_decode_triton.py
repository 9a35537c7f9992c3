"""Attention of one new token a request over its paged keys and values, on the card.  See attention.py.

One program a request and KV head, with all query heads of the group packed into one tile: each key and value is read once.  At 32
requests and 8 KV heads that is one wave of an H200's 132 multiprocessors, two programs each, so keys are not split and nothing has to be
combined.  Softmax is the online form (Milakov and Gimelshein 2018; Dao et al. 2022), in base 2.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from engine.kernels import dependent
from engine.kernels.paged_triton import blocks_of, places_of


class Tuning(NamedTuple):
    """Tokens read at a time, warps a program, tiles in flight."""

    tile: int
    warps: int
    stages: int


HALF_PRECISION, FULL_PRECISION = Tuning(32, 2, 6), Tuning(16, 4, 2)


@triton.jit
def _decode_kernel(  # type: ignore[no-untyped-def]
    query, cache, tables, slots, lengths, out, scale, query_stride, table_stride, block_stride, token_stride, head_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,  # noqa: N803
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, DEPENDENT: tl.constexpr,  # noqa: N803
):
    if DEPENDENT:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    slot = tl.load(slots + row)
    length = tl.load(lengths + row)
    heads = tl.arange(0, PACK)
    dims = tl.arange(0, WIDE)
    group = (heads < GROUP)[:, None] & (dims < DIM)[None, :]
    offsets = (kv_head * GROUP + heads)[:, None] * DIM + dims[None, :]
    q = tl.load(query + row * query_stride + offsets, mask=group, other=0.0)
    top = tl.full((PACK,), float("-inf"), tl.float32)
    total = tl.zeros((PACK,), tl.float32)
    mixed = tl.zeros((PACK, WIDE), tl.float32)
    table = tables + slot.to(tl.int64) * table_stride
    keys = cache + kv_head * head_stride
    values = keys + KV_HEADS * head_stride
    blocks = blocks_of(table, 0, length, BLOCK_SIZE, TILE)
    for start in range(0, length, TILE):
        tokens = start + tl.arange(0, TILE)
        inside = tokens < length
        places = places_of(blocks, start, block_stride, token_stride, BLOCK_SIZE, TILE)[:, None] + dims[None, :]
        blocks = blocks_of(table, start + TILE, length, BLOCK_SIZE, TILE)
        seen = inside[:, None] if DIM == WIDE else inside[:, None] & (dims < DIM)[None, :]
        k = tl.load(keys + places, mask=seen, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        fade = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[:, None])
        v = tl.load(values + places, mask=seen, other=0.0)
        total = total * fade + tl.sum(weights, axis=1)
        mixed = mixed * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = new_top
    result = mixed / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + row * (KV_HEADS * GROUP * DIM) + offsets, result, mask=group)


def attention_decode(
    query: torch.Tensor, cache: torch.Tensor, tables: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor,
    scale: float, tuning: Tuning | None = None,
) -> None:
    """Into out [>= B, H, D] (contiguous): row b of query [>= B, H, D] attends to the first lengths[b] keys of the request in slots[b].

    `tables` [slots, W] int32 are all slots' blocks; slots and lengths [B] int32.  A row of length 0 reads nothing and gives zeros.
    """
    _, _, dim = query.shape
    kv_heads = cache.shape[2] // 2
    group = query.shape[1] // kv_heads
    tuning = tuning or (HALF_PRECISION if query.dtype == torch.bfloat16 else FULL_PRECISION)
    _decode_kernel[(slots.shape[0], kv_heads)](
        query, cache, tables, slots, lengths, out, scale * math.log2(math.e), query.stride(0), tables.stride(0),
        cache.stride(0), cache.stride(1), cache.stride(2), KV_HEADS=kv_heads, GROUP=group, PACK=max(16, triton.next_power_of_2(group)),
        DIM=dim, WIDE=max(16, triton.next_power_of_2(dim)), BLOCK_SIZE=cache.shape[1], TILE=tuning.tile,
        num_warps=tuning.warps, num_stages=tuning.stages, **dependent.options())
