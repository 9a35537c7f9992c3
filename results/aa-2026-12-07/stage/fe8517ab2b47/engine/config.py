"""Engine options, checked and resolved before anything is built.  No torch."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import ConfigError
from engine.kernels.devices import DEVICES, HOST

LOADS = ("direct", "staged")
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options under vLLM's names where the meaning is the same; lengths in tokens.  None lets the engine resolve it (`resolve`)."""

    dtype: str | None = None
    device: str = HOST
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 32
    max_model_len: int | None = None
    block_size: int | None = None
    """Tokens a KV block: 16 on the host, 32 on a card unless given."""
    num_blocks: int | None = None
    """KV blocks, the null block included."""
    depth: int | None = None
    """Steps in flight: 1 synchronous, 2 one step ahead."""
    enforce_eager: bool | None = None
    """Whether each step is launched kernel by kernel; otherwise decode steps are graphs, which only a card has."""
    threads: int | None = None
    load: str = "direct"

    def __post_init__(self) -> None:
        for name, least in (("max_num_batched_tokens", 1), ("max_num_seqs", 1), ("max_model_len", 2), ("block_size", 1),
                            ("num_blocks", 2), ("depth", 1), ("threads", 1)):
            value = getattr(self, name)
            if value is None and name in ("max_model_len", "block_size", "num_blocks", "depth", "threads"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name} is {value!r}; it must be an integer of at least {least}")
        _check("device", self.device, DEVICES)
        _check("depth", self.depth, (None, 1, 2))
        _check("load", self.load, LOADS)
        _check("dtype", self.dtype, (None, *DTYPES))
        if self.enforce_eager is not None and not isinstance(self.enforce_eager, bool):
            raise ConfigError(f"enforce_eager is {self.enforce_eager!r}; it must be true or false")
        if self.enforce_eager is False and self.device == HOST:
            raise ConfigError(f"enforce_eager is False; device {HOST} has no graphs")


def _check(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; built are {', '.join(str(one) for one in allowed if one is not None)}")
