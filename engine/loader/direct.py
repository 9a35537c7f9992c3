"""Direct loading: each tensor's bytes go from the file into the parameter's own memory; no mapping, no second copy.

A card's memory is reached through a ring of pinned windows: while one is copied, the next is read from the file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from engine.kernels.devices import HOST
from engine.kernels.transfer import PinnedRing
from engine.loader.header import read_into

if TYPE_CHECKING:
    from engine.loader.load import Piece

WINDOW = 16 << 20
"""Bytes held at a time where the file's dtype is not the parameter's, and of each pinned window."""
WINDOWS = 4


def fill(pieces: Sequence[Piece]) -> None:
    """Read every piece in file order into its target; a piece of another dtype passes through a window of 16 MiB."""
    ordered = sorted(pieces, key=lambda piece: (piece.entry.file, piece.entry.offset))
    on_host = all(piece.target.device.type == HOST for piece in pieces)
    ring = None if on_host else PinnedRing(WINDOWS, WINDOW)
    for path, group in groupby(ordered, key=lambda piece: piece.entry.file):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for piece in group:
                if ring is None:
                    _read(descriptor, piece)
                else:
                    _send(descriptor, piece, ring)
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


def _send(descriptor: int, piece: Piece, ring: PinnedRing) -> None:
    """Read `piece` window by window and have each copied, in the file's dtype; the device converts."""
    flat, itemsize = piece.target.view(-1), piece.dtype.itemsize
    window = WINDOW // itemsize
    for start in range(0, flat.numel(), window):
        target = flat[start : start + window]
        with ring.lend(target.numel() * itemsize) as held:
            read_into(descriptor, as_bytes(held), piece.entry.offset + start * itemsize, piece.entry)
            target.copy_(held.view(piece.dtype).to(target.device, non_blocking=True))


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous host tensor, writable."""
    return tensor.view(-1).view(torch.uint8).numpy().data
