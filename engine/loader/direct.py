"""Direct loading: each tensor's bytes go from the file into the parameter's own memory; no mapping, no second copy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from engine.loader.header import read_into

if TYPE_CHECKING:
    from engine.loader.load import Piece

WINDOW = 16 << 20
"""Bytes held at a time where the file's dtype is not the parameter's."""


def fill(pieces: Sequence[Piece]) -> None:
    """Read every piece in file order into its target; a piece of another dtype passes through a window of 16 MiB."""
    ordered = sorted(pieces, key=lambda piece: (piece.entry.file, piece.entry.offset))
    for path, group in groupby(ordered, key=lambda piece: piece.entry.file):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for piece in group:
                _read(descriptor, piece)
        finally:
            os.close(descriptor)


def _read(descriptor: int, piece: Piece) -> None:
    if piece.dtype == piece.target.dtype:
        read_into(descriptor, as_bytes(piece.target), piece.entry.offset, piece.entry)
        return
    flat = piece.target.view(-1)
    window = WINDOW // piece.dtype.itemsize
    scratch = torch.empty(min(window, flat.numel()), dtype=piece.dtype)
    for start in range(0, flat.numel(), window):
        part = scratch[: min(window, flat.numel() - start)]
        read_into(descriptor, as_bytes(part), piece.entry.offset + start * piece.dtype.itemsize, piece.entry)
        flat[start : start + part.numel()].copy_(part)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous host tensor, writable."""
    return tensor.view(-1).view(torch.uint8).numpy().data
