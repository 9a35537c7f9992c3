"""Host to device through pinned memory, without a race: an asynchronous copy reads its source when the device gets to it, which may be
long after the host has gone on.  So no buffer is filled again before an event says that its last copy was read."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import torch

from engine.kernels.devices import CARD


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


class Copy(NamedTuple):
    """Bytes on the host, `source` (uint8), that are values of `dtype`, and the flat tensor of as many values that they belong into."""

    target: torch.Tensor
    source: torch.Tensor
    dtype: torch.dtype


class Carrier(Protocol):
    """Brings bytes from host memory of its own to a device, in the order in which they are sent."""

    def buffers(self, count: int, size: int) -> list[torch.Tensor]:
        """`count` page-aligned buffers of `size` bytes (uint8) for `send` to read from."""
        ...

    def send(self, copies: Sequence[Copy]) -> Callable[[], None]:
        """Start `copies`; what is returned waits until their sources were read and their targets are written.  For any thread."""
        ...

    def close(self) -> None:
        """Wait for all that was sent and give the buffers' memory back."""
        ...


class HostCarrier:
    """The device is the host itself: a copy has happened when `send` returns."""

    def buffers(self, count: int, size: int) -> list[torch.Tensor]:
        return list(_anonymous(count * size).split(size))

    def send(self, copies: Sequence[Copy]) -> Callable[[], None]:
        for copy in copies:
            same = copy.dtype == copy.target.dtype
            # A copy of the source is aligned as its dtype needs it; a file's bytes may lie anywhere.
            (_bytes(copy.target) if same else copy.target).copy_(copy.source if same else copy.source.clone().view(copy.dtype))
        return _nothing

    def close(self) -> None:
        """There is nothing under way."""


class CardCarrier:
    """Copies to `device` on a stream of their own, from memory that is pinned by registration.

    torch's own pinned memory comes in powers of two and is kept for reuse, which would count as memory of the engine for good; a mapping
    that is registered is as large as it says and goes when it is closed.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        # The targets' memory may be in use by what was queued before it was allocated.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._areas: list[torch.Tensor] = []

    def buffers(self, count: int, size: int) -> list[torch.Tensor]:
        area = _anonymous(count * size)
        _succeeded("cudaHostRegister", torch.cuda.cudart().cudaHostRegister(area.data_ptr(), area.numel(), 0))
        self._areas.append(area)
        return list(area.split(size))

    def send(self, copies: Sequence[Copy]) -> Callable[[], None]:
        with torch.cuda.stream(self._stream):
            for copy in copies:
                if copy.dtype == copy.target.dtype:
                    _bytes(copy.target).copy_(copy.source, non_blocking=True)
                else:
                    copy.target.copy_(copy.source.to(copy.target.device, non_blocking=True).view(copy.dtype))
            done = torch.cuda.Event()
            done.record()
        return done.synchronize

    def close(self) -> None:
        self._stream.synchronize()
        for area in self._areas:
            _succeeded("cudaHostUnregister", torch.cuda.cudart().cudaHostUnregister(area.data_ptr()))
        self._areas.clear()


class SendRing:
    """A carrier's buffers for several threads: each takes one, fills it, sends from it; it is lent again when its copies are complete."""

    def __init__(self, carrier: Carrier, count: int, size: int) -> None:
        self._carrier = carrier
        self._free: SimpleQueue[tuple[torch.Tensor, Callable[[], None]]] = SimpleQueue()
        for buffer in carrier.buffers(count, size):
            self._free.put((buffer, _nothing))

    @contextmanager
    def lend(self) -> Iterator[tuple[torch.Tensor, list[Copy]]]:
        """A buffer, and the list for the copies out of it that are to be sent when the `with` block ends."""
        buffer, sent = self._free.get()
        copies: list[Copy] = []
        try:
            sent()
            yield buffer, copies
            sent = self._carrier.send(copies)
        finally:
            self._free.put((buffer, sent))

    def close(self) -> None:
        self._carrier.close()


def carrier(device: torch.device) -> Carrier:
    """The carrier to `device`."""
    return CardCarrier(device) if device.type == CARD else HostCarrier()


def _succeeded(call: str, code: int) -> None:
    if int(code):
        raise RuntimeError(f"{call} ended with error {int(code)}")


def _anonymous(size: int) -> torch.Tensor:
    """Page-aligned memory [size] uint8 that goes back to the system with its last reference."""
    return torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _nothing() -> None:
    """What there is to wait for when nothing was sent."""
