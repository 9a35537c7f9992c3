"""Placing a gated attention layer's new tokens (Qwen3.5): queries beside their output gates, zero-centred head norms, rotary positions on
the first part of each head, keys and values into the cache."""

from __future__ import annotations

import torch

from engine.kernels.attention import write_cache_reference
from engine.kernels.norm_centred import rms_norm_centred_reference
from engine.kernels.rope import rotate_reference


def place_gated_reference(
    projected: torch.Tensor, heads: int, norms: tuple[torch.Tensor, torch.Tensor], eps: float, cos: torch.Tensor, sin: torch.Tensor,
    cache: torch.Tensor, rows: torch.Tensor,
) -> torch.Tensor:
    """projected [T, 2 * H + 2 * Hkv, D] -> queries [T, H, D]; keys and values go to `rows` [T] of the layer's cache.

    `projected` holds H pairs (query head, its gate), then keys, then values; the gates stay where they are.  `norms` are the weights [D]
    of query and key heads.  cos, sin [T, R / 2] turn the first R values of a head, the others keep theirs.
    """
    kv_heads, turned = cache.shape[2] // 2, 2 * cos.shape[1]
    paired, keys, values = projected.split((2 * heads, kv_heads, kv_heads), dim=1)
    query = rms_norm_centred_reference(paired[:, ::2], norms[0], eps)
    keys = rms_norm_centred_reference(keys, norms[1], eps)
    for part in (query, keys):
        rotate_reference(part[..., :turned], cos, sin)
    write_cache_reference(cache, rows, torch.cat((keys, values), dim=1))
    return query


def gate_reference(out: torch.Tensor, projected: torch.Tensor, heads: int) -> torch.Tensor:
    """Attention's output [T, H * D] times sigmoid of the gates that `projected` holds -> [T, H * D]."""
    gates = projected[:, 1 : 2 * heads : 2]
    return out * gates.reshape(out.shape).sigmoid()
