"""silu(gate) * up on the card, between the two products of the feed-forward.  See activation.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from engine.kernels import dependent

BLOCK = 1024


@triton.jit
def _silu_mul_kernel(gate_up, out, inner, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    if DEPENDENT:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < inner
    gate = tl.load(gate_up + row * 2 * inner + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * inner + inner + columns, mask=inside, other=0.0).to(tl.float32)
    opened = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * inner + columns, opened * up, mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 * inner], gate first -> silu(gate) * up [T, inner]; the silu is rounded to the dtype before the product."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, inner, dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul_kernel[(rows, triton.cdiv(inner, BLOCK))](
        gate_up, out, inner, BLOCK=BLOCK, num_warps=4, **dependent.options())
    return out


def swiglu(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """See `activation.swiglu_reference`."""
    return F.linear(silu_mul(F.linear(x, gate_up)), down)
