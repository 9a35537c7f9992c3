"""Host to device through pinned memory, without a race: an asynchronous copy reads its source when the device gets to it, which may be
long after the host has gone on to the next step.  So no buffer is filled again before an event says that its last copy was read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class PinnedRing:
    """`depth` pinned buffers of at least `size` bytes, lent in turn.

    With more buffers than steps in flight the wait for a buffer's last copy is over before it begins; with fewer it is slow, never wrong.
    """

    def __init__(self, depth: int, size: int) -> None:
        self._buffers = [_pinned(size) for _ in range(depth)]
        self._read = [torch.cuda.Event() for _ in range(depth)]
        self._next = 0

    @contextmanager
    def lend(self, size: int) -> Iterator[torch.Tensor]:
        """A buffer of `size` bytes (uint8), to be filled and sent on the current stream inside the `with` block."""
        turn = self._next
        self._next = (turn + 1) % len(self._buffers)
        self._read[turn].synchronize()
        if self._buffers[turn].numel() < size:
            self._buffers[turn] = _pinned(2 * size)
        yield self._buffers[turn][:size]
        self._read[turn].record()


def _pinned(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
