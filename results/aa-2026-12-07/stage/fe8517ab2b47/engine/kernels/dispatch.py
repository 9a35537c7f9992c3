"""The one place that decides which form of a kernel runs.  Models, layers and runners call these; Triton is imported where it is used,
so that a machine without it lacks nothing it needs."""

from __future__ import annotations

from functools import partial

import torch

from engine.kernels import activation, attention, gated_attention, gdn, norm, norm_centred, place, sample, streams
from engine.kernels import linear as linear_kernels
from engine.kernels.cpu import binding as compiled
from engine.kernels.cpu.layers import Layers
from engine.kernels.devices import CARD, HOST


def backends(device: str, dtype: torch.dtype) -> dict[str, str]:
    """Names of what computes attention and linear layers on `device` in `dtype`, as reported."""
    if device == CARD:
        return {"attention_backend": "triton", "linear_backend": "cublas"}
    name = (compiled.backend() if dtype == torch.float32 else None) or "torch-cpu"
    return {"attention_backend": name, "linear_backend": name}


def serves_layers(layers: Layers, x: torch.Tensor) -> bool:
    """Whether `layers` as a whole are there for the residual x [T, hidden]."""
    return x.device.type == HOST and layers.serve()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `norm.rms_norm_reference`."""
    if x.is_cuda:
        from engine.kernels import norm_triton

        return norm_triton.rms_norm(x, weight, eps)
    if compiled.serves(x, weight):
        return compiled.rms_norm(x, weight, eps)
    return norm.rms_norm_reference(x, weight, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """See `norm.add_rms_norm_reference`."""
    if x.is_cuda:
        from engine.kernels import norm_triton

        return norm_triton.add_rms_norm(x, residual, weight, eps)
    if compiled.serves(x, residual, weight):
        return compiled.add_rms_norm(x, residual, weight, eps)
    return norm.add_rms_norm_reference(x, residual, weight, eps)


def place_tokens(
    qkv: torch.Tensor, heads: int, norms: tuple[torch.Tensor, torch.Tensor] | None, eps: float, cos: torch.Tensor, sin: torch.Tensor,
    cache: torch.Tensor, rows: torch.Tensor,
) -> None:
    """See `place.place_reference`."""
    if qkv.is_cuda:
        from engine.kernels import place_triton

        return place_triton.place(qkv, heads, norms, eps, cos, sin, cache, rows)
    if compiled.serves(qkv, cos, sin, cache, *(norms or ())):
        return compiled.place(qkv, heads, norms, eps, cos, sin, cache, rows)
    return place.place_reference(qkv, heads, norms, eps, cos, sin, cache, rows)


def rms_norm_centred(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `norm_centred.rms_norm_centred_reference`."""
    if x.is_cuda:
        from engine.kernels import norm_centred_triton

        return norm_centred_triton.rms_norm_centred(x, weight, eps)
    return norm_centred.rms_norm_centred_reference(x, weight, eps)


