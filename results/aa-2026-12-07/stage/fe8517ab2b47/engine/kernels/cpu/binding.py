"""The compiled kernels on tensors.  Each function says in `serves` what it takes; callers ask first and have PyTorch do the rest."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from engine.kernels.cpu.build import library

FEWEST_ROWS = 2
"""A single row is read as fast by PyTorch."""
HEAD_DIMS = (16, 32, 64, 128, 256)
"""Those that `attention` is built for."""


def backend() -> str | None:
    """Name of what computes, by the instructions it uses; None when there is no library."""
    held = library()
    return None if held is None else held.instructions().decode()


def serves(*tensors: torch.Tensor) -> bool:
    """Whether the library is there and takes these tensors: float32, contiguous, on the host."""
    return library() is not None and all(one.dtype == torch.float32 and one.is_contiguous() and one.device.type == "cpu" for one in tensors)


def serves_heads(query: torch.Tensor, cache: torch.Tensor) -> bool:
    """As `serves`, for queries [T, H, D] that may be a part of wider rows."""
    dim = query.shape[2]
    return dim in HEAD_DIMS and serves(cache) and query.dtype == torch.float32 and query.stride()[1:] == (dim, 1)


def serves_rows(rows: int) -> bool:
    """Whether a product with so many rows is better done here than by PyTorch."""
    return library() is not None and rows >= FEWEST_ROWS


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As `linear.linear_reference`."""
    rows, width = x.shape
    out = torch.empty(rows, weight.shape[0])
    call("linear", x, weight, out, rows, width, weight.shape[0])
    return out


def gate_up(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """silu(x W_gate^T) * (x W_up^T), x [T, K], weight [2 * inner, K] gates first -> [T, inner]."""
    rows, width = x.shape
    out = torch.empty(rows, weight.shape[0] // 2)
    call("swiglu", x, weight, out, rows, width, weight.shape[0] // 2)
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As `norm.rms_norm_reference`, x [..., width]."""
    normed = torch.empty_like(x)
    call("add_rms_norm", x, None, weight, eps, normed, None, *x.view(-1, x.shape[-1]).shape)
    return normed


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As `norm.add_rms_norm_reference`."""
    normed, total = torch.empty_like(x), torch.empty_like(x)
    call("add_rms_norm", x, residual, weight, eps, normed, total, *x.view(-1, x.shape[-1]).shape)
    return normed, total


def place(
    qkv: torch.Tensor, heads: int, norms: tuple[torch.Tensor, torch.Tensor] | None, eps: float, cos: torch.Tensor, sin: torch.Tensor,
    cache: torch.Tensor, rows: torch.Tensor,
) -> None:
    """As `place.place_reference`."""
    query, key = norms or (None, None)
    call("place", qkv, qkv.shape[0], heads, cache.shape[2] // 2, qkv.shape[2], query, key, eps, cos, sin, cache, rows)


def attention(
    query: torch.Tensor, cache: torch.Tensor, tables: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, scale: float
) -> torch.Tensor:
    """query [T, H, D], heads and D dense, attends to the first positions[t] + 1 tokens of slots[t], whose blocks are a row of `tables`."""
    (count, heads, dim), (_, block_size, twice_heads, _) = query.shape, cache.shape
    out = torch.empty(count, heads, dim)
    call("attention", query, query.stride(0), cache, tables, tables.stride(0), slots, positions, out, count, heads, twice_heads // 2, dim,
          block_size, scale)
    return out


def call(name: str, *arguments: Any) -> None:
    """The library's function `name`: tensors go as their address, None as null, numbers as int64 or float, anything else as it is."""
    getattr(library(), name)(*map(_plain, arguments))


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p(value.data_ptr())
    return _NUMBERS.get(type(value), lambda same: same)(value)


_NUMBERS: dict[type, Callable[[Any], Any]] = {float: ctypes.c_float, int: ctypes.c_int64, type(None): ctypes.c_void_p}
