"""Staged loading: the whole checkpoint is read on the host, then copied into the parameters, then freed; kept to compare with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine.loader.direct import as_bytes
from engine.loader.header import read_into

if TYPE_CHECKING:
    from engine.loader.load import Piece


def fill(pieces: Sequence[Piece]) -> None:
    """Stage all pieces on the host in the file's dtype, then copy each into its target."""
    stage = [_stage(piece) for piece in pieces]
    for piece, held in zip(pieces, stage, strict=True):
        piece.target.copy_(held)


def _stage(piece: Piece) -> torch.Tensor:
    held = torch.empty(piece.entry.shape, dtype=piece.dtype)
    descriptor = os.open(piece.entry.file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        read_into(descriptor, as_bytes(held), piece.entry.offset, piece.entry)
    finally:
        os.close(descriptor)
    return held
