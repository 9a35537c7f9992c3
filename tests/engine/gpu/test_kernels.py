"""Each Triton kernel against its PyTorch reference, on odd shapes.

Tolerances are relative L2 against the reference in float32 on the same inputs; attention's is computed on the host.
float32: 1e-5, some tens of roundings of 6e-8 in sums of up to thousands of terms in another order.
bfloat16: 1e-2, a rounding of 4e-3 at each of a few places.  Copies must be exact.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from engine.kernels import (
    activation_triton,
    attention,
    attention_decode_triton,
    attention_prefill_triton,
    linear_triton,
    norm,
    norm_triton,
    place,
    place_triton,
    sample_triton,
    slots,
    slots_triton,
)
from tests.engine.gpu.conftest import DEVICE, ON_CARD

FLOAT, HALF = torch.float32, torch.bfloat16
TOLERANCE = {FLOAT: 1e-5, HALF: 1e-2}
SHAPES = [(8, 2, 16), (9, 3, 64), (5, 1, 24), (32, 8, 128)]
"""(query heads, KV heads, head dim): the tests' checkpoints, SmolLM2, an odd one, Qwen3-4B."""
dtypes = pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=["float32", "bfloat16"])
interpreted = pytest.mark.skipif(not ON_CARD, reason="Triton's interpreter cuts floats off to bfloat16 where a card rounds")
no_half_products = pytest.mark.skipif(not ON_CARD, reason="Triton's interpreter multiplies the bits of bfloat16 as integers")
product_dtypes = pytest.mark.parametrize("dtype", [FLOAT, pytest.param(HALF, marks=no_half_products)], ids=["float32", "bfloat16"])
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype).to(DEVICE)


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def poison(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """An output nobody has written: NaN, so that an element left out is seen."""
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def check(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype and bool(found.isfinite().all())
    error = float((found.float() - expected.float()).norm() / expected.float().norm())
    assert error < TOLERANCE[dtype], f"relative L2 {error:.2e}"


@dtypes
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 100), (33, 2560), (7, 576)])
def test_norms(dtype: torch.dtype, rows: int, width: int) -> None:
    x, residual, weight = (random(*size, dtype=dtype, seed=seed) for seed, size in enumerate([(rows, width), (rows, width), (width,)]))
    check(norm_triton.rms_norm(x, weight, 1e-5), norm.rms_norm_reference(x.float(), weight.float(), 1e-5), dtype)
    normed, total = norm_triton.add_rms_norm(x, residual, weight, 1e-5)
    expected, expected_total = norm.add_rms_norm_reference(x.float(), residual.float(), weight.float(), 1e-5)
    check(normed, expected, dtype)
    check(total, expected_total, dtype)
    assert torch.equal(total, expected_total.to(dtype)) or not ON_CARD


@interpreted
def test_the_sum_that_is_normalised_is_the_unrounded_one() -> None:
    """Bit for bit as the reference has it in bfloat16, where rounding the sum first would differ."""
    x, residual, weight = random(64, 256, dtype=HALF), random(64, 256, dtype=HALF, seed=1), random(256, dtype=HALF)
    found, _ = norm_triton.add_rms_norm(x, residual, weight, 1e-6)
    expected, total = norm.add_rms_norm_reference(x, residual, weight, 1e-6)
    other = norm.rms_norm_reference(total, weight, 1e-6)
    assert (found != expected).float().mean() < 0.01 < (other != expected).float().mean()


@dtypes
@pytest.mark.parametrize(("rows", "inner"), [(1, 96), (5, 1000), (3, 9728)])
def test_silu_mul(dtype: torch.dtype, rows: int, inner: int) -> None:
    gate_up = 3 * random(rows, 2 * inner, dtype=dtype)
    gate, up = gate_up.float().chunk(2, dim=-1)
    check(activation_triton.silu_mul(gate_up), torch.nn.functional.silu(gate) * up, dtype)


