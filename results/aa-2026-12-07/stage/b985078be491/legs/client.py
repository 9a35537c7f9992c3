"""The one closed-loop client: the same code stamps every arm's tokens.

Exactly `concurrency` requests are in flight; the next is submitted the moment a finish is seen.  Prompts are ids prepared before the
clock starts, so no tokenizer, text or network lies inside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from legs.protocol import Trace


class Delta(NamedTuple):
    """New ids of one request.  `finish` is None while the request goes on, else the engine's reason (`length`, `stop`)."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nothing here uses
    ids: Sequence[int]
    finish: str | None


class Engine(Protocol):
    """What the client needs of an engine: hand in a request, advance, take what came out."""

    def submit(self, index: int, prompt: Sequence[int]) -> None: ...

    def step(self) -> Sequence[Delta]:
        """Advance and return what has arrived; may return nothing, must not spin without making progress."""
        ...


STALL_NS = 120_000_000_000
"""How long nothing may come out while requests are in flight: far above any step, so that a lost request ends the leg with its name."""


@dataclass
class _Open:
    scheduled_ns: int
    submitted_ns: int
    ids: list[int] = field(default_factory=list)
    stamps: list[tuple[int, int]] = field(default_factory=list)


class ClientError(RuntimeError):
    """The engine broke the contract of the loop: an unknown request, ids after a finish, a finish without ids, a lost request."""


def closed_loop(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    concurrency: int,
    on_progress: Callable[[int, int], None] | None = None,
    clock: Callable[[], int] = time.monotonic_ns,
) -> tuple[list[Trace], list[list[int]]]:
    """Run all `prompts` with `concurrency` in flight.

    Returns the traces and the output ids, both in prompt order; times are `clock`'s nanoseconds.  `on_progress(t_ns, ids so far)` is
    called after each step that brought something.  Raises :class:`ClientError` when the engine breaks the contract.
    """
    open_: dict[int, _Open] = {}
    traces: dict[int, Trace] = {}
    outputs: dict[int, list[int]] = {}
    following, total = 0, 0

    def submit(scheduled_ns: int) -> None:
        nonlocal following
        index, following = following, following + 1
        open_[index] = _Open(scheduled_ns, clock())
        engine.submit(index, prompts[index])

    start = heard = clock()
    for _ in range(min(concurrency, len(prompts))):
        submit(start)
    while open_:
        deltas = engine.step()
        now = clock()
        heard = now if deltas else heard
        if now - heard > STALL_NS:
            raise ClientError(f"nothing came out for {STALL_NS // 10**9} s; in flight: {', '.join(map(str, sorted(open_)))}")
        for index, ids, finish in deltas:
            if index not in open_:
                raise ClientError(f"request {index} brought ids but is not in flight")
            request = open_[index]
            if ids:
                request.ids.extend(ids)
                request.stamps.append((now, len(ids)))
                total += len(ids)
            if finish is None:
                continue
            if not request.ids:
                raise ClientError(f"request {index} finished ({finish}) without a single id")
            del open_[index]
            outputs[index] = request.ids
            traces[index] = Trace(
                index=index, prompt_tokens=len(prompts[index]), scheduled_ns=request.scheduled_ns,
                submitted_ns=request.submitted_ns, stamps=tuple(request.stamps), end_ns=now, finish=finish,
            )
            if following < len(prompts):
                submit(now)
        if deltas and on_progress is not None:
            on_progress(now, total)
    return [traces[i] for i in range(len(prompts))], [outputs[i] for i in range(len(prompts))]
