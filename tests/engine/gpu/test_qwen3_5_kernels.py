"""Qwen3.5's Triton kernels against their PyTorch references; tolerances as in test_kernels.py."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from engine.kernels import (
    conv,
    conv_triton,
    gated_attention,
    gated_attention_triton,
    gdn,
    gdn_decode_triton,
    gdn_prefill_triton,
    norm_centred,
    norm_centred_triton,
)
from tests.engine.gpu import test_kernels
from tests.engine.gpu.conftest import DEVICE, ON_CARD
from tests.engine.gpu.test_kernels import FLOAT, HALF, check, dtypes, ints, poison, product_dtypes, random

SIZES = [(2, 4, 16, 16), (1, 3, 24, 40), (1, 2, 128, 128)]
"""(key heads, value heads, key dim, value dim): the tests' checkpoints, an odd one, Qwen3.5-4B's heads."""
if ON_CARD:
    SIZES.append((16, 32, 128, 128))
sizes = pytest.mark.parametrize("size", SIZES, ids=str)


def weights_of(size: tuple[int, int, int, int], dtype: torch.dtype, width: int = 4) -> gdn.GdnWeights:
    key_heads, heads, key_dim, value_dim = size
    channels = 2 * key_heads * key_dim + heads * value_dim
    return gdn.GdnWeights(
        0.5 * random(channels, width, dtype=dtype), random(heads, dtype=FLOAT) - 2, random(heads, dtype=FLOAT, seed=1) - 1,
        1 + 0.3 * random(value_dim, dtype=dtype), 1e-6)


def states_of(size: tuple[int, int, int, int], slots: int, dtype: torch.dtype, width: int = 4) -> gdn.GdnState:
    key_heads, heads, key_dim, value_dim = size
    channels = 2 * key_heads * key_dim + heads * value_dim
    return gdn.GdnState(random(slots, width - 1, channels, dtype=dtype), random(slots, heads, value_dim, key_dim, dtype=FLOAT))


def projected_of(size: tuple[int, int, int, int], rows: int, dtype: torch.dtype) -> torch.Tensor:
    key_heads, heads, key_dim, value_dim = size
    return random(rows, 2 * key_heads * key_dim + 2 * heads * value_dim + 2 * heads, dtype=dtype)


def exact(weights: gdn.GdnWeights, state: gdn.GdnState) -> tuple[gdn.GdnWeights, gdn.GdnState]:
    """Copies in float32, on the host."""
    return (gdn.GdnWeights(*(part.float().cpu() for part in weights[:-1]), weights.eps),
            gdn.GdnState(state.conv.float().cpu().clone(), state.recurrent.cpu().clone()))


def check_all(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    check(found.cpu().to(dtype), expected, dtype)


@dtypes
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 100), (9, 2560)])
def test_norms(dtype: torch.dtype, rows: int, width: int) -> None:
    x, residual, weight = (random(*size, dtype=dtype, seed=seed) for seed, size in enumerate([(rows, width), (rows, width), (width,)]))
    exact_ = [part.float() for part in (x, residual, weight)]
    check(norm_centred_triton.rms_norm_centred(x, weight, 1e-6),
          norm_centred.rms_norm_centred_reference(exact_[0], exact_[2], 1e-6), dtype)
    normed, total = norm_centred_triton.add_rms_norm_centred(x, residual, weight, 1e-6)
    expected, expected_total = norm_centred.add_rms_norm_centred_reference(*exact_, 1e-6)
    check(normed, expected, dtype)
    check(total, expected_total, dtype)


@dtypes
@pytest.mark.parametrize("shape", [(4, 2, 16, 4), (3, 1, 24, 12), (16, 4, 256, 64), (2, 1, 16, 16)], ids=str)
def test_place_gated_and_gate(dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    heads, kv_heads, dim, turned = shape
    tokens, block_size = 7, 4
    projected = random(tokens, 2 * heads + 2 * kv_heads, dim, dtype=dtype)
    norms = random(dim, dtype=dtype), random(dim, dtype=dtype, seed=1)
    angles = torch.rand(tokens, turned // 2, generator=torch.Generator().manual_seed(1)).to(DEVICE) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    cache = random(10, block_size, 2 * kv_heads, dim, dtype=dtype)
    rows = torch.randperm(40, generator=torch.Generator().manual_seed(2))[:tokens].to(DEVICE)
    expected_cache = cache.float().clone()
    expected = gated_attention.place_gated_reference(
        projected.float(), heads, (norms[0].float(), norms[1].float()), 1e-6, cos.float(), sin.float(), expected_cache, rows)
    before = projected.clone()
    untouched = torch.ones(40, dtype=torch.bool, device=DEVICE)
    untouched[rows] = False
    old = cache.clone()
    check(gated_attention_triton.place_gated(projected, heads, norms, 1e-6, cos, sin, cache, rows.int()), expected, dtype)
    assert torch.equal(projected, before)
    flat = cache.view(40, 2 * kv_heads, dim)
    check(flat[rows][:, :kv_heads], expected_cache.view(flat.shape)[rows][:, :kv_heads], dtype)
    assert torch.equal(flat[rows][:, kv_heads:], projected[:, 2 * heads + kv_heads :])
    assert torch.equal(flat[untouched], old.view(flat.shape)[untouched])
    out = random(tokens, heads * dim, dtype=dtype, seed=5)
    check(gated_attention_triton.gate(out, projected, heads),
          gated_attention.gate_reference(out.float(), projected.float(), heads), dtype)


CHUNKS = [(2, 0, 3), (130, 0, 1), (3, 40, 0), (2, 1, 5), (65, 64, 4), (64, 70, 2)]
"""(rows, position of the first, slot)"""


def segments_of(chunks: list[tuple[int, int, int]], first: int) -> torch.Tensor:
    made = []
    for rows, position, slot in chunks:
        made += [first, rows, position, slot]
        first += rows
    return ints(made).view(-1, 4)


@dtypes
@pytest.mark.parametrize("width", [2, 4])
def test_conv(dtype: torch.dtype, width: int) -> None:
    """Decodes and chunks of every length around the filter's, from old states and from none; unnamed slots and rows stay as they were."""
    channels = 300
    rows = sum(chunk[0] for chunk in CHUNKS)
    inputs, weight = random(rows + 4, channels, dtype=dtype), random(channels, width, dtype=dtype)
    states = random(8, width - 1, channels, dtype=dtype)
    held = states.float().clone()
    out = conv_triton.conv_decode(inputs[:4], weight, states, ints([6, -1, 7, 2]), ints([5, 0, 1, 2]))
    slots, first = torch.tensor([6, 7, 2], device=DEVICE), torch.tensor([False, True, False], device=DEVICE)
    expected = conv.conv_decode_reference(inputs[[0, 2, 3]].float(), weight.float(), held, slots, first)
    check(out[[0, 2, 3]], expected, dtype)
    assert bool((out[1] == 0).all()) and torch.equal(states, held.to(dtype))
    out = conv_triton.conv_chunks(inputs, weight, states, segments_of(CHUNKS, 4))
    begin = 4
    for count, position, slot in CHUNKS:
        expected = conv.conv_chunk_reference(inputs[begin : begin + count].float(), weight.float(), held[slot], position == 0)
        check(out[begin : begin + count], expected, dtype)
        begin += count
    assert torch.equal(states, held.to(dtype))


