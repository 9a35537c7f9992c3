"""What lasts on the card between steps: one row of int32 a slot, written whole when a request is admitted and advanced by each step.

Row: last sampled id | tokens in the cache | first position whose id is unrestricted | count of suppressed ids | those ids | KV blocks.
"""

from __future__ import annotations

import torch

LAST_ID, LENGTH, FREE_FROM, SUPPRESSED, SUPPRESSED_IDS = range(5)
MOST_SUPPRESSED = 60
BLOCKS = SUPPRESSED_IDS + MOST_SUPPRESSED
"""Columns of a row; from BLOCKS on, its block table.  A multiple of 16, so that tables are aligned."""


def begin_reference(
    state: torch.Tensor, slots: torch.Tensor, tick: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A decode step's inputs from state [slots, width] for slots [B]: token ids, positions, cache rows and lengths to attend to, [B] each.

    Slot -1 is padding: id, position, cache row and length are 0, so it writes into the null block and reads nothing.  `tick` [1] counts on.
    """
    tick += 1
    active = slots >= 0
    rows = state[slots.clamp(min=0).long()]
    positions = torch.where(active, rows[:, LENGTH], 0)
    blocks = rows.gather(1, (BLOCKS + positions // block_size).long().unsqueeze(1)).squeeze(1)
    places = torch.where(active, blocks * block_size + positions % block_size, 0)
    return torch.where(active, rows[:, LAST_ID], 0), positions, places, torch.where(active, positions + 1, 0)


def advance_reference(
    state: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor, tick: torch.Tensor, handed: torch.Tensor
) -> None:
    """After sampling ids [B] at positions [B]: each slot's last id and length move on, and the ids go to handed[tick % 2]."""
    active = slots >= 0
    chosen = slots[active].long()
    state[chosen, LAST_ID] = ids[active]
    state[chosen, LENGTH] = positions[active] + 1
    handed[int(tick) % 2, : ids.shape[0]] = ids
