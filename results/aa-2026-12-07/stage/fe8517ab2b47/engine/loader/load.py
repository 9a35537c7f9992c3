"""Checkpoint to parameters: one function, two ways.  Everything is checked against the headers before the first byte is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.errors import CheckpointError
from engine.kernels.devices import HOST
from engine.loader import direct, staged
from engine.loader.header import Entry, read_headers, stamp_of

FILE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class Parameter:
    """A parameter as the model holds it: checkpoint tensors of `sources` stacked along the first dimension (merged q, k, v; gate, up)."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[tuple[str, int], ...]
    """(tensor name, rows) in order."""
    dtype: torch.dtype | None = None
    """None: the model's."""


@dataclass(frozen=True)
class Piece:
    """One checkpoint tensor and the contiguous part of a parameter that it fills, of the same shape."""

    entry: Entry
    dtype: torch.dtype
    """The file's."""
    target: torch.Tensor


Note = Callable[[str], None]
"""Is told that a part of the work is done, by its name."""

WAYS: dict[str, Callable[[Sequence[Piece], Note], None]] = {"direct": direct.fill, "staged": staged.fill}


def silent(_: str) -> None:
    """Note nothing."""


def load(
    folder: Path, parameters: Sequence[Parameter], ignored: Callable[[str], bool], dtype: torch.dtype, way: str, device: str = HOST,
    note: Note = silent,
) -> dict[str, torch.Tensor]:
    """All `parameters` in `dtype` on `device`, by name, from the checkpoint in `folder`.

    `way` is direct (file bytes are read straight into the parameters, for a card through a few pinned buffers; the host never holds more
    than one copy, for a card none) or staged (the whole checkpoint is read on the host, then copied: one copy more).
    `ignored` tells tensors that may be there unused; `note` is told of `read` and `copied`.
    Raises :class:`CheckpointError` naming file and tensor before anything is allocated, or while reading; never a partial model.
    """
    entries = read_headers(folder)
    stamps = {entry.file: entry.stamp for entry in entries.values()}
    _check(folder, parameters, entries, ignored)
    made = {parameter.name: torch.empty(parameter.shape, dtype=parameter.dtype or dtype, device=device) for parameter in parameters}
    pieces = [piece for parameter in parameters for piece in _pieces(parameter, made[parameter.name], entries)]
    WAYS[way](pieces, note)
    for path, stamp in stamps.items():
        if not path.exists() or stamp_of(path) != stamp:
            raise CheckpointError(f"{path}: changed while it was read; load it again when nothing writes to it")
    return made


def _check(folder: Path, parameters: Sequence[Parameter], entries: dict[str, Entry], ignored: Callable[[str], bool]) -> None:
    known = set()
    for parameter in parameters:
        for name, rows in parameter.sources:
            known.add(name)
            if name not in entries:
                raise CheckpointError(f"{folder}: tensor {name} is missing; the checkpoint is incomplete")
            entry, shape = entries[name], (rows, *parameter.shape[1:])
            if entry.shape != shape:
                raise CheckpointError(f"{entry.file}: tensor {name} has shape {list(entry.shape)}, config.json asks for {list(shape)}")
            if entry.dtype not in FILE_DTYPES:
                raise CheckpointError(f"{entry.file}: tensor {name} has dtype {entry.dtype}; weights are {', '.join(FILE_DTYPES)}")
    for name, entry in entries.items():
        if name not in known and not ignored(name):
            raise CheckpointError(f"{entry.file}: tensor {name} is unknown to this architecture; the model built would not be this one")


def _pieces(parameter: Parameter, made: torch.Tensor, entries: dict[str, Entry]) -> Iterator[Piece]:
    start = 0
    for name, rows in parameter.sources:
        yield Piece(entries[name], FILE_DTYPES[entries[name].dtype], made[start : start + rows])
        start += rows
