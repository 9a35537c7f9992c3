"""The delta net's causal convolution on the card: tokens of decodes, each updating its slot, and prompt chunks.  See conv.py.

For a chunk the outputs come first, every program reading inputs and the old state; then a second launch leaves the last inputs in the
slot.  In one launch a program could overwrite the state that another has yet to read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from engine.kernels import dependent

CHANNELS = 256
"""Channels a program of a decode's row or of a state; of a chunk's tile it takes `TILE_CHANNELS` times `TILE_TOKENS`."""
TILE_TOKENS, TILE_CHANNELS = 16, 128


@triton.jit
def _silu(x):  # type: ignore[no-untyped-def]
    return x * tl.sigmoid(x)


@triton.jit
def _decode_kernel(  # type: ignore[no-untyped-def]
    inputs, weight, states, slots, lengths, out, channels, input_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,  # noqa: N803
):
    if DEPENDENT:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row)
    inside = (channel < channels) & (slot >= 0)
    held = inside & (tl.load(lengths + row) > 1)
    state = states + tl.maximum(slot, 0).to(tl.int64) * ((WIDTH - 1) * channels) + channel
    newest = tl.load(inputs + row * input_stride + channel, mask=inside, other=0.0)
    total = newest.to(tl.float32) * tl.load(weight + channel * WIDTH + WIDTH - 1, mask=inside, other=0.0).to(tl.float32)
    for j in tl.static_range(WIDTH - 1):
        past = tl.load(state + j * channels, mask=held, other=0.0)
        total += past.to(tl.float32) * tl.load(weight + channel * WIDTH + j, mask=inside, other=0.0).to(tl.float32)
        if j > 0:
            tl.store(state + (j - 1) * channels, past, mask=inside)
    tl.store(state + (WIDTH - 2) * channels, newest, mask=inside)
    tl.store(out + row * channels + channel, _silu(total), mask=channel < channels)


@triton.jit
def _chunk_kernel(  # type: ignore[no-untyped-def]
    inputs, weight, states, segments, out, channels, input_stride,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):
    segment = segments + tl.program_id(0) * 4
    first, count, position, slot = (tl.load(segment), tl.load(segment + 1), tl.load(segment + 2), tl.load(segment + 3))
    begin = tl.program_id(1) * TOKENS
    if begin >= count:
        return
    token = begin + tl.arange(0, TOKENS)
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    state = states + slot.to(tl.int64) * ((WIDTH - 1) * channels) + channel
    total = tl.zeros((TOKENS, BLOCK), tl.float32)
    for j in tl.static_range(WIDTH):
        source = token + j - (WIDTH - 1)
        rows = (first + source).to(tl.int64)
        here = (source >= 0) & (source < count)
        value = tl.load(inputs + rows[:, None] * input_stride + channel[None, :], mask=here[:, None] & inside[None, :], other=0.0)
        if begin == 0:
            before = (source < 0) & (position > 0)
            place = tl.maximum(source + WIDTH - 1, 0) * channels
            past = tl.load(state[None, :] + place[:, None], mask=before[:, None] & inside[None, :], other=0.0)
            value = tl.where((source < 0)[:, None], past, value)
        total += value.to(tl.float32) * tl.load(weight + channel * WIDTH + j, mask=inside, other=0.0).to(tl.float32)[None, :]
    target = out + (first + token).to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(target, _silu(total), mask=(token < count)[:, None] & inside[None, :])


@triton.jit
def _state_kernel(inputs, states, segments, channels, input_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    segment = segments + tl.program_id(0) * 4
    first, count, position, slot = (tl.load(segment), tl.load(segment + 1), tl.load(segment + 2), tl.load(segment + 3))
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    state = states + slot.to(tl.int64) * ((WIDTH - 1) * channels) + channel
    for j in tl.static_range(WIDTH - 1):
        source = count - (WIDTH - 1) + j
        value = tl.load(inputs + (first + source).to(tl.int64) * input_stride + channel, mask=inside & (source >= 0), other=0.0)
        # Ascending j: the old input that moves to j lies above it, so it is read before it is overwritten.
        past = tl.load(state + (j + count) * channels, mask=inside & (source < 0) & (position > 0), other=0.0)
        tl.store(state + j * channels, tl.where(source >= 0, value, past), mask=inside)


def conv_decode(
    inputs: torch.Tensor, weight: torch.Tensor, states: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """See `conv.conv_decode_reference`: inputs [D, C] with unit stride along rows; a row of length 1 is its request's first token.

    Rows of slot -1 are padding: they give zeros and touch no state.
    """
    rows, channels = inputs.shape
    out = torch.empty(rows, channels, dtype=inputs.dtype, device=inputs.device)
    _decode_kernel[(rows, triton.cdiv(channels, CHANNELS))](
        inputs, weight, states, slots, lengths, out, channels, inputs.stride(0),
        WIDTH=weight.shape[1], BLOCK=CHANNELS, num_warps=2, **dependent.options())
    return out


def conv_chunks(inputs: torch.Tensor, weight: torch.Tensor, states: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
    """See `conv.conv_chunk_reference`, for every chunk of `segments` [C, 4] (first row, rows, position, slot): inputs [T, C] -> [T, C].

    Rows that no segment names are left unwritten.
    """
    rows, channels = inputs.shape
    out = torch.empty(rows, channels, dtype=inputs.dtype, device=inputs.device)
    width = weight.shape[1]
    _chunk_kernel[(segments.shape[0], triton.cdiv(rows, TILE_TOKENS), triton.cdiv(channels, TILE_CHANNELS))](
        inputs, weight, states, segments, out, channels, inputs.stride(0), WIDTH=width, TOKENS=TILE_TOKENS, BLOCK=TILE_CHANNELS,
        num_warps=4)
    _state_kernel[(segments.shape[0], triton.cdiv(channels, CHANNELS))](
        inputs, states, segments, channels, inputs.stride(0), WIDTH=width, BLOCK=CHANNELS, num_warps=2)
    return out
