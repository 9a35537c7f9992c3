"""y = x W^T with W kept [N, K] as checkpoints have it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

TALL_ROWS = {"AVX2": range(4, 33), "AVX512": range(8, 33)}
"""Row counts at which a float32 product is faster on the CPU with the weight as the tall operand, by instruction set.

AVX2: 1.2 to 4 times from 4 to 16 rows.  AVX512: slower by a third at 2 to 4 rows; from 8 on it is the SwiGLU, which then needs no
transposition, that gains (1.6 times at 16 rows)."""


def prefers_tall(x: torch.Tensor) -> bool:
    """Whether a product with x [T, K] goes as W x^T: a matter of T alone, so that equal batches always compute the same bits."""
    rows = TALL_ROWS.get(torch.backends.cpu.get_cpu_capability(), range(0))
    return x.dtype == torch.float32 and x.shape[0] in rows


def linear_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, K], weight [N, K] -> [T, N]."""
    return F.linear(x, weight)


def linear_cpu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As the reference, contiguous; a few float32 rows go as W x^T and are transposed back."""
    if prefers_tall(x):
        return torch.mm(weight, x.t()).t().contiguous()
    return F.linear(x, weight)
