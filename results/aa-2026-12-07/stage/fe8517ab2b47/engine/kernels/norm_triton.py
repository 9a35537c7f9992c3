"""RMSNorm on the card, alone and with the residual add before it: one program a row, one pass over memory.  See norm.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from engine.kernels import dependent

WARPS = 16
"""Of a program over a row of more than 1,024 values."""


@triton.jit
def _norm_kernel(  # type: ignore[no-untyped-def]
    x, residual, weight, normed, total, width, x_stride, eps, ADD: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,  # noqa: N803
):
    if DEPENDENT:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    value = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + row * width + columns, value, mask=inside)
    scale = tl.rsqrt(tl.sum(value * value) / width + eps)
    rounded = (value * scale).to(normed.dtype.element_ty).to(tl.float32)
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row * width + columns, rounded * factor, mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `norm.rms_norm_reference`; x [T, width] with unit stride along its rows."""
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, x, weight, normed, normed, eps, add=False)
    return normed


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """See `norm.add_rms_norm_reference`; `residual` is contiguous."""
    normed, total = torch.empty_like(residual), torch.empty_like(residual)
    _launch(x, residual, weight, normed, total, eps, add=True)
    return normed, total


def _launch(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, normed: torch.Tensor, total: torch.Tensor, eps: float, *, add: bool
) -> None:
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    _norm_kernel[(rows,)](x, residual, weight, normed, total, width, x.stride(0), eps, ADD=add, BLOCK=block,
                          num_warps=WARPS if block >= 2048 else 4, **dependent.options())
