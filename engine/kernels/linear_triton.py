"""Products of a few rows on the card, y = x W^T, bound by reading W.  See linear.py and activation.py.

The weight is the tall operand of the tensor cores and the rows of x the narrow one, so a tile of W is read once whatever the rows.  A
small W has too few tiles to keep the memory busy, so the sum over K is split; parts are added in their order by whichever program ends a
tile, so equal inputs give equal bits.  W is nobody's output: each program asks for its first lines of it before it waits for the kernel
before (dependent.py), which hides the time memory takes to get under way.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from engine.kernels import dependent

MOST_ROWS = 0
"""Rows up to which these products are used; beyond, cuBLAS.  0 until a card has measured them."""


class Tuning(NamedTuple):
    """Rows of W a program, values of K at a time, warps a program, tiles in flight, programs wanted, steps of W asked for early."""

    tile: int
    step: int
    warps: int
    stages: int
    programs: int
    early: int


PLAIN = Tuning(128, 64, 4, 5, 264, 4)


def serves(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `linear` takes x [T, K] and weight [N, K]: few rows, half precision, whole steps of K."""
    return x.shape[0] <= MOST_ROWS and x.dtype == torch.bfloat16 and x.shape[1] % PLAIN.step == 0 and weight.is_contiguous()


@triton.jit
def _ask(places):  # type: ignore[no-untyped-def]
    """Have the lines at `places` brought into the second-level cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _few_kernel(  # type: ignore[no-untyped-def]
    x, weight, out, parts, ended, rows, width, inner, x_stride, splits,
    ROWS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr, EARLY: tl.constexpr,  # noqa: N803
    DEPENDENT: tl.constexpr,  # noqa: N803
):
    tile, split = tl.program_id(0), tl.program_id(1)
    steps = inner // STEP
    first, end = split * steps // splits, (split + 1) * steps // splits
    columns = tile * TILE + tl.arange(0, TILE)
    row = tl.arange(0, ROWS)
    within = tl.arange(0, STEP)
    lines = weight + tl.minimum(columns, width - 1).to(tl.int64)[:, None] * inner
    dependent.let_next(DEPENDENT)
    if DEPENDENT:
        if EARLY > 0:
            _ask(lines + tl.minimum(first + tl.arange(0, EARLY), end - 1)[None, :] * STEP)
        gdc_wait()
    taken = x + tl.minimum(row, rows - 1)[None, :] * x_stride
    total = tl.zeros((TILE, ROWS), tl.float32)
    for at in tl.range(first, end, num_stages=STAGES):
        w = tl.load(lines + (at * STEP + within)[None, :])
        tokens = tl.load(taken + (at * STEP + within)[:, None])
        total = tl.dot(w, tokens, total, input_precision="ieee")
    last = True
    if SPLIT:
        places = tl.arange(0, TILE)[:, None] * ROWS + row[None, :]
        mine = parts + tile * splits * (TILE * ROWS)
        tl.store(mine + split * (TILE * ROWS) + places, total)
        tl.debug_barrier()
        last = tl.atomic_add(ended + tile, 1, sem="acq_rel") == splits - 1
        if last:
            total = tl.zeros((TILE, ROWS), tl.float32)
            for one in range(splits):
                total += tl.load(mine + one * (TILE * ROWS) + places, cache_modifier=".cg")
            tl.store(ended + tile, 0)
    if last:
        tl.store(out + row[None, :] * width + columns[:, None], total, mask=(row < rows)[None, :] & (columns < width)[:, None])


@cache
def _ended(device: torch.device) -> torch.Tensor:
    """Parts that have ended, by tile; all zero between two products."""
    return torch.zeros(4096, dtype=torch.int32, device=device)


def linear(x: torch.Tensor, weight: torch.Tensor, tuning: Tuning | None = None) -> torch.Tensor:
    """x [T, K] with unit stride along its rows, weight [N, K] contiguous -> [T, N]; sums in float32, K a multiple of the tuning's step.

    A row's result depends on nothing but itself and T's padded size.  Call it once before a graph captures it.
    """
    (rows, inner), width = x.shape, weight.shape[0]
    tuning = tuning or PLAIN
    padded = max(16, triton.next_power_of_2(rows))
    tiles = triton.cdiv(width, tuning.tile)
    splits = max(1, min(inner // tuning.step, tuning.programs // tiles))
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    parts = torch.empty(tiles * splits * tuning.tile * padded, dtype=torch.float32, device=x.device) if splits > 1 else out
    _few_kernel[(tiles, splits)](
        x, weight, out, parts, _ended(x.device), rows, width, inner, x.stride(0), splits, ROWS=padded, TILE=tuning.tile, STEP=tuning.step,
        STAGES=tuning.stages, SPLIT=splits > 1, EARLY=tuning.early, num_warps=tuning.warps, **dependent.options())
    return out
