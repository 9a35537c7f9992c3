"""Prompt chunks through the gated delta rule on the card, from and to the slots' states in place.  See gdn.py for the formulas.

Five launches: the convolution and its states; what is parallel over chunks of 64 tokens (U, W, running decay); the scan over chunks,
whose programs each hold a slice of one head's state from the segment's first token to its last; the gated norm.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels import gdn
from engine.kernels.conv_triton import conv_chunks
from engine.kernels.gdn import GdnState, GdnWeights
from engine.kernels.gdn_decode_triton import decay_of

CHUNK, EPS = tl.constexpr(gdn.CHUNK), tl.constexpr(gdn.L2_EPS)
BLOCK = tl.constexpr(16)
"""Rows of the diagonal blocks that are inverted row by row."""
PRECISION = tl.constexpr("tf32x3")
"""Of products of float32: near float32, on the matrix units."""


class Tuning(NamedTuple):
    """Of the scan: values of a state's slice, warps a program, stages of its loop."""

    values: int
    warps: int
    stages: int


HALF_PRECISION, FULL_PRECISION = Tuning(64, 4, 2), Tuning(32, 4, 1)


@triton.jit
def _inverse(system):  # type: ignore[no-untyped-def]
    """(I + system)^-1 of a strictly lower [CHUNK, CHUNK] in float32: diagonal blocks by substitution, which no cancellation can spoil;
    then (I + M)^-1 = (I - M)(I + M^2) for the block part M, whose fourth power is 0."""
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    same = row // BLOCK == column // BLOCK
    diagonal = tl.where(same, system, 0.0)
    inverse = tl.zeros((CHUNK, CHUNK), tl.float32)
    for i in range(1, BLOCK):
        now = row % BLOCK == i
        line = tl.sum(tl.where(now, diagonal, 0.0), axis=0)
        line += tl.sum(line[:, None] * inverse, axis=0)
        inverse = tl.where(now & same, -line[None, :], inverse)
    one = tl.where(row == column, 1.0, 0.0)
    inverse += one
    between = tl.dot(inverse, tl.where(same, 0.0, system), input_precision=PRECISION)
    squared = tl.dot(between, between, input_precision=PRECISION)
    return tl.dot(tl.dot(one - between, one + squared, input_precision=PRECISION), inverse, input_precision=PRECISION)


@triton.jit
def _unit(x):  # type: ignore[no-untyped-def]
    """Rows of x [T, K] in float32, of unit length."""
    x = x.to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, axis=1) + EPS)[:, None]


