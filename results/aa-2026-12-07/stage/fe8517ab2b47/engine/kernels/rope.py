"""Rotary position embedding (Su et al. 2021), half-split pairs as Llama and Qwen3 have them."""

from __future__ import annotations

import torch


def rotate_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate x [T, heads, D] in place: pair (i, i + D/2) of token t by the angle whose cos and sin are at [t, i] ([T, D/2], x's dtype)."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = torch.addcmul(first * cos, second, sin, value=-1)
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(turned)
