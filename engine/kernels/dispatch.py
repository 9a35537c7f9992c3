"""The one place that decides which form of a kernel runs.  Models and layers call these; a device's own kernels are added here."""

from __future__ import annotations

import torch

from engine.kernels import activation, attention, norm, rope, sample
from engine.kernels import linear as linear_kernels

BACKEND = "torch-cpu"
"""Name of the attention backend, as reported."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `norm.rms_norm_reference`."""
    return norm.rms_norm_reference(x, weight, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """See `norm.add_rms_norm_reference`."""
    return norm.add_rms_norm_reference(x, residual, weight, eps)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """See `rope.rotate_reference`."""
    rope.rotate_reference(x, cos, sin)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See `linear.linear_reference`."""
    return linear_kernels.linear_cpu(x, weight)


def swiglu(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """See `activation.swiglu_reference`."""
    return activation.swiglu_cpu(x, gate_up, down)


def write_cache(cache: torch.Tensor, rows: torch.Tensor, keys_values: torch.Tensor) -> None:
    """See `attention.write_cache_reference`."""
    attention.write_cache_reference(cache, rows, keys_values)


def attention_decode(query: torch.Tensor, cache: torch.Tensor, block_table: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """See `attention.attention_decode_reference`."""
    return attention.attention_decode_reference(query, cache, block_table, mask, scale)


def attention_prefill(query: torch.Tensor, cache: torch.Tensor, blocks: torch.Tensor, total: int, scale: float) -> torch.Tensor:
    """See `attention.attention_prefill_reference`."""
    return attention.attention_prefill_reference(query, cache, blocks, total, scale)


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """See `sample.greedy_reference`."""
    return sample.greedy_cpu(logits)
