"""The card's planted faults on the host: what each hands on is wrong in the one way it says (tests/engine/gpu runs them on a card)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.kernels import dispatch
from engine.kernels import slots as columns
from engine.models.llama import Llama
from engine.runner import CardRunner
from tests.engine import card_faults
from tests.engine.test_faults import FAULTS

Patch = pytest.MonkeyPatch
SLOTS, WIDTH, BLOCK_SIZE = 3, columns.BLOCKS + 4, 4


def test_they_are_the_hosts_faults() -> None:
    """All but those of the host's own kernel."""
    assert [fault.__name__ for fault in card_faults.FAULTS] == [f.__name__ for f in FAULTS if not f.__name__.startswith("reach_")]


def test_a_stale_id_is_the_one_before_and_padding_touches_no_slot(monkeypatch: Patch) -> None:
    monkeypatch.setattr(dispatch, "begin", columns.begin_reference)
    card_faults.stale_last_id(monkeypatch)
    state, tick = torch.zeros(SLOTS, WIDTH, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    slots = torch.tensor([2, 0, -1, -1], dtype=torch.int32)
    seen = []
    for last in (11, 12, 13):
        state[:, columns.LAST_ID] = torch.tensor([last, last + 10, last + 20])
        ids, positions, _, lengths = dispatch.begin(state, slots, tick, BLOCK_SIZE)
        seen.append(ids.tolist()[:2])
        assert positions.tolist() == [0, 0, 0, 0] and lengths.tolist() == [1, 1, 0, 0]
    assert seen == [[0, 0], [31, 11], [32, 12]]


def attended(patch: Patch, fault: Any) -> tuple[list[int], list[list[int]]]:
    """Lengths and tiles that a step's attention is given: decodes of 5 and 1 tokens, padding, a chunk of 6 rows from position 8."""
    given: list[Any] = []
    patch.setattr(dispatch, "attention_slots", lambda *args: given.append((args[4].tolist(), args[5].tolist())))
    fault(patch)
    tiles = torch.tensor([[3, 6, 8, 1]], dtype=torch.int32)
    dispatch.attention_slots(None, None, None, None, torch.tensor([5, 1, 0], dtype=torch.int32), tiles, 1.0)  # type: ignore[arg-type]
    assert tiles.tolist() == [[3, 6, 8, 1]], "the batch's own tiles stay"
    return given[0]  # type: ignore[no-any-return]


def test_attention_reaches_one_too_far_or_one_too_short(monkeypatch: Patch) -> None:
    with monkeypatch.context() as patch:
        assert attended(patch, card_faults.mask_off_by_one) == ([5, 1, 0], [[3, 6, 9, 1]])
    with monkeypatch.context() as patch:
        assert attended(patch, card_faults.length_off_by_one) == ([4, 1, 0], [[3, 6, 8, 1]])


@pytest.mark.parametrize(("fault", "expected"), [
    (card_faults.decode_position_plus_one, [21, 31, 0, 1, 2, 8, 9]), (card_faults.chunk_position_plus_one, [20, 30, 0, 1, 2, 9, 10]),
], ids=["decodes", "second chunk"])
def test_positions_are_shifted_where_it_is_said(monkeypatch: Patch, fault: Any, expected: list[int]) -> None:
    """Two decodes, a first chunk of three rows, a second of two from position 8."""
    from engine.batch import SlotBatch

    given: list[Any] = []
    monkeypatch.setattr(Llama, "forward", lambda self, batch, caches: given.append(batch.positions.tolist()))
    fault(monkeypatch)
    empty = torch.zeros(0, dtype=torch.int32)
    batch = SlotBatch(token_ids=empty, positions=torch.tensor([20, 30, 0, 1, 2, 8, 9]), cache_rows=empty, slots=empty,
                      lengths=torch.tensor([21, 31]), tiles=None, segments=torch.tensor([[2, 3, 0, 0], [5, 2, 8, 1]]), sample_rows=None)
    Llama.forward(None, batch, None)  # type: ignore[arg-type]
    assert given == [expected] and batch.positions.tolist() == [20, 30, 0, 1, 2, 8, 9]


def test_the_first_two_blocks_of_who_is_admitted_are_swapped(monkeypatch: Patch) -> None:
    state = torch.zeros(SLOTS, WIDTH, dtype=torch.int32)
    state[:, columns.BLOCKS :] = torch.tensor([5, 6, 7, 8])
    monkeypatch.setattr(CardRunner, "lay_out", lambda self, step, fields: "laid out")
    card_faults.blocks_swapped(monkeypatch)
    step = SimpleNamespace(admitted=[SimpleNamespace(slot=1)])
    assert CardRunner.lay_out(SimpleNamespace(state=state), step, None) == "laid out"  # type: ignore[arg-type, comparison-overlap]
    assert state[:, columns.BLOCKS :].tolist() == [[5, 6, 7, 8], [6, 5, 7, 8], [5, 6, 7, 8]]
