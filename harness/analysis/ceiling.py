"""How fast the client itself could go, from a leg against a null engine, and whether an arm came too near to that.  Pure.

The client runs in the arm's own process, between two of the engine's steps; so its work is part of every arm's window.  Against an engine
that answers at once the whole window is the client's, and an arm's rate over that ceiling is the share of its window that the client took.
That share pulls a ratio of two arms towards 1, and so towards a parity that is the client's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.analysis.metrics import leg_metrics, window_seconds
from legs.protocol import Trace

CLIENT_BOUND = 0.10
"""Largest share of the client's ceiling at which an arm's rate still counts as the engine's."""


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """What the client reaches when the engine takes no time.  The null engine's own few instructions count as the client's: the ceiling
    is rather too low than too high."""

    requests_per_s: float
    deltas_per_s: float
    seconds_per_delta: float
    """Window over deltas: the latency that each delta adds to all that come after it in its step."""
    tpot: float | None
    """TPOT, token-weighted, at the concurrency of the leg: what the client adds to an arm's."""


@dataclass(frozen=True, kw_only=True)
class ClientShare:
    """An arm's rates over the ceiling; `share` is the larger of the two, `bound` whether it is above :data:`CLIENT_BOUND`."""

    requests_per_s: float
    deltas_per_s: float
    share: float
    bound: bool


def client_ceiling(traces: Sequence[Trace]) -> Ceiling:
    """The ceiling, from the traces of a leg against the null engine over the workload of the arms (at least one request)."""
    window, deltas = window_seconds(traces), sum(len(trace.stamps) for trace in traces)
    return Ceiling(
        requests_per_s=len(traces) / window, deltas_per_s=deltas / window, seconds_per_delta=window / deltas,
        tpot=leg_metrics(traces).tpot_by_token,
    )


def client_share(traces: Sequence[Trace], ceiling: Ceiling) -> ClientShare:
    """How near one leg of an arm came to `ceiling`.

    An arm that bundles ids brings fewer deltas for a request; its share by requests is then too high, never too low.
    """
    window = window_seconds(traces)
    requests, deltas = len(traces) / window, sum(len(trace.stamps) for trace in traces) / window
    share = max(requests / ceiling.requests_per_s, deltas / ceiling.deltas_per_s)
    return ClientShare(requests_per_s=requests, deltas_per_s=deltas, share=share, bound=share > CLIENT_BOUND)
