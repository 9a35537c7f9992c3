"""The gated delta rule (Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks"): a linear attention whose state is a matrix a head.

Per value head, S [V, K] in float32, value by key, from one token to the next:

    S <- exp(g) S;   e = beta (v - S k);   S <- S + e k^T;   o = S q

q and k are of unit length (q then scaled by 1/sqrt(K)); value head h reads key head h // (Hv / Hk).  The same over a chunk of C tokens,
with G the running sum of g inside it (the paper's chunkwise form):

    A = strictly lower (beta_i (k_i . k_j) exp(G_i - G_j));   T = (I + A)^-1;   U = T (beta V);   W = T (beta exp(G) K)
    V' = U - W S^T;   O = (exp(G) Q) S^T + lower((q_i . k_j) exp(G_i - G_j)) V';   S <- exp(G_C) S + V'^T (exp(G_C - G) K)

The two differ by rounding alone.  States are [slots, Hv, V, K]; a request's first token finds S = 0, whatever its slot held for another.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from engine.kernels.conv import conv_chunk_reference, conv_decode_reference

CHUNK = 64
L2_EPS = 1e-6


class GdnWeights(NamedTuple):
    """A layer's own weights: conv [C, width] and norm [V] in the model's dtype, a_log and dt_bias [Hv] in float32; eps is the norm's."""

    conv: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    eps: float


class GdnState(NamedTuple):
    """A layer's states by slot: conv [slots, width - 1, C] in the model's dtype, recurrent [slots, Hv, V, K] in float32."""

    conv: torch.Tensor
    recurrent: torch.Tensor


class Projected(NamedTuple):
    """What a layer's input projection [T, C + Hv * V + 2 * Hv] holds: views qkv [T, C], z [T, Hv, V], b and a [T, Hv]."""

    qkv: torch.Tensor
    z: torch.Tensor
    b: torch.Tensor
    a: torch.Tensor


def split_projected(projected: torch.Tensor, weights: GdnWeights) -> Projected:
    """The parts of `projected`, in its order: q, k and v that the convolution takes, the output gate z, b for beta, a for g."""
    heads, dim = weights.a_log.shape[0], weights.norm.shape[0]
    qkv, z, b, a = projected.split((weights.conv.shape[0], heads * dim, heads, heads), dim=-1)
    return Projected(qkv, z.unflatten(-1, (heads, dim)), b, a)


