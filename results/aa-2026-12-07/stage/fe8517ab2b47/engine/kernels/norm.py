"""RMSNorm (Zhang and Sennrich 2019), alone and with the residual add that precedes it."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; the mean in float32, rounded to x's dtype before the weight."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype) * weight


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of x + residual, x + residual), both in x's dtype [T, hidden].

    In bfloat16 the sum that is normalised is the unrounded one, as vLLM's fused kernel does (ir/ops/layernorm.py).
    """
    if x.dtype == torch.float32:
        total = x + residual
        return F.rms_norm(total, (x.shape[-1],), weight, eps), total
    exact = x.float() + residual.float()
    return F.rms_norm(exact, (x.shape[-1],), None, eps).to(x.dtype) * weight, exact.to(x.dtype)
