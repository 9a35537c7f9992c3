"""One token of the gated delta rule on the card, in two launches: the convolution, then everything else.  See gdn.py.

One program a row and value head holds the head's whole state [V, K]: it is read once, moved on, read out, written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from engine.kernels import dependent
from engine.kernels.conv_triton import conv_decode
from engine.kernels.gdn import L2_EPS, GdnState, GdnWeights

WARPS = 8
EPS = tl.constexpr(L2_EPS)


@triton.jit
def decay_of(a, dt_bias, a_log):  # type: ignore[no-untyped-def]
    """g = -exp(a_log) softplus(a + dt_bias), float32; softplus is the identity above 20, where they are equal in float32."""
    x = a.to(tl.float32) + dt_bias
    return -tl.exp(a_log) * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _decode_kernel(  # type: ignore[no-untyped-def]
    mixed, projected, a_log, dt_bias, norm, states, slots, lengths, out, eps, channels, projected_stride,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDE_K: tl.constexpr, WIDE_V: tl.constexpr,  # noqa: N803
    DEPENDENT: tl.constexpr,  # noqa: N803
):
    if DEPENDENT:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    key, value = tl.arange(0, WIDE_K), tl.arange(0, WIDE_V)
    has_key, has_value = key < K, value < V
    target = out + (row * HEADS + head) * V + value
    slot = tl.load(slots + row)
    if slot < 0:
        tl.store(target, tl.zeros((WIDE_V,), tl.float32), mask=has_value)
        return
    inside = has_value[:, None] & has_key[None, :]
    place = states + ((slot.to(tl.int64) * HEADS + head) * V + value[:, None]) * K + key[None, :]
    state = tl.load(place, mask=inside & (tl.load(lengths + row) > 1), other=0.0)
    source = mixed + row * channels + head // (HEADS // KEY_HEADS) * K + key
    q = tl.load(source, mask=has_key, other=0.0).to(tl.float32)
    k = tl.load(source + KEY_HEADS * K, mask=has_key, other=0.0).to(tl.float32)
    v = tl.load(mixed + row * channels + 2 * KEY_HEADS * K + head * V + value, mask=has_value, other=0.0).to(tl.float32)
    q *= tl.rsqrt(tl.sum(q * q) + EPS) * (K ** -0.5)
    k *= tl.rsqrt(tl.sum(k * k) + EPS)
    rest = projected + row * projected_stride + channels
    z = tl.load(rest + head * V + value, mask=has_value, other=0.0).to(tl.float32)
    beta = tl.sigmoid(tl.load(rest + HEADS * V + head).to(tl.float32))
    g = decay_of(tl.load(rest + HEADS * V + HEADS + head), tl.load(dt_bias + head), tl.load(a_log + head))
    state *= tl.exp(g)
    error = beta * (v - tl.sum(state * k[None, :], axis=1))
    state += error[:, None] * k[None, :]
    tl.store(place, state, mask=inside)
    read = tl.sum(state * q[None, :], axis=1)
    normed = read * tl.rsqrt(tl.sum(read * read) / V + eps) * tl.load(norm + value, mask=has_value, other=0.0).to(tl.float32)
    tl.store(target, normed * z * tl.sigmoid(z), mask=has_value)


def gdn_decode(
    projected: torch.Tensor, weights: GdnWeights, state: GdnState, slots: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor
) -> None:
    """See `gdn.gdn_decode_reference`: the first D rows of projected [T, ...] into those of out [T, Hv * V]; slots, lengths [D].

    A row of length 1 is its request's first token.  Rows of slot -1 are padding: they give zeros and touch no state.
    """
    rows = slots.shape[0]
    channels = weights.conv.shape[0]
    _, heads, value_dim, key_dim = state.recurrent.shape
    mixed = conv_decode(projected[:rows, :channels], weights.conv, state.conv, slots, lengths)
    _decode_kernel[(rows, heads)](
        mixed, projected, weights.a_log, weights.dt_bias, weights.norm, state.recurrent, slots, lengths, out, weights.eps, channels,
        projected.stride(0), KEY_HEADS=(channels - heads * value_dim) // (2 * key_dim), HEADS=heads, K=key_dim, V=value_dim,
        WIDE_K=triton.next_power_of_2(key_dim), WIDE_V=triton.next_power_of_2(value_dim), num_warps=WARPS, **dependent.options())
