"""A request's parameters and lasting state.  No torch: the scheduler and its tests run in microseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is decoded, under vLLM's names.  Lengths in tokens."""

    max_tokens: int = 16
    min_tokens: int = 0
    """End-of-sequence and stop ids cannot be chosen before this many ids were produced, even with `ignore_eos`."""
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    temperature: float = 0.0
    """Only 0 (greedy) is built."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "min_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise RequestError(f"{name} is {value!r}; it must be an integer")
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens is {self.max_tokens}; at least 1 is needed")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens}; it must lie in 0..max_tokens ({self.max_tokens})")
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos is {self.ignore_eos!r}; it must be true or false")
        if self.temperature != 0:
            raise RequestError(f"temperature is {self.temperature!r}; only 0 (greedy) is built")
        if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in self.stop_token_ids):
            raise RequestError(f"stop_token_ids is {self.stop_token_ids!r}; ids are integers of 0 or more")


class Request:
    """One request from arrival to finish.

    `computed` counts tokens whose keys and values are in the cache or will be once the steps in flight are done; `placeholders` counts
    sampled ids that have not come back from the device yet.  `slot` is its row in every device table from admission to finish.
    """

    __slots__ = ("blocks", "computed", "finish", "id", "outputs", "params", "placeholders", "prompt", "slot", "stopping", "suppressed")

    def __init__(self, request_id: str, prompt: Sequence[int], params: SamplingParams, eos_ids: Sequence[int] = ()) -> None:
        self.id = request_id
        self.prompt = tuple(prompt)
        self.params = params
        self.suppressed = tuple(sorted({*eos_ids, *params.stop_token_ids}))
        self.stopping = frozenset(params.stop_token_ids if params.ignore_eos else self.suppressed)
        self.computed = 0
        self.placeholders = 0
        self.outputs: list[int] = []
        self.slot = -1
        self.blocks: list[int] = []
        self.finish: str | None = None

    @property
    def produced(self) -> int:
        """Output ids so far, those still on the device included."""
        return len(self.outputs) + self.placeholders

    @property
    def wanted(self) -> int:
        """Tokens it could compute now: the rest of its prompt, one for a decode, none once its last id is on the way."""
        if self.produced >= self.params.max_tokens:
            return 0
        return len(self.prompt) + self.produced - self.computed

    @property
    def cached_tokens(self) -> int:
        """Tokens it will ever have in the cache: its last id is returned, never fed back."""
        return len(self.prompt) + self.params.max_tokens - 1

    def accept(self, token_id: int) -> None:
        """Take one id back from the device and decide whether it was the last, in vLLM's order: stop ids before length."""
        self.placeholders -= 1
        self.outputs.append(token_id)
        if token_id in self.stopping and len(self.outputs) >= self.params.min_tokens:
            self.finish = "stop"
        elif len(self.outputs) >= self.params.max_tokens:
            self.finish = "length"
