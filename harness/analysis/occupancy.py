"""How full the engine was kept: mean in flight by Little's law, and throughput where ramp and drain cannot blur it.

A run of few waves ends in a tail in which slots stand empty.  An arm whose requests end together loses less there than one whose requests
end one by one, at equal speed; so a whole-run throughput ratio is read beside the occupancy of both arms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.analysis.metrics import window_seconds
from legs.protocol import Trace


@dataclass(frozen=True, kw_only=True)
class Occupancy:
    """Occupancy of one leg.

    The steady window runs from the moment `concurrency` requests are first in flight to the moment they last are.  `ramp` and `drain` are
    the shares of the whole window before and after it.  `steady_throughput` counts, inside it, each id where its delta was stamped and each
    prompt where its first id was, in tokens per second; None when the run was never full or the window has no length.
    """

    mean_in_flight: float
    concurrency: int
    ramp: float | None
    drain: float | None
    steady: float | None
    steady_throughput: float | None


def mean_in_flight(requests: int, mean_e2e: float, window: float) -> float:
    """Little's law, L = λ W: arrival rate (requests per second of window) times mean time in the system, in seconds."""
    return requests * mean_e2e / window


def occupancy(traces: Sequence[Trace], concurrency: int) -> Occupancy:
    """Occupancy of a leg that was run with `concurrency` requests in flight."""
    window = window_seconds(traces)
    mean_e2e = sum(trace.stamps[-1][0] - trace.submitted_ns for trace in traces) / len(traces) / 1e9
    in_flight = mean_in_flight(len(traces), mean_e2e, window)
    full = full_period(traces, concurrency)
    if full is None or full[1] <= full[0]:
        return Occupancy(mean_in_flight=in_flight, concurrency=concurrency, ramp=None, drain=None, steady=None, steady_throughput=None)
    start, end = full
    first, last = min(trace.submitted_ns for trace in traces), max(trace.stamps[-1][0] for trace in traces)
    tokens = sum(
        n + (trace.prompt_tokens if number == 0 else 0)
        for trace in traces for number, (t, n) in enumerate(trace.stamps) if start < t <= end
    )
    return Occupancy(
        mean_in_flight=in_flight, concurrency=concurrency, ramp=(start - first) / 1e9 / window, drain=(last - end) / 1e9 / window,
        steady=(end - start) / 1e9 / window, steady_throughput=tokens / ((end - start) / 1e9),
    )


def full_period(traces: Sequence[Trace], concurrency: int) -> tuple[int, int] | None:
    """When `concurrency` requests were first, and last, in flight (ns); None when they never were."""
    start = end = None
    for before, now, t in _steps(traces):
        if now >= concurrency and start is None:
            start = t
        if before >= concurrency > now:
            end = t
    return None if start is None or end is None else (start, end)


def in_flight_over_time(traces: Sequence[Trace]) -> list[tuple[int, int]]:
    """(t_ns, requests in flight from then on), oldest first."""
    return [(t, now) for _, now, t in _steps(traces)]


def mean_in_flight_over_time(traces: Sequence[Trace], bins: int) -> list[tuple[float, float]]:
    """(seconds since the first submission, mean in flight over the bin that begins there) of `bins` equal parts of the window."""
    steps = in_flight_over_time(traces)
    times = np.array([t - steps[0][0] for t, _ in steps], dtype=np.float64) / 1e9
    area = np.concatenate([[0.0], np.cumsum(np.diff(times) * [count for _, count in steps[:-1]])])
    edges = np.linspace(0.0, times[-1], bins + 1)
    means = np.diff(np.interp(edges, times, area)) / np.diff(edges)
    return list(zip(edges[:-1].tolist(), means.tolist(), strict=True))


def _steps(traces: Sequence[Trace]) -> list[tuple[int, int, int]]:
    """Each change as (in flight before, after, t_ns); of changes at one instant, the ends come first."""
    changes = sorted([(trace.submitted_ns, 1) for trace in traces] + [(trace.stamps[-1][0], -1) for trace in traces])
    steps, count = [], 0
    for t, change in changes:
        steps.append((count, count + change, t))
        count += change
    return steps