def split_heads(mixed: torch.Tensor, weights: GdnWeights, key_dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k [T, Hk, K] and v [T, Hv, V] of the convolution's output [T, C]."""
    value_size = weights.a_log.shape[0] * weights.norm.shape[0]
    key_size = (mixed.shape[-1] - value_size) // 2
    query, key, value = mixed.split((key_size, key_size, value_size), dim=-1)
    return query.unflatten(-1, (-1, key_dim)), key.unflatten(-1, (-1, key_dim)), value.unflatten(-1, (-1, weights.norm.shape[0]))


def gates_reference(a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(g, beta), float32 [T, Hv]: g = -exp(a_log) softplus(a + dt_bias), beta = sigmoid(b)."""
    return -a_log.float().exp() * F.softplus(a.float() + dt_bias.float()), b.float().sigmoid()


def recurrent_reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """Token by token: q, k [T, Hk, K], v [T, Hv, V], g, beta [T, Hv], state [Hv, V, K] changed in place -> o [T, Hv, V], float32."""
    query, key = _unit(query, key, value.shape[1])
    return torch.stack([
        advance(query[t], key[t], value[t].float(), g[t], beta[t], state) for t in range(value.shape[0])])


def advance(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """One token: q, k [..., Hv, K] (of unit length, scaled), v [..., Hv, V], g, beta [..., Hv], state [..., Hv, V, K] -> o [..., Hv, V]."""
    state.mul_(g.exp()[..., None, None])
    error = beta.unsqueeze(-1) * (value - (state @ key.unsqueeze(-1)).squeeze(-1))
    state.addcmul_(error.unsqueeze(-1), key.unsqueeze(-2))
    return (state @ query.unsqueeze(-1)).squeeze(-1)


def chunked_reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """As :func:`recurrent_reference`, in chunks of `CHUNK` tokens from the first."""
    query, key = (part.transpose(0, 1) for part in _unit(query, key, value.shape[1]))
    value, g, beta = value.float().transpose(0, 1), g.t(), beta.t()
    parts = []
    for start in range(0, value.shape[1], CHUNK):
        part = slice(start, start + CHUNK)
        parts.append(_chunk(query[:, part], key[:, part], value[:, part], g[:, part], beta[:, part, None], state))
    return torch.cat(parts, dim=1).transpose(0, 1)


def _chunk(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """One chunk, heads first: q, k [Hv, C, K], v [Hv, C, V], g [Hv, C], beta [Hv, C, 1]."""
    total = g.cumsum(dim=1)
    decay = (total.unsqueeze(2) - total.unsqueeze(1)).tril_().exp_().tril_()
    grown = total.exp().unsqueeze(2)
    system = beta * (key @ key.transpose(1, 2)) * decay
    both = torch.cat((beta * value, beta * grown * key), dim=2)
    new, seen = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True).split((value.shape[2], key.shape[2]), dim=2)
    new = new - seen @ state.transpose(1, 2)
    out = (grown * query) @ state.transpose(1, 2) + ((query @ key.transpose(1, 2)) * decay) @ new
    last = total[:, -1:]
    state.mul_(last.exp().unsqueeze(2)).baddbmm_(new.transpose(1, 2), (last - total).exp().unsqueeze(2) * key)
    return out


def _unit(query: torch.Tensor, key: torch.Tensor, value_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k in float32, of unit length, q scaled by 1/sqrt(K), each key head repeated for its value heads: [T, Hv, K]."""
    query, key = (
        part * torch.rsqrt((part * part).sum(-1, keepdim=True) + L2_EPS) for part in (query.float(), key.float()))
    group = value_heads // key.shape[-2]
    return (query * query.shape[-1] ** -0.5).repeat_interleave(group, dim=-2), key.repeat_interleave(group, dim=-2)


def gated_norm_reference(out: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """rmsnorm(o) * weight * silu(z), head by head: o float32 [T, Hv, V], z [T, Hv, V] -> [T, Hv * V] in z's dtype."""
    normed = F.rms_norm(out, (out.shape[-1],), weight.float(), eps)
    return (normed * F.silu(z.float())).to(z.dtype).flatten(1)


def gdn_decode_reference(
    projected: torch.Tensor, weights: GdnWeights, state: GdnState, slots: torch.Tensor, first: torch.Tensor
) -> torch.Tensor:
    """One token of each of `slots` [D]: projected [D, ...] -> [D, Hv * V]; `first` [D] tells rows with no token before theirs."""
    qkv, z, b, a = split_projected(projected, weights)
    mixed = conv_decode_reference(qkv, weights.conv, state.conv, slots, first)
    query, key, value = split_heads(mixed, weights, state.recurrent.shape[-1])
    query, key = _unit(query, key, value.shape[1])
    g, beta = gates_reference(a, b, weights.a_log, weights.dt_bias)
    held = state.recurrent[slots].masked_fill_(first[:, None, None, None], 0)
    out = advance(query, key, value.float(), g, beta, held)
    state.recurrent[slots] = held
    return gated_norm_reference(out, z, weights.norm, weights.eps)


def gdn_prefill_reference(projected: torch.Tensor, weights: GdnWeights, state: GdnState, slot: int, first: bool) -> torch.Tensor:
    """Consecutive tokens of the request in `slot`: projected [T, ...] -> [T, Hv * V]; `first`: no token precedes these."""
    qkv, z, b, a = split_projected(projected, weights)
    mixed = conv_chunk_reference(qkv, weights.conv, state.conv[slot], first)
    held = state.recurrent[slot]
    if first:
        held.zero_()
    g, beta = gates_reference(a, b, weights.a_log, weights.dt_bias)
    out = chunked_reference(*split_heads(mixed, weights, held.shape[-1]), g, beta, held)
    return gated_norm_reference(out, z, weights.norm, weights.eps)
