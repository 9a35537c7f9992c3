"""Two pieces of work side by side on a card: one that waits for memory beside one that waits for arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

ON = True


def together(aside: Callable[[], None], here: Callable[[], None]) -> None:
    """Queue `aside` on a stream of its own and `here` on the current one; what is queued afterwards comes after both."""
    if not ON:
        aside()
        here()
        return
    current, other = torch.cuda.current_stream(), _other(torch.cuda.current_device())
    other.wait_stream(current)
    with torch.cuda.stream(other):
        aside()
    here()
    current.wait_stream(other)


@cache
def _other(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
