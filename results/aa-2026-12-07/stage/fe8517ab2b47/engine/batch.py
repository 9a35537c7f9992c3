"""One step as flat device tensors: what changes every step.  What lasts (slots' block tables, last ids, the cache) is the runner's.

All integers of a step are packed on the host into one tensor and uploaded once; the fields are views of it.  Two layouts: `Batch` for
kernels that are given all they need, `SlotBatch` for kernels that read a slot's state on the device themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from engine.kernels import slots as columns
from engine.kernels.attention import length_mask
from engine.request import Request
from engine.scheduler import Row, Step


class Chunk(NamedTuple):
    """Rows `first` to `first + length` of the batch are the last `length` of the `total` tokens of the request in `slot`."""

    first: int
    length: int
    total: int
    slot: int


@dataclass(frozen=True)
class Batch:
    """T tokens: D decodes (one token each) first, then the chunks.  S of the T rows are sampled."""

    cuts_last_layer: ClassVar[bool] = False
    """Whether the last layer's feed-forward is computed for the sampled rows only: nothing reads the others' (tokasaurus does so)."""
    token_ids: torch.Tensor
    """[T]; rows named by `last_rows` are filled in on the device."""
    positions: torch.Tensor
    """[T]"""
    slots: torch.Tensor
    """[T]"""
    cache_rows: torch.Tensor
    """[T], block * block_size + offset of each token's keys and values."""
    last_rows: torch.Tensor
    last_slots: torch.Tensor
    """[L] rows whose id is the last one sampled in that slot."""
    decode_tables: torch.Tensor
    """[D, W] block tables cut to the longest decode."""
    decode_slots: torch.Tensor
    """[D]"""
    decode_mask: torch.Tensor
    """[D, 1, 1, W * block_size] additive."""
    chunks: tuple[Chunk, ...]
    sample_rows: torch.Tensor
    sample_slots: torch.Tensor
    """[S], in the step's row order."""
    masked_samples: torch.Tensor
    masked_ids: torch.Tensor
    """[M] pairs (index into the S samples, id that cannot be chosen)."""


