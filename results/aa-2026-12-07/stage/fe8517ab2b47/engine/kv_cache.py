"""Which KV blocks and which slots are whose.  Bookkeeping only: the tensors belong to the runner, and nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterable

NULL_BLOCK = 0
"""A block that is never handed out: padding in block tables points at it, so a padded read stays inside the cache."""


class BlockPool:
    """Free KV blocks of `block_size` tokens, handed out for a request's whole life at admission: no growth, no preemption."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def usable(self) -> int:
        return self.num_blocks - 1

    def needed(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def take(self, count: int) -> list[int]:
        """`count` blocks; the caller has checked `free`."""
        return [self._free.pop() for _ in range(count)]

    def give_back(self, blocks: Iterable[int]) -> None:
        self._free.extend(reversed(list(blocks)))


class SlotPool:
    """Rows of the device tables.  A request keeps its slot from admission to finish; slots never move."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))

    def take(self) -> int:
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        self._free.append(slot)
