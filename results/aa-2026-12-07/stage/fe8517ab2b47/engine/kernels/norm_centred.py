"""RMSNorm with a zero-centred weight, as Qwen3.5 (and Gemma) keep it: the factor is 1 + weight, applied in float32 before rounding."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm_centred_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * (1 + weight) over the last dimension, in float32, rounded once to x's dtype."""
    return F.rms_norm(x.float(), (x.shape[-1],), 1 + weight.float(), eps).to(x.dtype)


def add_rms_norm_centred_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of x + residual, x + residual), both in x's dtype [T, hidden]; the sum that is normalised is the unrounded one."""
    exact = x.float() + residual.float()
    return F.rms_norm(exact, (x.shape[-1],), 1 + weight.float(), eps).to(x.dtype), exact.to(x.dtype)
