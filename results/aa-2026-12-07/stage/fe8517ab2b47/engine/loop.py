"""The loop over scheduler and runner, synchronous (depth 1) or one step ahead (depth 2), with the same four acts: schedule, launch,
collect, update.

At depth 2 step t+1 is launched before the ids of step t are read: the runner takes its decode inputs from a table on the device.  The
order of the acts is that of vLLM 0.26.0's engine core (`step_with_batch_queue`), so compositions agree step by step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from engine.request import Request
from engine.scheduler import Scheduler, Step


class Runner(Protocol):
    """The device side: `launch` may return before the step has run, `collect` waits for its ids."""

    def launch(self, step: Step) -> Any: ...

    def collect(self, launched: Any) -> Sequence[int]:
        """One id per sampling row of the step, in row order."""
        ...


class StepOutput(NamedTuple):
    """What one request got in one step.  `finish_reason` is None while it goes on, else `length` or `stop`."""

    request_id: str
    token_ids: list[int]
    finish_reason: str | None


class Loop:
    """Drives `runner` through what `scheduler` decides with up to `depth` steps in flight, and counts steps."""

    def __init__(self, scheduler: Scheduler, runner: Runner, depth: int) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.depth = depth
        self.steps = 0
        self.mixed_steps = 0
        self._in_flight: deque[tuple[Step, Any]] = deque()

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_requests or bool(self._in_flight)

    def step(self) -> list[StepOutput]:
        """Launch one step and, once `depth` are in flight, take back the oldest.  Returns nothing while the pipeline fills."""
        if self.scheduler.has_requests:
            self._launch(self.scheduler.schedule())
        if len(self._in_flight) >= self.depth or not self.scheduler.has_requests:
            return self._collect()
        return []

    def _launch(self, step: Step) -> None:
        launched = None
        if step.rows:
            launched = self.runner.launch(step)
            self.steps += 1
            self.mixed_steps += step.is_mixed
        self._in_flight.append((step, launched))

    def _collect(self) -> list[StepOutput]:
        if not self._in_flight:
            return []
        step, launched = self._in_flight.popleft()
        if not step.rows:
            return []
        touched: list[Request] = self.scheduler.update(step, self.runner.collect(launched))
        return [StepOutput(request.id, request.outputs[-1:], request.finish) for request in touched]
