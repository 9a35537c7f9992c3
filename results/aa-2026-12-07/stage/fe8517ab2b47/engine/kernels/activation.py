"""The SwiGLU feed-forward (Shazeer 2020): W_down (silu(W_gate x) * W_up x), with gate and up merged by rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.kernels.linear import prefers_tall


def swiglu_reference(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """x [T, hidden], gate_up [2 * inner, hidden] (gate first), down [hidden, inner] -> [T, hidden]."""
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate, inplace=True).mul_(up), down)


def swiglu_cpu(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """As the reference; a few float32 rows go through as columns, so nothing is transposed between the two products."""
    if not prefers_tall(x):
        return swiglu_reference(x, gate_up, down)
    gate, up = torch.mm(gate_up, x.t()).chunk(2, dim=0)
    return torch.mm(down, F.silu(gate, inplace=True).mul_(up)).t()