@triton.jit
def _prepare_kernel(  # type: ignore[no-untyped-def]
    mixed, projected, a_log, dt_bias, segments, new, seen, decays, channels, projected_stride,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDE_K: tl.constexpr, WIDE_V: tl.constexpr,  # noqa: N803
):
    segment = segments + tl.program_id(0) * 4
    first, count = tl.load(segment), tl.load(segment + 1)
    begin = tl.program_id(1) * CHUNK
    if begin >= count:
        return
    head = tl.program_id(2)
    at = tl.arange(0, CHUNK)
    inside = begin + at < count
    row = (first + begin + at).to(tl.int64)
    key, value = tl.arange(0, WIDE_K), tl.arange(0, WIDE_V)
    has_key, has_value = inside[:, None] & (key < K)[None, :], inside[:, None] & (value < V)[None, :]
    dtype = mixed.dtype.element_ty
    source = mixed + row[:, None] * channels
    key_place = (KEY_HEADS + head // (HEADS // KEY_HEADS)) * K + key
    k = _unit(tl.load(source + key_place[None, :], mask=has_key, other=0.0))
    v = tl.load(source + (2 * KEY_HEADS * K + head * V + value)[None, :], mask=has_value, other=0.0).to(tl.float32)
    rest = projected + row * projected_stride + channels + HEADS * V + head
    beta = tl.where(inside, tl.sigmoid(tl.load(rest, mask=inside, other=0.0).to(tl.float32)), 0.0)
    g = decay_of(tl.load(rest + HEADS, mask=inside, other=0.0), tl.load(dt_bias + head), tl.load(a_log + head))
    total = tl.cumsum(tl.where(inside, g, 0.0), axis=0)
    rounded = k.to(dtype)
    product = tl.dot(rounded, tl.trans(rounded), input_precision=PRECISION)
    decay = tl.exp(total[:, None] - total[None, :])
    mixer = _inverse(tl.where(at[:, None] > at[None, :], beta[:, None] * product * decay, 0.0)).to(dtype)
    u = tl.dot(mixer, (beta[:, None] * v).to(dtype), input_precision=PRECISION)
    w = tl.dot(mixer, ((beta * tl.exp(total))[:, None] * k).to(dtype), input_precision=PRECISION)
    target = row * HEADS + head
    tl.store(new + target[:, None] * V + value[None, :], u, mask=has_value)
    tl.store(seen + target[:, None] * K + key[None, :], w, mask=has_key)
    tl.store(decays + target, total, mask=inside)


@triton.jit
def _scan_kernel(  # type: ignore[no-untyped-def]
    mixed, new, seen, decays, states, segments, out, channels,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDE_K: tl.constexpr, VALUES: tl.constexpr,  # noqa: N803
):
    segment = segments + tl.program_id(0) * 4
    first, count, position, slot = (tl.load(segment), tl.load(segment + 1), tl.load(segment + 2), tl.load(segment + 3))
    head = tl.program_id(1)
    at = tl.arange(0, CHUNK)
    key, value = tl.arange(0, WIDE_K), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    dtype = mixed.dtype.element_ty
    place = states + ((slot.to(tl.int64) * HEADS + head) * V + value[None, :]) * K + key[:, None]
    within = (key < K)[:, None] & (value < V)[None, :]
    state = tl.load(place, mask=within & (position > 0), other=0.0)
    query_place = head // (HEADS // KEY_HEADS) * K + key
    for begin in range(0, count, CHUNK):
        inside = begin + at < count
        row = (first + begin + at).to(tl.int64)
        has_key, has_value = inside[:, None] & (key < K)[None, :], inside[:, None] & (value < V)[None, :]
        source = mixed + row[:, None] * channels + query_place[None, :]
        q = (_unit(tl.load(source, mask=has_key, other=0.0)) * (K ** -0.5)).to(dtype)
        k = _unit(tl.load(source + KEY_HEADS * K, mask=has_key, other=0.0)).to(dtype)
        target = row * HEADS + head
        w = tl.load(seen + target[:, None] * K + key[None, :], mask=has_key, other=0.0)
        u = tl.load(new + target[:, None] * V + value[None, :], mask=has_value, other=0.0).to(tl.float32)
        total = tl.load(decays + target, mask=inside, other=0.0)
        last = tl.load(decays + (first + tl.minimum(begin + CHUNK, count) - 1).to(tl.int64) * HEADS + head)
        held = state.to(dtype)
        fresh = u - tl.dot(w, held, input_precision=PRECISION)
        seen_by = (at[:, None] >= at[None, :]) & inside[:, None]
        score = tl.where(seen_by, tl.dot(q, tl.trans(k), input_precision=PRECISION) * tl.exp(total[:, None] - total[None, :]), 0.0)
        read = tl.exp(total)[:, None] * tl.dot(q, held, input_precision=PRECISION)
        read += tl.dot(score.to(dtype), fresh.to(dtype), input_precision=PRECISION)
        tl.store(out + target[:, None] * V + value[None, :], read, mask=has_value)
        faded = (tl.exp(last - total)[:, None] * fresh).to(dtype)
        state = tl.exp(last) * state + tl.dot(tl.trans(k), faded, input_precision=PRECISION)
    tl.store(place, state, mask=within)


@triton.jit
def _norm_kernel(out, projected, norm, eps, channels, projected_stride, HEADS: tl.constexpr, V: tl.constexpr, WIDE_V: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    value = tl.arange(0, WIDE_V)
    inside = value < V
    place = out + (row * HEADS + head) * V + value
    read = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(projected + row * projected_stride + channels + head * V + value, mask=inside, other=0.0).to(tl.float32)
    normed = read * tl.rsqrt(tl.sum(read * read) / V + eps) * tl.load(norm + value, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, normed * z * tl.sigmoid(z), mask=inside)


def gdn_prefill(
    projected: torch.Tensor, weights: GdnWeights, state: GdnState, segments: torch.Tensor, out: torch.Tensor, begin: int,
    tuning: Tuning | None = None,
) -> None:
    """See `gdn.gdn_prefill_reference`: rows from `begin` on of projected [T, ...] into those of out [T, Hv * V].

    `segments` [C, 4] (first row, rows, position, slot) name all of them; one at position 0 begins its request.
    """
    rows, channels = projected.shape[0], weights.conv.shape[0]
    _, heads, value_dim, key_dim = state.recurrent.shape
    tuning = tuning or (HALF_PRECISION if projected.dtype == torch.bfloat16 else FULL_PRECISION)
    mixed = conv_chunks(projected[:, :channels], weights.conv, state.conv, segments)
    new = torch.empty(rows, heads, value_dim, dtype=projected.dtype, device=projected.device)
    seen = torch.empty(rows, heads, key_dim, dtype=projected.dtype, device=projected.device)
    decays = torch.empty(rows, heads, dtype=torch.float32, device=projected.device)
    sizes = {"KEY_HEADS": (channels - heads * value_dim) // (2 * key_dim), "HEADS": heads, "K": key_dim, "V": value_dim,
             "WIDE_K": max(16, triton.next_power_of_2(key_dim))}
    wide = max(16, triton.next_power_of_2(value_dim))
    count = segments.shape[0]
    _prepare_kernel[(count, triton.cdiv(rows - begin, gdn.CHUNK), heads)](
        mixed, projected, weights.a_log, weights.dt_bias, segments, new, seen, decays, channels, projected.stride(0), **sizes, WIDE_V=wide,
        num_warps=4)
    _scan_kernel[(count, heads, triton.cdiv(value_dim, min(wide, tuning.values)))](
        mixed, new, seen, decays, state.recurrent, segments, out, channels, **sizes, VALUES=min(wide, tuning.values),
        num_warps=tuning.warps, num_stages=tuning.stages)
    _norm_kernel[(rows - begin, heads)](
        out[begin:], projected[begin:], weights.norm, weights.eps, channels, projected.stride(0), HEADS=heads, V=value_dim,
        WIDE_V=triton.next_power_of_2(value_dim), num_warps=1)
