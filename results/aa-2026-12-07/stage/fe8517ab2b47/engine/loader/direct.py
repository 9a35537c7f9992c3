"""Direct loading: each tensor's bytes go from the file into the parameter's own memory; no mapping of a file, no second copy.

The tensors of a checkpoint fall into chunks of neighbours, which several threads read in file order.  Where the parameters lie on the
host and have the file's dtype, the bytes are read to where they belong.  Everything else goes through a ring of a few buffers, each of
which takes one chunk, from past the page cache or out of it (files.py), and is sent piece by piece to the parameters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from engine.errors import CheckpointError
from engine.kernels import transfer
from engine.kernels.devices import HOST
from engine.kernels.transfer import Carrier, Copy, SendRing
from engine.loader.files import SLACK, EndedError, File

if TYPE_CHECKING:
    from engine.loader.load import Piece

READERS = 8
"""Threads that read.  One copies about 7 GB/s out of the page cache where a card takes 53 (one H200 machine); storage needs fewer."""
WINDOW = 8 << 20
"""Bytes of a chunk at most: storage is near its best from here on, and the host's share of a copy to the card small."""
BUFFERS = 10
"""Of WINDOW each, 80 MiB in all, which count as memory of the engine while it loads: one a reader, two on their way to the card."""


class Part(NamedTuple):
    """Bytes [begin, end) of a tensor."""

    piece: Piece
    begin: int
    end: int


class Chunk(NamedTuple):
    """Neighbouring parts of one file's tensors, from byte `begin` of the file to `end`; all are read to where they belong, or none is."""

    path: Path
    begin: int
    end: int
    straight: bool
    parts: list[Part]


def fill(
    pieces: Sequence[Piece], note: Callable[[str], None], carrier: Callable[[torch.device], Carrier] = transfer.carrier,
) -> None:
    """Read every piece into its target, and note `read` and, when all have arrived, `copied`.

    Raises :class:`CheckpointError` naming file and tensor; by then no thread reads and no copy is under way any more.
    """
    todo = list(chunks(pieces, WINDOW))
    with ExitStack() as held:
        files = {path: held.enter_context(closing(open_file(path))) for path in sorted({chunk.path for chunk in todo})}
        ring = None
        if device := next((piece.target.device for chunk in todo if not chunk.straight for piece, *_ in chunk.parts), None):
            ring = SendRing(carrier(device), BUFFERS, WINDOW + SLACK)
            held.callback(ring.close)
        _share_out(todo, partial(_load, files, ring), READERS)
        note("read")
    note("copied")


def chunks(pieces: Sequence[Piece], window: int) -> Iterator[Chunk]:
    """The pieces in file order, cut and gathered into chunks of at most `window` bytes; a value is never cut."""
    now: Chunk | None = None
    for piece in sorted(pieces, key=lambda piece: (piece.entry.file, piece.entry.offset)):
        entry, straight = piece.entry, piece.target.device.type == HOST and piece.target.dtype == piece.dtype
        begin = 0
        while begin < entry.nbytes:
            at = entry.offset + begin
            room = window if now is None else window - (now.end - now.begin)
            room -= room % piece.dtype.itemsize
            if now is not None and (not room or now.path != entry.file or now.end != at or now.straight != straight):
                yield now
                now = None
                continue
            end = min(entry.nbytes, begin + room)
            before = now or Chunk(entry.file, at, at, straight, [])
            now = before._replace(end=entry.offset + end, parts=[*before.parts, Part(piece, begin, end)])
            begin = end
    if now is not None:
        yield now


def _share_out(todo: Sequence[Chunk], load: Callable[[Chunk], None], readers: int) -> None:
    """Have `readers` threads take chunks in order until none is left; after one has failed no further chunk is begun."""
    left = deque(todo)

    def take() -> None:
        try:
            while (chunk := _next(left)) is not None:
                load(chunk)
        except BaseException:
            left.clear()
            raise

    pool = ThreadPoolExecutor(readers, thread_name_prefix="weights")
    try:
        for done in [pool.submit(take) for _ in range(readers)]:
            done.result()
    finally:
        left.clear()
        pool.shutdown()


def _next(left: deque[Chunk]) -> Chunk | None:
    try:
        return left.popleft()
    except IndexError:
        return None


def _load(files: dict[Path, File], ring: SendRing | None, chunk: Chunk) -> None:
    file = files[chunk.path]
    if ring is None or chunk.straight:
        for part in chunk.parts:
            with telling(chunk.path, [part]):
                file.read_cached(part.piece.entry.offset + part.begin, as_bytes(part.piece.target)[part.begin : part.end])
        return
    with ring.lend() as (buffer, copies):
        with telling(chunk.path, chunk.parts):
            at = file.read(chunk.begin, chunk.end, as_bytes(buffer)) - chunk.begin
        for piece, begin, end in chunk.parts:
            first = at + piece.entry.offset
            values = slice(begin // piece.dtype.itemsize, end // piece.dtype.itemsize)
            copies.append(Copy(piece.target.view(-1)[values], buffer[first + begin : first + end], piece.dtype))


def open_file(path: Path) -> File:
    """Open a file for reading.  Raises :class:`CheckpointError`."""
    with telling(path, []):
        return File(path)


@contextmanager
def telling(path: Path, parts: Sequence[Part]) -> Iterator[None]:
    """Turn what goes wrong while `parts` are read into a :class:`CheckpointError` that names the file and, if any, the tensor."""
    try:
        yield
    except EndedError as error:
        short = next(piece.entry.name for piece, _, end in parts if error.at < piece.entry.offset + end)
        raise CheckpointError(f"{path}: ended at byte {error.at}, before tensor {short} does; the file shrank while it was read") from None
    except OSError as error:
        names = f", at tensor {parts[0].piece.entry.name}" if parts else ""
        raise CheckpointError(f"{path}: cannot be read{names} ({error.strerror})") from None


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous host tensor, writable."""
    return tensor.view(-1).view(torch.uint8).numpy().data