@dtypes
@sizes
def test_gdn_decode(dtype: torch.dtype, size: tuple[int, int, int, int]) -> None:
    """Old requests, one whose first token this is (its slot holds NaN), and padding; slots of others stay as they were."""
    seats, lengths = [3, 0, -1, 5, 2], [7, 1, 0, 2, 100]
    rows = [0, 1, 3, 4]
    projected, weights, state = projected_of(size, 6, dtype), weights_of(size, dtype), states_of(size, 6, dtype)
    for part in state:
        part[0] = float("nan")
    exact_weights, exact_state = exact(weights, state)
    expected = gdn.gdn_decode_reference(
        projected[rows].float().cpu(), exact_weights, exact_state, torch.tensor([seats[row] for row in rows]),
        torch.tensor([lengths[row] == 1 for row in rows]))
    out = poison(6, size[1] * size[3], dtype=dtype)
    gdn_decode_triton.gdn_decode(projected, weights, state, ints(seats), ints(lengths), out)
    check_all(out[rows], expected, dtype)
    assert bool((out[2] == 0).all()) and bool(out[5].isnan().all())
    check_all(state.recurrent, exact_state.recurrent, dtype)
    assert torch.equal(state.conv.float().cpu(), exact_state.conv)
    assert torch.equal(state.recurrent[[1, 4]].cpu(), exact_state.recurrent[[1, 4]])


