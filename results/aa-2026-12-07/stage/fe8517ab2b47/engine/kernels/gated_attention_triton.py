"""A gated attention layer's new tokens on the card: norm, partial rotation and cache write in one pass, and the output gate in another.

One program a token and head.  A head is held as the pairs that the rotation turns and the rest that it leaves.  See gated_attention.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from engine.kernels import dependent

GATE_BLOCK = 2048


@triton.jit
def _place_kernel(  # type: ignore[no-untyped-def]
    projected, query, query_norm, key_norm, cos, sin, cache, rows, eps, block_stride, token_stride, head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, HALF: tl.constexpr,  # noqa: N803
    BLOCK_SIZE: tl.constexpr, DEPENDENT: tl.constexpr,  # noqa: N803
):
    if DEPENDENT:
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    is_query = head < HEADS
    is_value = head >= HEADS + KV_HEADS
    place = tl.where(is_query, 2 * head, HEADS + head)
    source = projected + (token * (2 * HEADS + 2 * KV_HEADS) + place) * DIM
    column = tl.arange(0, WIDE)
    inside = column < DIM
    value = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / DIM + eps)
    # The rotation pairs column i with i + HALF: each column loads its partner, so no program exchanges registers.
    turned = column < 2 * HALF
    is_low = column < HALF
    partner = tl.where(is_low, column + HALF, column - HALF)
    other = tl.load(source + partner, mask=turned, other=0.0).to(tl.float32)
    factor = 1.0 + _norm_weight(query_norm, key_norm, is_query, column, inside)
    other_factor = 1.0 + _norm_weight(query_norm, key_norm, is_query, partner, turned)
    dtype = projected.dtype.element_ty
    normed = (value * scale * factor).to(dtype).to(tl.float32)
    other = (other * scale * other_factor).to(dtype).to(tl.float32)
    angle = tl.where(is_low, column, column - HALF)
    turn = tl.load(cos + token * HALF + angle, mask=turned, other=1.0).to(tl.float32)
    lift = tl.load(sin + token * HALF + angle, mask=turned, other=0.0).to(tl.float32)
    result = normed * turn + tl.where(is_low, -other, other) * lift
    result = tl.where(is_value, value, tl.where(turned, result, normed))
    if is_query:
        tl.store(query + (token * HEADS + head) * DIM + column, result, mask=inside)
    else:
        row = tl.load(rows + token).to(tl.int64)
        target = cache + row // BLOCK_SIZE * block_stride + row % BLOCK_SIZE * token_stride + (head - HEADS) * head_stride
        tl.store(target + column, result, mask=inside)


@triton.jit
def _norm_weight(query_norm, key_norm, is_query, column, inside):  # type: ignore[no-untyped-def]
    of_query = tl.load(query_norm + column, mask=inside & is_query, other=0.0).to(tl.float32)
    of_key = tl.load(key_norm + column, mask=inside & (is_query == 0), other=0.0).to(tl.float32)
    return of_query + of_key


@triton.jit
def _gate_kernel(  # type: ignore[no-untyped-def]
    out, projected, gated, width, projected_stride, DIM: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,  # noqa: N803
):
    if DEPENDENT:
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(out + token * width + column, mask=inside, other=0.0).to(tl.float32)
    place = column // DIM * (2 * DIM) + DIM + column % DIM
    gate = tl.load(projected + token * projected_stride + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(gated + token * width + column, value * tl.sigmoid(gate), mask=inside)


def place_gated(
    projected: torch.Tensor, heads: int, norms: tuple[torch.Tensor, torch.Tensor], eps: float, cos: torch.Tensor, sin: torch.Tensor,
    cache: torch.Tensor, rows: torch.Tensor,
) -> torch.Tensor:
    """See `gated_attention.place_gated_reference`; `projected` is contiguous.  A rotated value is rounded once, from float32."""
    tokens, _, dim = projected.shape
    kv_heads = cache.shape[2] // 2
    query = torch.empty(tokens, heads, dim, dtype=projected.dtype, device=projected.device)
    _place_kernel[(tokens, heads + 2 * kv_heads)](
        projected, query, *norms, cos, sin, cache, rows, eps, cache.stride(0), cache.stride(1), cache.stride(2),
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, WIDE=triton.next_power_of_2(dim), HALF=cos.shape[1], BLOCK_SIZE=cache.shape[1],
        num_warps=1, **dependent.options())
    return query


def gate(out: torch.Tensor, projected: torch.Tensor, heads: int) -> torch.Tensor:
    """See `gated_attention.gate_reference`."""
    tokens, width = out.shape
    gated = torch.empty_like(out)
    _gate_kernel[(tokens, triton.cdiv(width, GATE_BLOCK))](
        out, projected, gated, width, projected.stride(0), DIM=projected.shape[2], BLOCK=GATE_BLOCK, **dependent.options())
    return gated
