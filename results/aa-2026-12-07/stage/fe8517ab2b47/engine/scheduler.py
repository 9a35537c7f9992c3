"""What runs in the next step: vLLM 0.26.0's rule (v1/core/sched/scheduler.py, async_scheduler.py), without its preemption.

Per step, a budget of tokens goes first to running requests in the order they were admitted, then to waiting ones first come first
served; a prompt that does not fit is cut (chunked prefill).  Counts advance when a step is scheduled, not when it has run, so the same
code serves a synchronous loop and one that schedules a step ahead: an id that is still on the device is a placeholder.

One difference from vLLM: KV blocks for prompt and max_tokens are reserved at admission.  So nothing is ever preempted, and when blocks
are short a request waits where vLLM would admit it and might preempt another.  With enough blocks both schedule the same steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from engine.kv_cache import BlockPool, SlotPool
from engine.request import Request


class Row(NamedTuple):
    """A request's share of a step: tokens `start` to `start + length` of prompt and outputs."""

    request: Request
    start: int
    length: int
    samples: bool
    """Whether it ends with an id: false for a prompt cut before its end."""
    suppress: bool
    """Whether the request's stop ids cannot be chosen: fewer than min_tokens were produced."""

    @property
    def is_prefill(self) -> bool:
        return self.start < len(self.request.prompt)


class Step(NamedTuple):
    """One step, in the order it was scheduled.  `admitted` lists the requests that got slot and blocks in it."""

    rows: tuple[Row, ...]
    admitted: tuple[Request, ...]

    @property
    def tokens(self) -> int:
        return sum(row.length for row in self.rows)

    @property
    def is_mixed(self) -> bool:
        """Whether it computes any prompt token."""
        return any(row.is_prefill for row in self.rows)


class Scheduler:
    """Decides steps and takes their ids back.  Token budget and request limit as vLLM's options of the same names."""

    def __init__(self, max_num_batched_tokens: int, max_num_seqs: int, blocks: BlockPool) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.blocks = blocks
        self.slots = SlotPool(max_num_seqs)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    @property
    def has_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> Step:
        """The next step; empty when every running request only waits for ids that are on the way."""
        budget = self.max_num_batched_tokens
        rows: list[Row] = []
        for request in self.running:
            count = min(request.wanted, budget)
            if count:
                rows.append(_advance(request, count))
                budget -= count
        admitted: list[Request] = []
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            needed = self.blocks.needed(request.cached_tokens)
            if needed > self.blocks.free:
                break
            self.waiting.popleft()
            request.slot = self.slots.take()
            request.blocks = self.blocks.take(needed)
            self.running.append(request)
            admitted.append(request)
            count = min(request.wanted, budget)
            rows.append(_advance(request, count))
            budget -= count
        return Step(tuple(rows), tuple(admitted))

    def update(self, step: Step, ids: Sequence[int]) -> list[Request]:
        """Take the ids of `step`'s sampling rows, in row order.  Returns the requests that got one.

        A request that stopped while this step was in flight has finished already: its id here is the one too many, and is dropped.
        """
        sampled = [row.request for row in step.rows if row.samples]
        touched = []
        for request, token_id in zip(sampled, ids, strict=True):
            if request.finish is None:
                request.accept(token_id)
                touched.append(request)
                if request.finish is not None:
                    self._release(request)
        return touched

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        self.slots.give_back(request.slot)
        self.blocks.give_back(request.blocks)


def _advance(request: Request, count: int) -> Row:
    start = request.computed
    request.computed += count
    samples = request.computed == len(request.prompt) + request.produced
    suppress = samples and request.produced < request.params.min_tokens and bool(request.suppressed)
    if samples:
        request.placeholders += 1
    return Row(request, start, count, samples, suppress)
