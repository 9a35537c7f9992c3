"""One step as flat device tensors: what changes every step.  What lasts (slots' block tables, last ids, the cache) is the runner's.

All integers of a step are packed on the host into one int64 tensor and uploaded once; the fields are views of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from engine.kernels.attention import length_mask
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

    token_ids: torch.Tensor
    """[T]; rows named by `last_rows` are filled in on the device."""
    positions: torch.Tensor
    """[T]"""
    cache_rows: torch.Tensor
    """[T], block * block_size + offset of each token's keys and values."""
    last_rows: torch.Tensor
    last_slots: torch.Tensor
    """[L] rows whose id is the last one sampled in that slot."""
    decode_tables: torch.Tensor
    """[D, W] block tables cut to the longest decode."""
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
        [row.request.slot for row in decodes],
        [row.start + 1 for row in decodes],
        [first_row[id(row)] + row.length - 1 for row in sampling],
        [row.request.slot for row in sampling],
        [index for index, row in enumerate(sampling) if row.suppress for _ in row.request.suppressed],
        [token for row in sampling if row.suppress for token in row.request.suppressed],
    ]
    uploaded = _upload(fields, block_tables.device)
    ids, positions, places, last_rows, last_slots, slots, lengths, sample_rows, sample_slots, masked, masked_ids = uploaded
    width = max((-(-(row.start + 1) // block_size) for row in decodes), default=0)
    return Batch(
        token_ids=ids, positions=positions, cache_rows=places, last_rows=last_rows, last_slots=last_slots,
        decode_tables=block_tables[slots, :width], decode_mask=length_mask(lengths, width * block_size, dtype), chunks=tuple(chunks),
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
