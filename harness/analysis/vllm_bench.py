"""TTFT, TPOT, ITL and E2E of a leg as `vllm bench serve` would print them from the same stamps, beside our own definitions.

Restated from vLLM's benchmarks/serve.py (`calculate_metrics`) and benchmarks/lib/endpoint_request_func.py: a chunk is a delta; E2E ends at
the last chunk; TPOT is (E2E - TTFT) / (N - 1) of requests with N > 1; ITL pools the gaps between chunks, however many ids each brought;
standard deviations are numpy's (n, not n - 1) and percentiles have no sample floor.  A test holds it against that code itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from legs.protocol import Trace


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """One metric in milliseconds."""

    mean: float
    median: float
    std: float
    p99: float


def vllm_bench(traces: Sequence[Trace]) -> dict[str, BenchRow | None]:
    """`ttft`, `tpot`, `itl` and `e2el` of a leg of at least one request; None where no request has any (vLLM itself prints 0 there)."""
    stamps = [[t for t, _ in trace.stamps] for trace in traces]
    ttft = [(times[0] - trace.submitted_ns) / 1e9 for trace, times in zip(traces, stamps, strict=True)]
    e2el = [(times[-1] - trace.submitted_ns) / 1e9 for trace, times in zip(traces, stamps, strict=True)]
    ids = [sum(n for _, n in trace.stamps) for trace in traces]
    tpot = [(end - first) / (n - 1) for first, end, n in zip(ttft, e2el, ids, strict=True) if n > 1]
    itl = [(b - a) / 1e9 for times in stamps for a, b in pairwise(times)]
    return {"ttft": _row(ttft), "tpot": _row(tpot), "itl": _row(itl), "e2el": _row(e2el)}


def _row(seconds: Sequence[float]) -> BenchRow | None:
    if not seconds:
        return None
    values = np.asarray(seconds, dtype=np.float64) * 1000
    mean, median, std = float(values.mean()), float(np.median(values)), float(values.std())
    return BenchRow(mean=mean, median=median, std=std, p99=float(np.percentile(values, 99)))
