"""What a person reads in a terminal after a series: each axis with its direction, its doubt and its verdict."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from harness.report.build import summarize_series
from harness.report.terminal import print_summary
from harness.report.text import NBSP, percent
from tests.harness.series_factory import make_series


def test_each_axis_tells_direction_doubt_and_verdict(tmp_path: Path) -> None:
    series = make_series(tmp_path / "series", step_us={"on": 800, "off": 1200, "pin": 1000})
    summary = summarize_series(series)
    sink = io.StringIO()
    print_summary(summary, series, Console(file=sink, width=200))
    rows = [line.replace(NBSP, " ") for line in sink.getvalue().splitlines()]
    for name, higher, axis in (("total throughput", True, "total_throughput"), ("TTFT, mean", False, "ttft_mean"),
                               ("TPOT, mean", False, "tpot_mean"), ("ITL, median", False, "itl_p50"), ("peak PSS", False, "peak_pss")):
        found = [line for line in rows if line.strip("┃│ ").startswith(f"{name} {'≥ 1' if higher else '≤ 1'}")]
        assert len(found) == 3, name
        for pair, line in zip(summary["pairs"], found, strict=True):
            told = pair["axes"][axis]
            word = told["verdict"] + (f" ({told['qualifier']})" if told["qualifier"] else "")
            assert f"{told['ratio']:.4f}" in line and percent(told["detectable"], 1).replace(NBSP, " ") in line and word in line
    assert any("TPOT, mean ≤ 1" in line and "FAIL" in line for line in rows), "off is slower than the pin"
