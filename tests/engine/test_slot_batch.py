"""The card's layout of a step, on the host: the same tokens in the same places as the host's own layout, whatever the schedule."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.batch import SlotFields, flatten, pack, pack_slots, slot_state
from engine.graphs import sizes_for
from engine.kernels import slots
from engine.kv_cache import BlockPool
from engine.loop import Loop
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler, Step

BLOCK, TILE, SEQS, LENGTH = 4, 16, 5, 80
WIDTH = slots.BLOCKS + LENGTH // BLOCK


class Compare:
    """A runner that lays every step out both ways and compares them; the ids it samples count up."""

    def __init__(self) -> None:
        self.tables = torch.zeros(SEQS, LENGTH // BLOCK, dtype=torch.int64)
        self.steps = self.tiles = 0

    def launch(self, step: Step) -> int:
        for request in step.admitted:
            self.tables[request.slot] = torch.from_numpy(slot_state(request, WIDTH)[slots.BLOCKS :].astype(np.int64))
        mine, theirs = pack_slots(step, BLOCK, TILE, WIDTH), pack(step, self.tables, BLOCK, torch.float32)
        for name in ("token_ids", "positions", "cache_rows", "last_rows", "last_slots", "sample_rows", "sample_slots"):
            assert getattr(mine, name).tolist() == getattr(theirs, name).tolist(), name
        assert mine.sample_positions.tolist() == theirs.positions[theirs.sample_rows].tolist()
        tables = self.tables[torch.from_numpy(mine.slots.astype(np.int64))]
        assert torch.equal(tables[:, : theirs.decode_tables.shape[1]], theirs.decode_tables)
        assert mine.lengths.tolist() == [int((row == 0).sum()) for row in theirs.decode_mask]
        covered = []
        for first, rows, position, slot in mine.tiles.reshape(-1, 4).tolist():
            assert 0 < rows <= TILE and theirs.positions[first : first + rows].tolist() == list(range(position, position + rows))
            [chunk] = [chunk for chunk in theirs.chunks if chunk.first <= first < chunk.first + chunk.length]
            assert chunk.slot == slot
            covered += range(first, first + rows)
        assert sorted(covered) == list(range(len(mine.slots), len(mine.token_ids)))
        whole = [(first, length, total - length, slot) for first, length, total, slot in theirs.chunks]
        assert [tuple(segment) for segment in mine.segments.reshape(-1, 4).tolist()] == whole
        self.steps += 1
        self.tiles += len(mine.tiles) // 4
        return sum(row.samples for row in step.rows)

    def collect(self, launched: int) -> list[int]:
        return list(range(launched))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [1, 7, 24, 200])
def test_both_layouts_hold_the_same_step(depth: int, budget: int) -> None:
    scheduler, runner = Scheduler(budget, SEQS, BlockPool(200, BLOCK)), Compare()
    loop = Loop(scheduler, runner, depth)
    for i in range(12):
        params = SamplingParams(max_tokens=2 + 3 * i % 11, min_tokens=i % 2, ignore_eos=True)
        scheduler.add(Request(str(i), range(100 * i, 100 * i + 1 + 17 * i % 60), params, (7,)))
    while loop.has_unfinished:
        loop.step()
    assert runner.steps > 10 and (runner.tiles > 12 or budget == 1)


def test_a_slot_s_row_says_when_its_ids_are_unrestricted() -> None:
    request = Request("0", [9] * 10, SamplingParams(max_tokens=8, min_tokens=3, stop_token_ids=(5,)), (2,))
    request.blocks = [4, 8, 3]
    row = slot_state(request, WIDTH)
    assert row[slots.FREE_FROM] == 12 and row[slots.SUPPRESSED] == 2 and row[slots.SUPPRESSED_IDS :][:3].tolist() == [2, 5, 0]
    assert row[slots.BLOCKS :][:4].tolist() == [4, 8, 3, 0] and row[slots.LAST_ID] == row[slots.LENGTH] == 0


def test_fields_begin_at_multiples_of_sixteen_bytes() -> None:
    fields = SlotFields(*(np.arange(size, dtype=np.int32) for size in range(len(SlotFields._fields))))
    parts, begins = flatten(fields)
    packed = np.concatenate(parts)
    assert all(begin % 4 == 0 for begin in begins)
    assert all(packed[begin : begin + len(field)].tolist() == field.tolist() for begin, field in zip(begins, fields, strict=True))


def test_a_decode_step_s_reference_on_the_host() -> None:
    """Positions, cache rows and lengths from a slot's state, and padding that touches nothing but the null block."""
    state = torch.zeros(3, WIDTH, dtype=torch.int32)
    state[1, slots.LAST_ID], state[1, slots.LENGTH], state[1, slots.BLOCKS : slots.BLOCKS + 3] = 42, 9, torch.tensor([5, 7, 6])
    seats, tick, handed = torch.tensor([-1, 1], dtype=torch.int32), torch.zeros(1, dtype=torch.int32), torch.zeros(2, 8, dtype=torch.int32)
    ids, positions, places, lengths = slots.begin_reference(state, seats, tick, BLOCK)
    assert [one.tolist() for one in (ids, positions, places, lengths)] == [[0, 42], [0, 9], [0, 6 * BLOCK + 1], [0, 10]]
    before = state.clone()
    slots.advance_reference(state, seats, positions, torch.tensor([11, 12], dtype=torch.int32), tick, handed)
    assert state[1, :2].tolist() == [12, 10] and handed[1, :2].tolist() == [11, 12]
    state[1, :2] = before[1, :2]
    assert torch.equal(state, before)


@pytest.mark.parametrize(("rows", "sizes"), [(1, (1,)), (3, (1, 2, 4)), (32, (1, 2, 4, 8, 16, 24, 32)), (33, (1, 2, 4, 8, 16, 24, 32, 40))])
def test_padded_sizes(rows: int, sizes: tuple[int, ...]) -> None:
    assert sizes_for(rows) == sizes
