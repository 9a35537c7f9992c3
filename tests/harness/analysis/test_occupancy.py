"""Little's law against counting, and the published case in which a throughput ratio hid a latency ratio."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.analysis.metrics import window_seconds
from harness.analysis.occupancy import full_period, in_flight_over_time, mean_in_flight, mean_in_flight_over_time, occupancy
from legs.client import Delta, closed_loop
from legs.protocol import Trace


def run(lengths: list[int], concurrency: int, step_ns: int = 1000) -> list[Trace]:
    """Closed-loop traces of a made-up engine that brings one id a step for each request in flight."""

    class Engine:
        def __init__(self) -> None:
            self.now = 0
            self.left: dict[int, int] = {}

        def clock(self) -> int:
            self.now += 1
            return self.now

        def submit(self, index: int, prompt: object) -> None:
            self.left[index] = lengths[index]

        def step(self) -> list[Delta]:
            self.now += step_ns
            deltas = []
            for index in list(self.left):
                self.left[index] -= 1
                deltas.append(Delta(index, [1], None if self.left[index] else "length"))
                if not self.left[index]:
                    del self.left[index]
            return deltas

    engine = Engine()
    return closed_loop(engine, [[1, 2]] * len(lengths), concurrency, clock=engine.clock)[0]


def test_golden_mean_in_flight_of_the_published_series() -> None:
    """29 July of the source's series: mean TTFT + 127 mean TPOT, over W = (131,784 + 128 x 128) / total throughput (SOURCE check 9)."""
    for ttft_ms, tpot_ms, throughput, expected in ((729.963, 38.153, 6610.270, 31.84), (947.850, 33.923, 6628.651, 30.10)):
        window = (131_784 + 128 * 128) / throughput
        assert mean_in_flight(128, (ttft_ms + 127 * tpot_ms) / 1000, window) == pytest.approx(expected, abs=0.005)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(1, 6))
def test_littles_law_is_the_time_average_of_the_count(lengths: list[int], concurrency: int) -> None:
    traces = run(lengths, min(concurrency, len(lengths)))
    found = occupancy(traces, min(concurrency, len(lengths)))
    steps = in_flight_over_time(traces)
    area = sum(count * (later[0] - t) for (t, count), later in pairwise(steps))
    assert steps[-1][1] == 0
    assert math.isclose(found.mean_in_flight, area / 1e9 / window_seconds(traces), rel_tol=1e-9)
    assert found.mean_in_flight <= found.concurrency * (1 + 1e-9)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=20), st.integers(1, 6))
def test_the_three_shares_make_the_whole(lengths: list[int], concurrency: int) -> None:
    found = occupancy(run(lengths, min(concurrency, len(lengths))), min(concurrency, len(lengths)))
    assert found.ramp is not None and found.steady is not None and found.drain is not None
    assert math.isclose(found.ramp + found.steady + found.drain, 1, rel_tol=1e-9)
    assert min(found.ramp, found.steady, found.drain) >= 0


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(1, 6), st.integers(1, 40))
def test_the_binned_count_keeps_the_area_and_the_bounds(lengths: list[int], concurrency: int, bins: int) -> None:
    traces = run(lengths, min(concurrency, len(lengths)))
    found = mean_in_flight_over_time(traces, bins)
    assert len(found) == bins and found[0][0] == 0.0
    assert all(-1e-9 <= count <= concurrency + 1e-9 for _, count in found)
    assert math.isclose(sum(count for _, count in found) / bins, occupancy(traces, concurrency).mean_in_flight, rel_tol=1e-6)


def test_a_dip_of_a_moment_does_not_empty_a_bin_and_a_drain_does() -> None:
    found = [count for _, count in mean_in_flight_over_time(run([10, 2, 2, 2, 2], 2, step_ns=10**6), 10)]
    assert found[:8] == pytest.approx([2.0] * 8, abs=0.01) and found[8:] == pytest.approx([1.0] * 2, abs=0.01)


def test_the_drain_begins_when_a_slot_is_last_given_up() -> None:
    traces = run([10, 2, 2, 2, 2], 2)  # one long request beside four short ones: its tail runs alone
    full = full_period(traces, 2)
    assert full is not None
    assert full[1] == traces[4].stamps[-1][0]
    found = occupancy(traces, 2)
    assert found.drain == pytest.approx(2 / 10, abs=0.01)
    assert found.mean_in_flight == pytest.approx(1.8, abs=0.02)


def test_a_remainder_of_a_wave_is_drain() -> None:
    found = occupancy(run([5] * 6, 4), 4)  # four, then two: the second wave never fills the four slots
    assert found.drain == pytest.approx(0.5, abs=0.01)


def test_steady_throughput_leaves_out_the_tail() -> None:
    traces = run([10, 2, 2, 2, 2], 2, step_ns=10**6)
    found = occupancy(traces, 2)
    # 8 full steps of 1 ms bring 16 ids, and all five prompts of 2 ids.
    assert found.steady_throughput == pytest.approx((16 + 10) / 0.008, rel=1e-3)


def test_the_steady_window_is_open_at_its_start_and_closed_at_its_end() -> None:
    ms = 10**6
    a = Trace(index=0, prompt_tokens=7, scheduled_ns=0, submitted_ns=0, stamps=((ms, 1), (3 * ms, 1), (6 * ms, 1)), end_ns=6 * ms,
              finish="length")
    b = Trace(index=1, prompt_tokens=10, scheduled_ns=0, submitted_ns=3 * ms, stamps=((4 * ms, 1), (8 * ms, 1)), end_ns=8 * ms,
              finish="length")
    assert full_period([a, b], 2) == (3 * ms, 6 * ms)
    assert occupancy([a, b], 2).steady_throughput == pytest.approx((1 + 1 + 10) / 0.003)  # a's id at 6 ms, b's at 4 ms with its prompt


def test_a_run_that_was_never_full_has_no_steady_window() -> None:
    found = occupancy(run([3, 3], 2), 4)
    assert (found.ramp, found.drain, found.steady, found.steady_throughput) == (None, None, None, None)
    assert found.mean_in_flight > 1.9