@product_dtypes
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(("rows", "width", "inner"), [(1, 100, 256), (3, 64, 1216), (17, 300, 640), (32, 384, 2560)])
def test_linear_of_few_rows(dtype: torch.dtype, splits: int, rows: int, width: int, inner: int) -> None:
    """Also of rows that lie apart; each row's bits hang on that row alone, and nothing is left behind for the next product."""
    x, weight = random(rows, 2 * inner, dtype=dtype)[:, :inner], random(width, inner, dtype=dtype) * inner**-0.5
    tuning = linear_triton.PLAIN._replace(tile=64, stages=3, programs=splits * -(-width // 64))
    found = linear_triton.linear(x, weight, tuning)
    check(found, torch.nn.functional.linear(x.double().cpu(), weight.double().cpu()).to(DEVICE), dtype)
    assert torch.equal(linear_triton.linear(x, weight, tuning), found)
    padding = 16 if rows <= 16 else 32
    others = torch.cat([x[-1:], random(padding - 1, inner, dtype=dtype, seed=2)])
    assert torch.equal(linear_triton.linear(others, weight, tuning)[0], found[-1])


def test_linear_serves_few_rows_of_whole_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_triton, "MOST_ROWS", 32)
    weight = random(64, 128, dtype=HALF)
    assert linear_triton.serves(random(32, 128, dtype=HALF), weight)
    assert not linear_triton.serves(random(33, 128, dtype=HALF), weight)
    assert not linear_triton.serves(random(4, 96, dtype=HALF), random(64, 96, dtype=HALF))
    assert not linear_triton.serves(random(4, 128, dtype=FLOAT), weight.float())
    assert not linear_triton.serves(random(4, 128, dtype=HALF), random(128, 64, dtype=HALF).t())


@dtypes
@shapes
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("normed", [True, False])
def test_place(dtype: torch.dtype, shape: tuple[int, int, int], block_size: int, normed: bool) -> None:
    heads, kv_heads, dim = shape
    tokens = 11
    qkv = random(tokens, heads + 2 * kv_heads, dim, dtype=dtype)
    norms = (random(dim, dtype=dtype), random(dim, dtype=dtype, seed=1)) if normed else None
    angles = torch.rand(tokens, dim // 2, generator=torch.Generator().manual_seed(1)).to(DEVICE) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    cache = random(20, block_size, 2 * kv_heads, dim, dtype=dtype)
    rows = torch.randperm(20 * block_size, generator=torch.Generator().manual_seed(2))[:tokens].to(DEVICE)
    expected_qkv, expected_cache = qkv.float().clone(), cache.float().clone()
    place.place_reference(
        expected_qkv, heads, norms and (norms[0].float(), norms[1].float()), 1e-5, cos.float(), sin.float(), expected_cache, rows)
    untouched = torch.ones(20 * block_size, dtype=torch.bool, device=DEVICE)
    untouched[rows] = False
    before = cache.clone()
    found = qkv.clone()
    place_triton.place(found, heads, norms, 1e-5, cos, sin, cache, rows.int())
    check(found[:, :heads], expected_qkv[:, :heads], dtype)
    flat, expected_flat = (one.view(20 * block_size, 2 * kv_heads, dim) for one in (cache, expected_cache))
    check(flat[rows][:, :kv_heads], expected_flat[rows][:, :kv_heads], dtype)
    assert torch.equal(flat[rows][:, kv_heads:], qkv[:, heads + kv_heads :])
    assert torch.equal(flat[untouched], before.view_as(flat)[untouched])


def paged(shape: tuple[int, int, int], dtype: torch.dtype, block_size: int, slots_: int, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache of random content, and tables [slots, W] of shuffled blocks; what lies beyond a request's length is content of others."""
    width = -(-longest // block_size)
    cache = random(1 + slots_ * width, block_size, 2 * shape[1], shape[2], dtype=dtype)
    blocks = 1 + torch.randperm(slots_ * width, generator=torch.Generator().manual_seed(3))
    return cache, blocks.view(slots_, width).int().to(DEVICE)


@product_dtypes
@shapes
@pytest.mark.parametrize("block_size", [4, 16, 32])
def test_attention_decode(dtype: torch.dtype, shape: tuple[int, int, int], block_size: int) -> None:
    heads, kv_heads, dim = shape
    lengths = [1, 15, 16, 17, 0, 100, 33, 64]
    cache, tables = paged(shape, dtype, block_size, 9, 100)
    seats = [3, 0, 8, 1, -1, 7, 2, 6]
    qkv = random(len(lengths), heads + 2 * kv_heads, dim, dtype=dtype)
    out = poison(len(lengths), heads, dim, dtype=dtype)
    attention_decode_triton.attention_decode(qkv[:, :heads], cache, tables, ints(seats), ints(lengths), out, dim**-0.5)
    for row, (slot, length) in enumerate(zip(seats, lengths, strict=True)):
        if length == 0:
            assert bool((out[row] == 0).all())
            continue
        mask = attention.length_mask(torch.tensor([length]), tables.shape[1] * block_size, FLOAT)
        query, table = qkv[row : row + 1, :heads].float().cpu(), tables[slot : slot + 1].long().cpu()
        expected = attention.attention_decode_reference(query, cache.float().cpu(), table, mask, dim**-0.5)
        check(out[row : row + 1].cpu(), expected, dtype)


@product_dtypes
@shapes
@pytest.mark.parametrize("block_size", [4, 16])
def test_attention_prefill(dtype: torch.dtype, shape: tuple[int, int, int], block_size: int) -> None:
    """Chunks with and without earlier tokens, in one launch; rows before the first chunk (the decodes') stay as they were."""
    heads, _, dim = shape
    chunks = [(5, 5, 2), (130, 130, 0), (129, 166, 3), (2, 90, 1), (65, 200, 4)]
    """(rows, tokens with them, slot)"""
    cache, tables = paged(shape, dtype, block_size, 5, 200)
    before, tallest = 3, attention_prefill_triton.tile_rows(dtype)
    tiles, first = [], before
    for rows, total, slot in chunks:
        tiles += [(first + at, min(tallest, rows - at), total - rows + at, slot) for at in range(0, rows, tallest)]
        first += rows
    tiles.reverse()
    query = random(first, heads, dim, dtype=dtype)
    out = poison(first, heads, dim, dtype=dtype)
    attention_prefill_triton.attention_prefill(query, cache, tables, ints([n for tile in tiles for n in tile]).view(-1, 4), out, dim**-0.5)
    assert bool(out[:before].isnan().all())
    first = before
    for rows, total, slot in chunks:
        blocks = tables[slot, : -(-total // block_size)].long().cpu()
        chunk = query[first : first + rows].float().cpu()
        expected = attention.attention_prefill_reference(chunk, cache.float().cpu(), blocks, total, dim**-0.5)
        check(out[first : first + rows].cpu(), expected, dtype)
        first += rows


def state_of(rows: list[dict[str, object]], width: int = slots.BLOCKS + 8) -> torch.Tensor:
    """Slots' state from {column: value}; `ids` are the suppressed ones, `blocks` the table."""
    state = torch.zeros(len(rows), width, dtype=torch.int32)
    for number, row in enumerate(rows):
        suppressed, blocks = list(row.get("ids", [])), list(row.get("blocks", []))  # type: ignore[call-overload]
        state[number, slots.SUPPRESSED] = len(suppressed)
        state[number, slots.SUPPRESSED_IDS : slots.SUPPRESSED_IDS + len(suppressed)] = torch.tensor(suppressed)
        state[number, slots.BLOCKS : slots.BLOCKS + len(blocks)] = torch.tensor(blocks)
        for name, column in (("last", slots.LAST_ID), ("length", slots.LENGTH), ("free_from", slots.FREE_FROM)):
            state[number, column] = int(row.get(name, 0))  # type: ignore[call-overload]
    return state.to(DEVICE)


@dtypes
@pytest.mark.parametrize("vocab", [512, 5000, 151_936])
def test_greedy_is_argmax_with_the_lowest_id_among_equals(dtype: torch.dtype, vocab: int) -> None:
    logits = random(5, vocab, dtype=dtype)
    top = float(logits.max()) + 1
    logits[1, [vocab - 1, 7, 300]] = top
    logits[2] = 0.0
    logits[3, [vocab - 2, vocab - 1]] = top
    found = sample_triton.greedy(logits, state_of([{}]), ints([-1] * 5), ints([0] * 5))
    assert found.tolist()[1:4] == [7, 0, vocab - 2]
    assert found.tolist() == [int((row == row.max()).nonzero()[0]) for row in logits.cpu()]


def test_greedy_leaves_out_what_a_slot_may_not_choose_yet() -> None:
    logits = random(4, 5000, dtype=FLOAT)
    order = logits.argsort(dim=-1, descending=True).tolist()
    state = state_of([
        {"free_from": 10, "ids": [order[0][0], order[0][1], order[2][0]]}, {}, {"free_from": 10, "ids": [order[1][0], order[2][0]]}])
    found = sample_triton.greedy(logits, state, ints([0, 2, 2, 1]), ints([9, 10, 9, 5]))
    assert found.tolist() == [order[0][2], order[1][0], order[2][1], order[3][0]]


def test_a_decode_step_begins_and_ends_as_the_reference_has_it() -> None:
    state = state_of([
        {"last": 11, "length": 7, "blocks": [5, 6, 9]}, {"last": 12, "length": 8, "blocks": [1, 2, 3]}, {"last": 13, "length": 0}])
    seats, tick, handed = ints([1, -1, 0, 1, -1]), ints([4]), torch.zeros(2, 8, dtype=torch.int32, device=DEVICE)
    expected_tick = tick.clone()
    expected = slots.begin_reference(state, seats, expected_tick, 4)
    found = slots_triton.begin(state, seats, tick, 4)
    assert all(torch.equal(one.long(), other.long()) for one, other in zip(found, expected, strict=True))
    assert tick.tolist() == expected_tick.tolist() == [5]
    assert found[2].tolist() == [12, 0, 27, 12, 0]
    seats, ids = ints([1, -1, 0]), ints([101, 102, 103])
    expected_state, expected_handed = state.clone(), handed.clone()
    slots.advance_reference(expected_state, seats, found[1][:3], ids, tick, expected_handed)
    slots_triton.advance(state, seats, found[1][:3].clone(), ids, tick, handed)
    assert torch.equal(state, expected_state) and torch.equal(handed, expected_handed)
    assert state[:, : slots.LENGTH + 1].tolist() == [[103, 8], [101, 9], [13, 0]] and handed[1].tolist()[:3] == [101, 102, 103]


@pytest.mark.skipif(not ON_CARD, reason="the interpreter's blocks are not the card's")
@pytest.mark.parametrize("tuning", [(16, 2, 3), (32, 4, 4), (64, 4, 3), (128, 4, 2)], ids=str)
def test_a_tuning_changes_no_result(tuning: tuple[int, int, int]) -> None:
    heads, _, dim = SHAPES[-1]
    cache, tables = paged(SHAPES[-1], HALF, 16, 4, 300)
    query, lengths, seats = random(4, heads, dim, dtype=HALF), ints([300, 1, 129, 64]), ints([0, 1, 2, 3])
    outs = []
    for chosen in (None, attention_decode_triton.Tuning(*tuning)):
        outs.append(poison(4, heads, dim, dtype=HALF))
        attention_decode_triton.attention_decode(query, cache, tables, seats, lengths, outs[-1], dim**-0.5, chosen)
    check(outs[1], outs[0], HALF)
