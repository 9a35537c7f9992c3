"""Faults put into an arm on purpose, so that a calibration can show that the instrument notices each (`parity calibrate`).

The fault lies around the engine, in the thread that steps it, and acts on measured requests of memory and performance legs only: the
correctness gate and the warm-ups see a healthy arm, as they would of a fault that shows only later.  How much was injected is counted by
the arm itself (`injected_ns` in its counters), so that the true size of a slowdown is known leg by leg.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from legs.client import Delta
from legs.protocol import FAULTS, LegRequest, ProtocolError

if TYPE_CHECKING:
    from legs.drivers.common import Arm

INJECT = "inject"
PHASES = ("memory", "performance")
STALL_TIMES = 1.5
"""How much longer a stalled step takes, in times of its own length: it shows among the slowest steps and hardly in their sum."""


class Injected:
    """An arm with one fault of :data:`legs.protocol.FAULTS`.

    - `busy` S: a busy wait after each step, S of the time of step and wait together;
    - `stall` N: in each of the first N waves of requests one step takes 1 + :data:`STALL_TIMES` times as long;
    - `token` P: the id at position P of the first request is another;
    - `copies` 2: every id is handed over twice, as by an arm that counts its tokens double;
    - `leak_mib` M: M MiB in all, a part with each request, are written and never freed;
    - `kill` N: the process kills itself (SIGKILL) at the end of the N-th request.

    Raises :class:`ProtocolError` for another fault.
    """

    def __init__(self, arm: Arm, request: LegRequest, clock: Callable[[], int] = time.monotonic_ns) -> None:
        fault = request.options[INJECT]
        if not isinstance(fault, dict) or len(fault) != 1 or not fault.keys() <= FAULTS.keys():
            raise ProtocolError(f"{INJECT} is {fault!r}; one of {', '.join(FAULTS)} with its size is needed")
        self.arm, self.request, self.clock = arm, request, clock
        (self.kind, self.size), = fault.items()
        self.submitted = self.finished = self.injected_ns = 0
        self.leaked: list[bytearray] = []
        self.seen: dict[int, int] = {}
        """Ids of each measured request so far."""

    def submit(self, index: int, prompt: Sequence[int]) -> None:
        self.submitted += 1
        if self._acts():
            self.seen[index] = 0
            if self.kind == "leak_mib":
                self.leaked.append(bytearray(b"\1") * (self.size * 2**20 // self.request.requests))
        self.arm.submit(index, prompt)

    def step(self) -> Sequence[Delta]:
        started = self.clock()
        deltas = self.arm.step()
        if not self._acts():
            return deltas
        spent = self.clock() - started
        before = dict(self.seen)
        for delta in deltas:
            self.seen[delta.index] += len(delta.ids)
            self.finished += delta.finish is not None
        if self.kind == "busy":
            self._wait(round(spent * self.size / (1 - self.size)))
        elif self.kind == "stall" and any(self._half_way(delta.index, before[delta.index]) for delta in deltas):
            self._wait(round(spent * STALL_TIMES))
        elif self.kind == "token":
            return [self._altered(delta, before[delta.index]) for delta in deltas]
        elif self.kind == "copies":
            return [delta._replace(ids=[token for token in delta.ids for _ in range(self.size)]) for delta in deltas]
        elif self.kind == "kill" and self.finished >= self.size:
            os.kill(os.getpid(), signal.SIGKILL)
        return deltas

    def resolved(self) -> dict[str, Any]:
        return {**self.arm.resolved(), INJECT: {self.kind: self.size}}

    def counters(self) -> dict[str, Any]:
        return {**self.arm.counters(), "injected_ns": self.injected_ns}

    def who(self) -> dict[str, Any]:
        return self.arm.who()

    def device(self) -> dict[str, Any]:
        return self.arm.device()

    def pids(self) -> list[int]:
        return self.arm.pids()

    def close(self) -> None:
        self.arm.close()

    def _acts(self) -> bool:
        """Whether a measured request has been handed in: warm-up prompts come first, and are awaited."""
        return self.request.phase in PHASES and self.submitted > self.request.warmup_requests

    def _half_way(self, index: int, before: int) -> bool:
        """The step in which the first request of one of the first waves came to half of its ids."""
        wave, first = divmod(index, self.request.concurrency)
        half = self.request.max_tokens // 2
        return first == 0 and wave < self.size and before < half <= self.seen[index]

    def _wait(self, ns: int) -> None:
        """Busily: a sleep would give the core to others, and its end would be the scheduler's choice."""
        started = self.clock()
        while (waited := self.clock() - started) < ns:
            pass
        self.injected_ns += waited

    def _altered(self, delta: Delta, before: int) -> Delta:
        at = self.size - before
        if delta.index != 0 or not 0 <= at < len(delta.ids):
            return delta
        return delta._replace(ids=[token ^ (place == at) for place, token in enumerate(delta.ids)])
