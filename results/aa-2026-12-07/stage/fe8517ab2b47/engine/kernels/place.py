"""Placing a layer's new tokens: norm of queries and keys (Qwen3; Llama has none), rotary positions, keys and values into the cache."""

from __future__ import annotations

import torch

from engine.kernels.attention import write_cache_reference
from engine.kernels.norm import rms_norm_reference
from engine.kernels.rope import rotate_reference


def place_reference(
    qkv: torch.Tensor, heads: int, norms: tuple[torch.Tensor, torch.Tensor] | None, eps: float, cos: torch.Tensor, sin: torch.Tensor,
    cache: torch.Tensor, rows: torch.Tensor,
) -> None:
    """qkv [T, H + 2 * Hkv, D], changed in place: its first `heads` are the queries that attention reads; keys and values go to `rows` [T].

    `norms` are the weights [D] for query and key heads; cos, sin [T, D / 2] are those of each token's position.
    """
    kv_heads = cache.shape[2] // 2
    if norms is not None:
        query, keys, _ = qkv.split((heads, kv_heads, kv_heads), dim=1)
        query.copy_(rms_norm_reference(query, norms[0], eps))
        keys.copy_(rms_norm_reference(keys, norms[1], eps))
    rotate_reference(qkv[:, : heads + kv_heads], cos, sin)
    write_cache_reference(cache, rows, qkv[:, heads:])
