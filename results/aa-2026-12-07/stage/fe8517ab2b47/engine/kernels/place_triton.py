"""Norm, rotation and cache write of a layer's new tokens on the card, in one pass: one program a token and HEADS heads.  See place.py.

A head is held as its two halves, which is how the rotation pairs its values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels import dependent

HEADS = 16


@triton.jit
def _choose(condition, yes, no, inside):  # type: ignore[no-untyped-def]
    first = tl.load(yes, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(no, mask=inside, other=0.0).to(tl.float32)
    return tl.where(condition, first[None, :], second[None, :])


@triton.jit
def _place_kernel(  # type: ignore[no-untyped-def]
    qkv, query_norm, key_norm, cos, sin, cache, rows, eps, block_stride, token_stride, head_stride,
    QUERIES: tl.constexpr, TOTAL: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr,  # noqa: N803
    NORM: tl.constexpr, HEADS: tl.constexpr, DEPENDENT: tl.constexpr,  # noqa: N803
):
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    half = tl.arange(0, WIDE)
    inside = (heads < TOTAL)[:, None] & (half < HALF)[None, :]
    is_query = (heads < QUERIES)[:, None]
    is_value = (heads >= (TOTAL + QUERIES) // 2)[:, None]
    source = qkv + token * (TOTAL * 2 * HALF) + heads[:, None] * (2 * HALF) + half[None, :]
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        dtype = qkv.dtype.element_ty
        scale = tl.rsqrt(tl.sum(low * low + high * high, axis=1) / (2 * HALF) + eps)[:, None]
        low_weight = _choose(is_query, query_norm + half, key_norm + half, half < HALF)
        high_weight = _choose(is_query, query_norm + HALF + half, key_norm + HALF + half, half < HALF)
        low = tl.where(is_value, low, ((low * scale).to(dtype).to(tl.float32) * low_weight).to(dtype).to(tl.float32))
        high = tl.where(is_value, high, ((high * scale).to(dtype).to(tl.float32) * high_weight).to(dtype).to(tl.float32))
    turn = tl.load(cos + token * HALF + half, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
    lift = tl.load(sin + token * HALF + half, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
    new_low = tl.where(is_value, low, low * turn - high * lift)
    new_high = tl.where(is_value, high, high * turn + low * lift)
    tl.store(source, new_low, mask=inside & is_query)
    tl.store(source + HALF, new_high, mask=inside & is_query)
    row = tl.load(rows + token).to(tl.int64)
    target = cache + row // BLOCK_SIZE * block_stride + row % BLOCK_SIZE * token_stride + (heads - QUERIES)[:, None] * head_stride
    stored = inside & (heads >= QUERIES)[:, None]
    tl.store(target + half[None, :], new_low, mask=stored)
    tl.store(target + HALF + half[None, :], new_high, mask=stored)


def place(
    qkv: torch.Tensor, heads: int, norms: tuple[torch.Tensor, torch.Tensor] | None, eps: float, cos: torch.Tensor, sin: torch.Tensor,
    cache: torch.Tensor, rows: torch.Tensor,
) -> None:
    """See `place.place_reference`.  In bfloat16 a rotated value is rounded once, from float32."""
    tokens, total, dim = qkv.shape
    query_norm, key_norm = norms if norms is not None else (qkv, qkv)
    _place_kernel[(tokens, triton.cdiv(total, HEADS))](
        qkv, query_norm, key_norm, cos, sin, cache, rows, eps, cache.stride(0), cache.stride(1), cache.stride(2),
        QUERIES=heads, TOTAL=total, HALF=dim // 2, WIDE=triton.next_power_of_2(dim // 2), BLOCK_SIZE=cache.shape[1],
        NORM=norms is not None, HEADS=HEADS, num_warps=4, **dependent.options())
