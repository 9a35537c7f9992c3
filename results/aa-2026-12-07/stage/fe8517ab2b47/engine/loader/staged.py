"""Staged loading: the whole checkpoint is read on the host, then copied into the parameters, then freed; kept to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from engine.loader.direct import Part, as_bytes, open_file, telling

if TYPE_CHECKING:
    from engine.loader.load import Piece


def fill(pieces: Sequence[Piece], note: Callable[[str], None]) -> None:
    """Stage all pieces on the host in the file's dtype and note `read`; copy each into its target and note `copied`."""
    ordered = sorted(pieces, key=lambda piece: (piece.entry.file, piece.entry.offset))
    stage = [(piece, torch.empty(piece.entry.shape, dtype=piece.dtype)) for piece in ordered]
    for path, group in groupby(stage, key=lambda staged: staged[0].entry.file):
        with closing(open_file(path)) as file:
            for piece, held in group:
                with telling(path, [Part(piece, 0, piece.entry.nbytes)]):
                    file.read_cached(piece.entry.offset, as_bytes(held))
    note("read")
    for piece, held in stage:
        piece.target.copy_(held)
    note("copied")
