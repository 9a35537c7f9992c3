"""Attention over the paged cache: one new token a request (decode), or a chunk of a prompt (prefill).

A layer's cache is [blocks, block_size, 2 * Hkv, D]: for each token the keys of all KV heads, then their values.  Query head h belongs to
KV head h // (H / Hkv) (grouped-query attention, Ainslie et al. 2023).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def write_cache_reference(cache: torch.Tensor, rows: torch.Tensor, keys_values: torch.Tensor) -> None:
    """Store keys_values [T, 2 * Hkv, D] at flat token rows [T] (block * block_size + offset) of a layer's cache."""
    cache.view(-1, *cache.shape[2:]).index_copy_(0, rows, keys_values)


def length_mask(lengths: torch.Tensor, longest: int, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask [B, 1, 1, longest]: 0 where a key's position is below the request's length [B], -inf beyond."""
    beyond = torch.arange(longest, device=lengths.device) >= lengths.unsqueeze(1)
    return torch.zeros(beyond.shape, dtype=dtype, device=lengths.device).masked_fill_(beyond, float("-inf"))[:, None, None]


def causal_mask(count: int, total: int, device: torch.device) -> torch.Tensor:
    """Boolean mask [count, total], true where query i, the (total - count + i)-th token, may see key j."""
    return torch.ones(count, total, dtype=torch.bool, device=device).tril_(total - count)


def attention_decode_reference(
    query: torch.Tensor, cache: torch.Tensor, block_table: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """query [B, H, D], block_table [B, W] -> [B, H, D]; `mask` is `length_mask` over W * block_size keys."""
    batch, heads, dim = query.shape
    kv_heads = cache.shape[2] // 2
    gathered = cache.index_select(0, block_table.reshape(-1)).view(batch, -1, 2 * kv_heads, dim).transpose(1, 2)
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, dim)
    out = F.scaled_dot_product_attention(grouped, gathered[:, :kv_heads], gathered[:, kv_heads:], attn_mask=mask, scale=scale)
    return out.reshape(batch, heads, dim)


def attention_prefill_reference(
    query: torch.Tensor, cache: torch.Tensor, blocks: torch.Tensor, total: int, scale: float
) -> torch.Tensor:
    """One request's chunk: query [T, H, D] are the last T of its `total` tokens, whose keys and values lie in `blocks` [W] -> [T, H, D]."""
    count, heads, dim = query.shape
    kv_heads = cache.shape[2] // 2
    group = heads // kv_heads
    gathered = cache.index_select(0, blocks).view(-1, 2, kv_heads, dim)[:total]
    keys, values = (part.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1) for part in gathered.unbind(1))
    grouped = query.unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3)
    mask = None if count == total else causal_mask(count, total, query.device)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale)
    return out.permute(2, 0, 1, 3).reshape(count, heads, dim)
