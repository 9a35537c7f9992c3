"""The devices that are built, and what the engine asks of one besides its kernels.  Importing this loads no torch."""

from __future__ import annotations

import ctypes
import gc

from engine.errors import ConfigError

HOST, CARD = "cpu", "cuda"
DEVICES = (HOST, CARD)
BLOCK_SIZES = {HOST: 16, CARD: 32}
"""Tokens a KV block when not given: vLLM's 16, and on a card what its attention kernels read at a time."""
HOST_CACHE_BYTES = 4 << 30
CARD_CACHE_SHARE = 0.5
"""Largest KV cache taken when the number of blocks is not given: bytes on the host, a share of the free memory on a card."""


def require(device: str) -> None:
    """Raise :class:`ConfigError` when `device` cannot be used here."""
    import torch

    if device == CARD and not torch.cuda.is_available():
        raise ConfigError(f"device is {device!r}; torch {torch.__version__} finds no such device here")


def wake(device: str) -> None:
    """Have the device's context, which its first use would make."""
    import torch

    if device == CARD:
        torch.cuda.synchronize()


def return_freed() -> None:
    """Give memory of the host that a start has used and freed back to the system, where the C library can (glibc's malloc_trim)."""
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def cache_bytes(device: str) -> int:
    """Bytes that a KV cache of unstated size may take."""
    import torch

    return HOST_CACHE_BYTES if device == HOST else int(CARD_CACHE_SHARE * torch.cuda.mem_get_info()[0])


def card_name() -> str:
    """The card's name as its driver has it."""
    import torch

    return str(torch.cuda.get_device_name())