def pack(step: Step, block_tables: torch.Tensor, block_size: int, dtype: torch.dtype) -> Batch:
    """Lay `step` out over `block_tables` [slots, blocks] (int64, on the device); `dtype` is that of the decode mask."""
    decodes = [row for row in step.rows if row.length == 1]
    longer = [row for row in step.rows if row.length > 1]
    first_row, chunks, total = {}, [], 0
    for row in (*decodes, *longer):
        first_row[id(row)] = total
        if row.length > 1:
            chunks.append(Chunk(total, row.length, row.start + row.length, row.request.slot))
        total += row.length
    sampling = [row for row in step.rows if row.samples]
    from_device = [row for row in decodes if not row.is_prefill]
    fields = [
        [token for row in (*decodes, *longer) for token in _ids(row)],
        [position for row in (*decodes, *longer) for position in range(row.start, row.start + row.length)],
        [place for row in (*decodes, *longer) for place in _places(row, block_size)],
        [first_row[id(row)] for row in from_device],
        [row.request.slot for row in from_device],
        [row.request.slot for row in (*decodes, *longer) for _ in range(row.length)],
        [row.start + 1 for row in decodes],
        [first_row[id(row)] + row.length - 1 for row in sampling],
        [row.request.slot for row in sampling],
        [index for index, row in enumerate(sampling) if row.suppress for _ in row.request.suppressed],
        [token for row in sampling if row.suppress for token in row.request.suppressed],
    ]
    uploaded = _upload(fields, block_tables.device)
    ids, positions, places, last_rows, last_slots, slots, lengths, sample_rows, sample_slots, masked, masked_ids = uploaded
    width = max((-(-(row.start + 1) // block_size) for row in decodes), default=0)
    alone = slots[: len(decodes)]
    return Batch(
        token_ids=ids, positions=positions, slots=slots, cache_rows=places, last_rows=last_rows, last_slots=last_slots,
        decode_tables=block_tables[alone, :width], decode_slots=alone,
        decode_mask=length_mask(lengths, width * block_size, dtype), chunks=tuple(chunks),
        sample_rows=sample_rows, sample_slots=sample_slots, masked_samples=masked, masked_ids=masked_ids,
    )


def _ids(row: Row) -> Iterable[int]:
    return row.request.prompt[row.start : row.start + row.length] if row.is_prefill else (0,)


def _places(row: Row, block_size: int) -> Iterable[int]:
    blocks = row.request.blocks
    return (blocks[p // block_size] * block_size + p % block_size for p in range(row.start, row.start + row.length))


def _upload(fields: list[list[int]], device: torch.device) -> tuple[torch.Tensor, ...]:
    packed = torch.tensor([value for field in fields for value in field], dtype=torch.int64).to(device)
    return packed.split([len(field) for field in fields])


@dataclass(frozen=True)
class SlotBatch:
    """T tokens, all integers int32: D rows that attend alone (decodes, prompt chunks of one token) first, then the chunks' tiles."""

    cuts_last_layer: ClassVar[bool] = True
    token_ids: torch.Tensor
    positions: torch.Tensor
    cache_rows: torch.Tensor
    """[T], as in `Batch`."""
    slots: torch.Tensor
    lengths: torch.Tensor
    """[D]; slot -1 with length 0 is padding."""
    tiles: torch.Tensor | None
    """[N, 4]: first row, rows, position of the first, slot."""
    segments: torch.Tensor | None
    """[C, 4]: as `tiles`, of each chunk whole."""
    sample_rows: torch.Tensor | None
    """[S]; None: all of them."""


Array = TypeVar("Array", np.ndarray, torch.Tensor)


class SlotFields(NamedTuple, Generic[Array]):
    """What the host says of a step, int32, there as arrays and on the device as tensors: `SlotBatch`'s fields, rows whose id the device
    fills in, what is sampled, who is admitted.
    """

    token_ids: Array
    positions: Array
    cache_rows: Array
    slots: Array
    lengths: Array
    tiles: Array
    segments: Array
    sample_rows: Array
    sample_slots: Array
    sample_positions: Array
    last_rows: Array
    last_slots: Array
    admitted: Array
    states: Array
    """[A * width], the admitted slots' whole rows (slots.py)."""


ALIGNMENT = 4
"""Fields begin at multiples of 16 bytes: Triton compiles a kernel anew for a pointer that is aligned otherwise."""


def pack_slots(step: Step, block_size: int, tile_rows: int, width: int) -> SlotFields[np.ndarray]:
    """Lay `step` out for kernels over slots of `width` columns; chunks are cut into tiles of `tile_rows` rows, longest reach first."""
    alone = [row for row in step.rows if row.length == 1]
    ordered = [*alone, *(row for row in step.rows if row.length > 1)]
    starts = np.cumsum([0, *(row.length for row in ordered)]).tolist()
    first_row = {id(row): first for row, first in zip(ordered, starts[:-1], strict=True)}
    positions = [np.arange(row.start, row.start + row.length) for row in ordered]
    sampling = [row for row in step.rows if row.samples]
    decodes = [row for row in alone if not row.is_prefill]
    tiles = [
        (first_row[id(row)] + done, min(tile_rows, row.length - done), row.start + done, row.request.slot)
        for row in ordered[len(alone):] for done in range(0, row.length, tile_rows)]
    tiles.sort(key=lambda tile: -(tile[1] + tile[2]))
    states = [slot_state(request, width) for request in step.admitted]
    fields: list[object] = [
        np.concatenate([np.fromiter(_ids(row), np.int32, row.length) for row in ordered]),
        np.concatenate(positions),
        np.concatenate([_rows(row.request, at, block_size) for row, at in zip(ordered, positions, strict=True)]),
        [row.request.slot for row in alone],
        [row.start + 1 for row in alone],
        [value for tile in tiles for value in tile],
        [value for row in ordered[len(alone):] for value in (first_row[id(row)], row.length, row.start, row.request.slot)],
        [first_row[id(row)] + row.length - 1 for row in sampling],
        [row.request.slot for row in sampling],
        [row.start + row.length - 1 for row in sampling],
        [first_row[id(row)] for row in decodes],
        [row.request.slot for row in decodes],
        [request.slot for request in step.admitted],
        np.concatenate(states) if states else [],
    ]
    return SlotFields(*(np.asarray(field, np.int32) for field in fields))


def slot_state(request: Request, width: int) -> np.ndarray:
    """The row of `width` columns (slots.py) of a newly admitted request: nothing computed, ids suppressed until min_tokens are produced."""
    row = np.zeros(width, np.int32)
    row[columns.FREE_FROM] = len(request.prompt) - 1 + request.params.min_tokens
    row[columns.SUPPRESSED] = len(request.suppressed)
    row[columns.SUPPRESSED_IDS : columns.SUPPRESSED_IDS + len(request.suppressed)] = request.suppressed
    row[columns.BLOCKS : columns.BLOCKS + len(request.blocks)] = request.blocks
    return row


def _rows(request: Request, positions: np.ndarray, block_size: int) -> np.ndarray:
    return np.asarray(request.blocks)[positions // block_size] * block_size + positions % block_size


def flatten(fields: Iterable[np.ndarray]) -> tuple[list[np.ndarray], list[int]]:
    """The fields as they follow each other in one upload, padding between them included, and where each begins (in int32)."""
    parts, begins, total = [], [], 0
    for field in fields:
        begins.append(total)
        padding = -field.size % ALIGNMENT
        parts += [field, np.zeros(padding, np.int32)]
        total += field.size + padding
    return parts, begins
