"""Each fault does what it says, tells how much of it there was, and leaves warm-ups and untimed phases alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from legs.client import Delta, closed_loop
from legs.drivers.inject import INJECT, STALL_TIMES, Injected
from legs.drivers.null import NullArm
from legs.protocol import FAULTS, PROTOCOL, LegRequest, ProtocolError, Trace

STEP = 1_000_000
REQUESTS, WARMUPS, IDS, AT_ONCE = 6, 2, 8, 2


class Clock:
    """Time that passes by looking at it, a microsecond a look, and by steps."""

    now = 0

    def __call__(self) -> int:
        self.now += 1000
        return self.now


class Slow(NullArm):
    """The null engine with ids that count and steps that last."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(IDS)
        self.clock = clock

    def step(self) -> Sequence[Delta]:
        self.clock.now += STEP
        return [delta._replace(ids=[2 * (IDS - self.left.get(delta.index, 0))]) for delta in super().step()]


def run(fault: Any, phase: str = "performance") -> tuple[Injected, list[Trace], list[list[int]], list[list[int]]]:
    """A whole leg's loop: warm-ups, then the measured requests; (arm, traces, ids, ids of the warm-ups)."""
    clock = Clock()
    request = LegRequest(
        protocol=PROTOCOL, leg="x", phase=phase, arm="a", driver="engine", corpus="c", corpus_sha256="0", requests=REQUESTS,
        warmup_requests=WARMUPS, max_tokens=IDS, min_tokens=IDS, ignore_eos=True, concurrency=AT_ONCE, client="step",
        options={INJECT: fault})
    arm = Injected(Slow(clock), request, clock)
    _, warm = closed_loop(arm, [[1]] * WARMUPS, AT_ONCE, clock=clock)
    assert arm.counters()["injected_ns"] == 0, "a warm-up sees a healthy arm"
    traces, ids = closed_loop(arm, [[1]] * REQUESTS, AT_ONCE, clock=clock)
    return arm, traces, ids, warm


def steps_of(traces: Sequence[Trace]) -> list[int]:
    """Lengths of the gaps between deltas, in steps."""
    times = [t for trace in traces for t, _ in trace.stamps]
    ordered = sorted(set(times))
    return [round((b - a) / STEP * 10) for a, b in pairwise(ordered)]


def healthy() -> list[list[int]]:
    return run({"leak_mib": 1}, phase="correctness")[2]


@pytest.mark.parametrize("share", [0.01, 0.03, 0.10, 0.5])
def test_a_busy_wait_is_that_share_of_the_time_and_is_counted(share: float) -> None:
    arm, traces, ids, _ = run({"busy": share})
    window = max(trace.stamps[-1][0] for trace in traces) - min(trace.submitted_ns for trace in traces)
    assert arm.counters()["injected_ns"] / window == pytest.approx(share, rel=0.12)
    assert ids == healthy()


def test_a_stall_is_one_long_step_of_each_wave_it_is_asked_for() -> None:
    arm, traces, ids, _ = run({"stall": 2})
    gaps = steps_of(traces)
    assert sum(gap > 20 for gap in gaps) == 2 and all(gap < 12 or gap == pytest.approx(10 * (1 + STALL_TIMES), abs=1) for gap in gaps)
    assert arm.counters()["injected_ns"] == pytest.approx(2 * STALL_TIMES * STEP, rel=0.02)
    assert ids == healthy()


def test_a_wrong_token_is_one_id_of_the_first_request() -> None:
    _, _, ids, warm = run({"token": 5})
    good = healthy()
    assert warm == good[:WARMUPS]
    assert [(i, k) for i in range(REQUESTS) for k in range(IDS) if ids[i][k] != good[i][k]] == [(0, 5)]


def test_copies_hand_every_id_over_twice() -> None:
    _, traces, ids, _ = run({"copies": 2})
    assert ids == [[token for token in one for _ in range(2)] for one in healthy()]
    assert sum(n for trace in traces for _, n in trace.stamps) == 2 * REQUESTS * IDS


def test_a_leak_is_written_and_kept() -> None:
    arm, _, ids, _ = run({"leak_mib": 6})
    assert [len(part) for part in arm.leaked] == [2**20] * REQUESTS and all(part[0] == part[-1] == 1 for part in arm.leaked)
    assert ids == healthy()


def test_a_killed_arm_dies_of_sigkill_amid_its_measured_requests() -> None:
    code = "from tests.legs.test_inject import run; run({'kill': %d})"
    done = [subprocess.run([sys.executable, "-c", code % n], check=False, cwd=os.getcwd()).returncode for n in (3, REQUESTS + 1)]
    assert done == [-signal.SIGKILL, 0]


@pytest.mark.parametrize("phase", ["correctness", "warmup"])
@pytest.mark.parametrize("fault", [{"busy": 0.1}, {"stall": 2}, {"token": 1}, {"copies": 2}, {"leak_mib": 6}, {"kill": 1}])
def test_what_is_not_timed_sees_a_healthy_arm(fault: dict[str, Any], phase: str) -> None:
    arm, _, ids, _ = run(fault, phase)
    assert (arm.counters()["injected_ns"], arm.leaked, ids) == (0, [], healthy())


def test_the_arm_says_its_fault_and_else_what_it_is() -> None:
    arm, *_ = run({"stall": 2})
    assert arm.resolved()[INJECT] == {"stall": 2} and arm.resolved()["depth"] == 1
    assert arm.who()["name"] == "null" and arm.device()["count"] == 0 and arm.pids() == [os.getpid()] and arm.counters()["preemptions"] == 0


@pytest.mark.parametrize("fault", [None, {}, "busy", {"busy": 0.1, "stall": 2}, {"speed": 2}])
def test_another_fault_is_refused(fault: Any) -> None:
    with pytest.raises(ProtocolError, match=f"one of {', '.join(FAULTS)}"):
        run(fault)
