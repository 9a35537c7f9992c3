"""A decoder's layers as the compiled library walks them: one call a step, whatever their number."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine.kernels.cpu import binding


class LayerWeights(NamedTuple):
    """Weights of one layer of Llama's form, all float32: qkv and gate_up merged by rows, the heads' norms where there are any."""

    attention_norm: torch.Tensor
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    qkv: torch.Tensor
    out: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class _Layer(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in LayerWeights._fields]


class _Shape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("layers", "hidden", "heads", "kv_heads", "dim", "inner")] + [
        (name, ctypes.c_float) for name in ("eps", "scale")]


class Layers:
    """Layers over weights that stay where they are for as long as this lives."""

    def __init__(self, weights: Sequence[LayerWeights], heads: int, kv_heads: int, dim: int, eps: float, scale: float) -> None:
        self.held = weights
        self.dim = dim
        self._layers = (_Layer * len(weights))(*(
            _Layer(*(None if one is None else one.data_ptr() for one in layer)) for layer in weights))
        self._plain = all(one.dtype == torch.float32 and one.is_contiguous() and one.device.type == "cpu"
                          for layer in weights for one in layer if one is not None)
        inner, hidden = weights[0].gate_up.shape[0] // 2, weights[0].gate_up.shape[1]
        self._shape = _Shape(len(weights), hidden, heads, kv_heads, dim, inner, eps, scale)

    def serve(self) -> bool:
        """Whether the library is there and takes these layers: float32 on the host."""
        return self._plain and self.dim in binding.HEAD_DIMS and binding.backend() is not None

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: torch.Tensor, tables: torch.Tensor, slots: torch.Tensor,
        positions: torch.Tensor, rows: torch.Tensor,
    ) -> None:
        """Residual x [T, hidden] in place; cos, sin [T, D / 2]; cache [layers, blocks, block_size, 2 * Hkv, D]; tables [slots, W];
        slots, positions and cache rows [T], of one request the earlier first."""
        binding.call("decoder", ctypes.byref(self._layers), ctypes.byref(self._shape), x, x.shape[0], cos, sin, cache, cache.stride(0),
                     cache.shape[2], tables, tables.stride(0), slots, positions, rows)