def add_rms_norm_centred(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """See `norm_centred.add_rms_norm_centred_reference`."""
    if x.is_cuda:
        from engine.kernels import norm_centred_triton

        return norm_centred_triton.add_rms_norm_centred(x, residual, weight, eps)
    return norm_centred.add_rms_norm_centred_reference(x, residual, weight, eps)


def place_gated(
    projected: torch.Tensor, heads: int, norms: tuple[torch.Tensor, torch.Tensor], eps: float, cos: torch.Tensor, sin: torch.Tensor,
    cache: torch.Tensor, rows: torch.Tensor,
) -> torch.Tensor:
    """See `gated_attention.place_gated_reference`."""
    if projected.is_cuda:
        from engine.kernels import gated_attention_triton

        return gated_attention_triton.place_gated(projected, heads, norms, eps, cos, sin, cache, rows)
    return gated_attention.place_gated_reference(projected, heads, norms, eps, cos, sin, cache, rows)


def gate(out: torch.Tensor, projected: torch.Tensor, heads: int) -> torch.Tensor:
    """See `gated_attention.gate_reference`."""
    if out.is_cuda:
        from engine.kernels import gated_attention_triton

        return gated_attention_triton.gate(out, projected, heads)
    return gated_attention.gate_reference(out, projected, heads)


def gdn_decode(
    projected: torch.Tensor, weights: gdn.GdnWeights, state: gdn.GdnState, slots: torch.Tensor, first: torch.Tensor
) -> torch.Tensor:
    """See `gdn.gdn_decode_reference`."""
    return gdn.gdn_decode_reference(projected, weights, state, slots, first)


def gdn_prefill(projected: torch.Tensor, weights: gdn.GdnWeights, state: gdn.GdnState, slot: int, first: bool) -> torch.Tensor:
    """See `gdn.gdn_prefill_reference`."""
    return gdn.gdn_prefill_reference(projected, weights, state, slot, first)


def gdn_slots(
    projected: torch.Tensor, weights: gdn.GdnWeights, state: gdn.GdnState, slots: torch.Tensor, lengths: torch.Tensor,
    segments: torch.Tensor | None,
) -> torch.Tensor:
    """The card's form of both: rows of slots [D] first, then those that `segments` name; projected [T, ...] -> [T, Hv * V].

    See `gdn_decode_triton.gdn_decode` and `gdn_prefill_triton.gdn_prefill`.
    """
    from engine.kernels import gdn_decode_triton, gdn_prefill_triton

    out = torch.empty(
        projected.shape[0], weights.a_log.shape[0] * weights.norm.shape[0], dtype=projected.dtype, device=projected.device)
    if slots.shape[0]:
        gdn_decode_triton.gdn_decode(projected, weights, state, slots, lengths, out)
    if segments is not None and segments.shape[0]:
        gdn_prefill_triton.gdn_prefill(projected, weights, state, segments, out, slots.shape[0])
    return out


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See `linear.linear_reference`; on the card that is cuBLAS."""
    if x.is_cuda:
        return linear_kernels.linear_reference(x, weight)
    if compiled.serves(x, weight) and compiled.serves_rows(x.shape[0]):
        return compiled.linear(x, weight)
    return linear_kernels.linear_cpu(x, weight)


def swiglu(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """See `activation.swiglu_reference`."""
    if x.is_cuda:
        from engine.kernels import activation_triton

        return activation_triton.swiglu(x, gate_up, down)
    if compiled.serves(x, gate_up, down) and compiled.serves_rows(x.shape[0]):
        return compiled.linear(compiled.gate_up(x, gate_up), down)
    return activation.swiglu_cpu(x, gate_up, down)


def attention_decode(query: torch.Tensor, cache: torch.Tensor, block_table: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """See `attention.attention_decode_reference`."""
    return attention.attention_decode_reference(query, cache, block_table, mask, scale)


def attention_prefill(query: torch.Tensor, cache: torch.Tensor, blocks: torch.Tensor, total: int, scale: float) -> torch.Tensor:
    """See `attention.attention_prefill_reference`."""
    return attention.attention_prefill_reference(query, cache, blocks, total, scale)


def reads_pages(query: torch.Tensor, cache: torch.Tensor) -> bool:
    """Whether `attention_pages` is there for such tensors: it takes decodes and chunks of prompts in one call."""
    return compiled.serves_heads(query, cache)


def attention_pages(
    query: torch.Tensor, cache: torch.Tensor, tables: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, scale: float
) -> torch.Tensor:
    """See `cpu.binding.attention`."""
    return compiled.attention(query, cache, tables, slots, positions, scale)


def attention_slots(
    query: torch.Tensor, cache: torch.Tensor, tables: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor, tiles: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """The card's form of both: rows of slots [D] first, then those that `tiles` name; query [T, H, D] -> [T, H, D].

    See `attention_decode_triton.attention_decode` and `attention_prefill_triton.attention_prefill`.
    """
    from engine.kernels import attention_decode_triton, attention_prefill_triton

    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    decode = partial(attention_decode_triton.attention_decode, query, cache, tables, slots, lengths, out, scale)
    if tiles is None or not tiles.shape[0]:
        decode()
        return out
    prefill = partial(attention_prefill_triton.attention_prefill, query, cache, tables, tiles, out, scale)
    if slots.shape[0]:
        streams.together(decode, prefill)
    else:
        prefill()
    return out


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """See `sample.greedy_reference`."""
    return sample.greedy_cpu(logits)


def greedy_slots(logits: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The card's form: see `sample_triton.greedy`."""
    from engine.kernels import sample_triton

    return sample_triton.greedy(logits, state, slots, positions)


def begin(
    state: torch.Tensor, slots: torch.Tensor, tick: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `slots.begin_reference`; only a card has slots' state."""
    from engine.kernels import slots_triton

    return slots_triton.begin(state, slots, tick, block_size)


def advance(
    state: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor, tick: torch.Tensor, handed: torch.Tensor
) -> None:
    """See `slots.advance_reference`."""
    from engine.kernels import slots_triton

    slots_triton.advance(state, slots, positions, ids, tick, handed)


def tile_rows(dtype: torch.dtype) -> int:
    """Rows of a prefill tile; see `attention_prefill_triton.tile_rows`."""
    from engine.kernels import attention_prefill_triton

    return attention_prefill_triton.tile_rows(dtype)
