"""The table of a report that a user of `vllm bench serve` can lay beside its output."""

from __future__ import annotations

from typing import Any

from harness.report.text import NONE, arms_in_order, folded, number, table

NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}


def vllm_bench_section(summary: dict[str, Any]) -> list[str]:
    """A folded table: a row for each metric of each performance leg; nothing without one."""
    rows = [
        [leg["leg"], title, *(number(leg["vllm_bench"][name][key], 3) if leg["vllm_bench"][name] else NONE
                              for key in ("mean", "median", "std", "p99"))]
        for _, arm in arms_in_order(summary) for leg in arm["performance"] for name, title in NAMES.items()
    ]
    if not rows:
        return []
    note = ("From our stamps by the arithmetic of `vllm bench serve`: ITL is the gap between deltas, not the time per id, and P99 has no "
            "sample floor. No verdict is taken on these.")
    return folded("The same latencies as <code>vllm bench serve</code> defines them",
                  [note, "", *table(["leg", "metric", "mean ms", "median ms", "std ms", "P99 ms"], rows, text=2)])
