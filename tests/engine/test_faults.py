"""Planted faults: with each, the parity check must fail.  A check that lets one through proves nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.api import LLM
from engine.batch import pack
from engine.kernels import attention, dispatch
from engine.kernels.cpu import binding, build
from engine.request import Request
from engine.runner import Runner
from tests.engine.conftest import Reference
from tests.engine.serving import check_parity

Patch = pytest.MonkeyPatch
OPTIONS: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 4}


def decode_position_plus_one(patch: Patch) -> None:
    """Decodes rotated one position too far (a shift of all positions alike is no fault: rotary attention is relative)."""
    def faulty(*args: Any) -> Any:
        batch = pack(*args)
        positions = batch.positions.clone()
        positions[batch.last_rows] += 1
        return dataclasses.replace(batch, positions=positions)

    patch.setattr("engine.runner.pack", faulty)


def chunk_position_plus_one(patch: Patch) -> None:
    """A prompt's second chunk rotated one position too far."""
    def faulty(*args: Any) -> Any:
        batch = pack(*args)
        positions = batch.positions.clone()
        for first, length, total, _ in batch.chunks:
            if total > length:
                positions[first : first + length] += 1
        return dataclasses.replace(batch, positions=positions)

    patch.setattr("engine.runner.pack", faulty)


def blocks_swapped(patch: Patch) -> None:
    """The first two entries of a block table exchanged."""
    admit = Runner.admit

    def faulty(self: Runner, request: Request) -> None:
        admit(self, request)
        table = self.caches.block_tables[request.slot]
        table[:2] = table[:2].flip(0).clone()

    patch.setattr(Runner, "admit", faulty)


def mask_off_by_one(patch: Patch) -> None:
    """Each query of a chunk sees the token after it."""

    def faulty(length: int, total: int, device: torch.device) -> torch.Tensor:
        return torch.ones(length, total, dtype=torch.bool, device=device).tril_(total - length + 1)

    patch.setattr(attention, "causal_mask", faulty)
    patch.setattr(binding, "library", lambda: None)


def length_off_by_one(patch: Patch) -> None:
    """A decode does not see its own token."""
    length_mask = attention.length_mask
    patch.setattr(binding, "library", lambda: None)
    patch.setattr("engine.batch.length_mask", lambda lengths, longest, dtype: length_mask((lengths - 1).clamp(min=1), longest, dtype))


def layer_by_layer(patch: Patch) -> None:
    """Not a fault: has the model call one kernel after the other, where one of them can be replaced."""
    patch.setattr(dispatch, "serves_layers", lambda layers, x: False)


def reach_plus_one(patch: Patch) -> None:
    """Every token also sees the one after it, in the form that reads pages."""
    layer_by_layer(patch)
    patch.setattr(dispatch, "attention_pages", lambda query, cache, tables, slots, positions, scale: binding.attention(
        query, cache, tables, slots, positions + 1, scale))


def reach_minus_one(patch: Patch) -> None:
    """No token but the first sees itself, in the form that reads pages."""
    layer_by_layer(patch)
    patch.setattr(dispatch, "attention_pages", lambda query, cache, tables, slots, positions, scale: binding.attention(
        query, cache, tables, slots, (positions - 1).clamp(min=0), scale))


def residual_dropped(patch: Patch) -> None:
    """One of the adds before a norm loses the residual."""
    layer_by_layer(patch)
    add_rms_norm, calls = dispatch.add_rms_norm, [0]

    def faulty(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        calls[0] += 1
        return add_rms_norm(x, torch.zeros_like(residual) if calls[0] % 6 == 3 else residual, weight, eps)

    patch.setattr(dispatch, "add_rms_norm", faulty)


def stale_last_id(patch: Patch) -> None:
    """Decodes are fed the id before the last one."""

    def faulty(self: Runner, batch: Any) -> None:
        stale = getattr(self, "_stale", self.last_sampled)
        batch.token_ids[batch.last_rows] = stale[batch.last_slots]
        self._stale = self.last_sampled.clone()  # type: ignore[attr-defined]

    patch.setattr(Runner, "fill_last_ids", faulty)


FAULTS: list[Callable[[Patch], None]] = [
    decode_position_plus_one, chunk_position_plus_one, blocks_swapped, mask_off_by_one, length_off_by_one, residual_dropped, stale_last_id,
    *([reach_plus_one, reach_minus_one] if build.library() is not None else []),
]


@pytest.mark.parametrize("depth", [1, 2])
def test_without_a_fault_the_check_passes(reference: Reference, depth: int) -> None:
    check_parity(LLM(reference.folder, depth=depth, **OPTIONS), reference)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_each_fault_fails_the_check(monkeypatch: Patch, reference: Reference, fault: Callable[[Patch], None], depth: int) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="differ"):
        check_parity(LLM(reference.folder, depth=depth, **OPTIONS), reference)
