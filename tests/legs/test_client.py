"""The closed loop on engines that behave, and on engines that break the contract."""

from collections.abc import Sequence

import pytest

from legs.client import STALL_NS, ClientError, Delta, closed_loop

PROMPTS = [[1, 2, 3], [4, 5], [6], [7, 8], [9], [10, 11]]


class FakeEngine:
    """Gives each request in flight one id a step; request i gets `lengths[i]` ids.  Notes how many were in flight at each step."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths
        self.open: dict[int, int] = {}
        self.in_flight: list[int] = []
        self.order: list[int] = []

    def submit(self, index: int, prompt: Sequence[int]) -> None:
        assert list(prompt) == PROMPTS[index]
        self.order.append(index)
        self.open[index] = 0

    def step(self) -> list[Delta]:
        self.in_flight.append(len(self.open))
        deltas = []
        for index in list(self.open):
            self.open[index] += 1
            done = self.open[index] == self.lengths[index]
            deltas.append(Delta(index, [100 * index + self.open[index]], "length" if done else None))
            if done:
                del self.open[index]
        return deltas


class Clock:
    """A clock that advances by `tick` at each reading."""

    def __init__(self) -> None:
        self.now, self.tick = 0, 10

    def __call__(self) -> int:
        self.now += self.tick
        return self.now


def test_outputs_and_traces_come_in_prompt_order_whatever_finishes_first() -> None:
    lengths = [5, 1, 3, 2, 4, 1]
    traces, outputs = closed_loop(FakeEngine(lengths), PROMPTS, 3, clock=Clock())
    assert outputs == [[100 * i + k for k in range(1, n + 1)] for i, n in enumerate(lengths)]
    assert [trace.index for trace in traces] == list(range(6))
    assert [trace.prompt_tokens for trace in traces] == [3, 2, 1, 2, 1, 2]
    assert all(sum(n for _, n in trace.stamps) == len(ids) for trace, ids in zip(traces, outputs, strict=True))


@pytest.mark.parametrize("concurrency", [1, 3, 6, 9])
def test_exactly_concurrency_requests_are_in_flight_until_prompts_run_out(concurrency: int) -> None:
    engine = FakeEngine([4] * 6)
    closed_loop(engine, PROMPTS, concurrency)
    assert max(engine.in_flight) == min(concurrency, 6)
    full = [n for n in engine.in_flight if n == min(concurrency, 6)]
    assert engine.in_flight[: len(full)] == full, "in flight fell below the concurrency while prompts were left"
    assert engine.order == list(range(6))


def test_a_successor_is_scheduled_at_the_moment_the_finish_is_seen() -> None:
    traces, _ = closed_loop(FakeEngine([1] * 6), PROMPTS, 2, clock=Clock())
    assert [traces[i].scheduled_ns for i in (2, 3)] == [traces[0].end_ns, traces[1].end_ns]
    assert all(trace.scheduled_ns < trace.submitted_ns < trace.stamps[0][0] <= trace.end_ns for trace in traces)


class Breaking(FakeEngine):
    def __init__(self, fault: Delta | None) -> None:
        super().__init__([2] * 6)
        self.fault = fault

    def step(self) -> list[Delta]:
        deltas = super().step()
        return [delta for delta in deltas if delta.index != 0] if self.fault is None else [*deltas, self.fault]


@pytest.mark.parametrize(("fault", "says"), [
    (Delta(5, [1], None), "request 5 brought ids but is not in flight"),
    (Delta(77, [], "length"), "request 77"),
    (Delta(1, [], "stop"), "request 1"),
])
def test_faults_of_the_engine_stop_the_run_by_name(fault: Delta, says: str) -> None:
    with pytest.raises(ClientError, match=says):
        closed_loop(Breaking(fault), PROMPTS, 2 if fault.index != 1 else 1)


def test_a_finish_without_ids_is_an_error() -> None:
    class Empty(FakeEngine):
        def step(self) -> list[Delta]:
            return [Delta(next(iter(self.open)), [], "length")]

    with pytest.raises(ClientError, match="without a single id"):
        closed_loop(Empty([1] * 6), PROMPTS, 1)


@pytest.mark.timeout(10)
def test_a_lost_request_is_an_error_and_no_endless_loop() -> None:
    class Losing(FakeEngine):
        def step(self) -> list[Delta]:
            self.open.pop(0, None)
            return super().step()

    clock = Clock()
    clock.tick = STALL_NS // 3
    with pytest.raises(ClientError, match=r"in flight: 0$"):
        closed_loop(Losing([2] * 6), PROMPTS, 2, clock=clock)


def test_an_engine_without_delay_is_served_far_faster_than_any_engine_measured_here() -> None:
    """The client's own ceiling: with a null engine it must not be what a series measures."""
    import time

    class Null(FakeEngine):
        def submit(self, index: int, prompt: Sequence[int]) -> None:
            self.open[index] = 0

    count, length = 256, 64
    start = time.perf_counter()
    closed_loop(Null([length] * count), [[1]] * count, 32)
    per_token = (time.perf_counter() - start) / (count * length)
    assert per_token < 50e-6, f"{per_token * 1e6:.1f} us of client time a token"