@product_dtypes
@sizes
def test_gdn_prefill(dtype: torch.dtype, size: tuple[int, int, int, int]) -> None:
    """Segments of whole and part chunks, from old states and from none (those slots hold NaN); rows before them stay as they were."""
    begin, rows = 3, sum(chunk[0] for chunk in CHUNKS)
    projected, weights, state = projected_of(size, begin + rows, dtype), weights_of(size, dtype), states_of(size, 7, dtype)
    for part in state:
        part[[1, 3]] = float("nan")
    exact_weights, exact_state = exact(weights, state)
    out = poison(begin + rows, size[1] * size[3], dtype=dtype)
    gdn_prefill_triton.gdn_prefill(projected, weights, state, segments_of(CHUNKS, begin), out, begin)
    assert bool(out[:begin].isnan().all())
    for count, position, slot in CHUNKS:
        expected = gdn.gdn_prefill_reference(
            projected[begin : begin + count].float().cpu(), exact_weights, exact_state, slot, position == 0)
        check_all(out[begin : begin + count], expected, dtype)
        check_all(state.recurrent[slot], exact_state.recurrent[slot], dtype)
        begin += count
    assert torch.equal(state.conv.float().cpu(), exact_state.conv)
    assert torch.equal(state.recurrent[6].cpu(), exact_state.recurrent[6])


@product_dtypes
def test_gdn_prefill_of_keys_that_resemble_each_other(dtype: torch.dtype) -> None:
    """Repeated tokens: all keys of a chunk alike, hardly any decay, writes of full strength.  A series for the inverse would cancel."""
    size, rows = (1, 1, 32, 32), 64
    generator = torch.Generator().manual_seed(3)
    key = torch.randn(32, generator=generator) + 0.01 * torch.randn(rows, 32, generator=generator)
    query, value, z = (torch.randn(rows, 32, generator=generator) for _ in range(3))
    gates = torch.tensor([8.0, -12.0]).expand(rows, 2)
    projected = torch.cat((query, key, value, z, gates), dim=1).to(dtype).to(DEVICE)
    weights, state = weights_of(size, dtype), states_of(size, 1, dtype)
    weights.conv.zero_()[:, 3] = 1
    exact_weights, exact_state = exact(weights, state)
    out = poison(rows, 32, dtype=dtype)
    gdn_prefill_triton.gdn_prefill(projected, weights, state, ints([0, rows, 0, 0]).view(1, 4), out, 0)
    expected = gdn.gdn_prefill_reference(projected.float().cpu(), exact_weights, exact_state, 0, True)
    tolerance = 1e-4 if dtype == FLOAT else 5e-2
    assert float((out.float().cpu() - expected).norm() / expected.norm()) < tolerance


@pytest.mark.skipif(not ON_CARD, reason="slow under the interpreter, and what may not fit is the card's memory")
@product_dtypes
def test_attention_at_qwen3_5_s_head_size(dtype: torch.dtype) -> None:
    test_kernels.test_attention_decode(dtype, (16, 4, 256), 32)
    test_kernels.test_attention_prefill(dtype, (16, 4, 256), 16)


@pytest.mark.skipif(not ON_CARD, reason="the interpreter's blocks are not the card's")
@pytest.mark.parametrize("tuning", [(32, 4, 1), (32, 4, 2), (64, 4, 1), (64, 8, 2), (128, 8, 1)], ids=str)
def test_a_tuning_changes_no_result(tuning: tuple[int, int, int]) -> None:
    size, rows = (16, 32, 128, 128), 300
    projected, weights = projected_of(size, rows, HALF), weights_of(size, HALF)
    outs = []
    for chosen in (None, gdn_prefill_triton.Tuning(*tuning)):
        state = states_of(size, 1, HALF)
        outs.append(poison(rows, size[1] * size[3], dtype=HALF))
        gdn_prefill_triton.gdn_prefill(projected, weights, state, ints([0, rows, 9, 0]).view(1, 4), outs[-1], 0, chosen)
    check(outs[1], outs[0], HALF)
