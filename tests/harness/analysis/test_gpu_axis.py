"""Peak GPU memory as an axis: from the sampler's rows to the verdict, void where a reading is missing, absent where no arm has a GPU."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.summary import summarize
from harness.evidence import layout
from harness.evidence.schema import load_series
from harness.report.markdown import render
from harness.report.text import NBSP
from legs import protocol
from tests.harness.series_factory import edit_json, make_series, reseal

GIB = 1 << 30


def on_a_gpu(path: Path, held: dict[str, int | None], unread: str | None = None, **changes: Any) -> dict[str, Any]:
    """The summary of a series on a GPU whose arms hold `held` bytes; the leg `unread` has one reading that is null."""
    series = make_series(path / "series", performance=2, memory=2, **changes)
    for file in series.glob(f"blocks/*/attempt-*/*/{protocol.RESULT}"):
        edit_json(file, lambda record: record["device"].update(kind="cuda", name="Fake H200"))
    for leg in series.glob("blocks/memory-*/attempt-*/*"):
        if leg.is_dir():
            rows = [json.loads(line) for line in gzip.decompress((leg / layout.MEMORY).read_bytes()).splitlines()]
            passes = [row for row in rows if row["kind"] == "pss"]
            for row in passes:
                row["processes"][0]["gpu"] = held[leg.name]
            if unread == f"{leg.parts[-3]}-{leg.name}":
                passes[3]["processes"][0]["gpu"] = None
            (leg / layout.MEMORY).write_bytes(protocol.to_gzip("".join(json.dumps(row) + "\n" for row in rows).encode()))
    reseal(series)
    return summarize(load_series(series))


def test_peak_gpu_memory_is_compared_block_by_block(tmp_path: Path) -> None:
    summary = on_a_gpu(tmp_path, {"on": 9 * GIB, "off": 9 * GIB, "pin": 12 * GIB})
    axis = summary["pairs"][0]["axes"]["peak_gpu"]
    assert axis["per_block"] == pytest.approx([0.75, 0.75])
    assert (axis["verdict"], axis["qualifier"], axis["higher_passes"]) == ("PASS", "SMALLER", False)
    page = render(summary).replace(NBSP, " ")
    assert "| peak GPU memory | 9,216.0 MiB | 9,216.0 MiB | 12,288.0 MiB |" in page and "| peak GPU memory ↓ | pin [pin] | 0.7500 |" in page


def test_check_16_unreadable_gpu_memory_voids_the_axis_and_no_other(tmp_path: Path) -> None:
    summary = on_a_gpu(tmp_path, {"on": 9 * GIB, "off": 9 * GIB, "pin": 12 * GIB}, unread="memory-2-pin")
    axes = summary["pairs"][0]["axes"]
    assert axes["peak_gpu"]["verdict"] == "VOID" and axes["peak_gpu"]["ratio"] is None
    assert axes["peak_gpu"]["reasons"] == ["peak_gpu: unreadable in block 2"]
    assert {axes[name]["verdict"] for name in axes if name != "peak_gpu"} == {"PASS"}
    assert summary["arms"]["pin"]["means"]["peak_gpu"] is None and summary["verdict"] == "PASS"


@pytest.mark.parametrize("held", [None, 0])
def test_check_16_a_gpu_whose_memory_no_pass_tells_is_void_not_zero(tmp_path: Path, held: int | None) -> None:
    summary = on_a_gpu(tmp_path, {"on": held, "off": 9 * GIB, "pin": 12 * GIB}, primary="peak_gpu")
    assert (summary["verdict"], summary["reasons"]) == ("VOID", ["peak_gpu: unreadable in block 1, 2"])


def test_without_a_gpu_there_is_no_such_axis(tmp_path: Path) -> None:
    summary = summarize(load_series(make_series(tmp_path / "series")))
    assert all("peak_gpu" not in pair["axes"] for pair in summary["pairs"]) and "peak GPU memory" not in render(summary)
    asked = summarize(load_series(make_series(tmp_path / "asked", primary="peak_gpu")))
    assert (asked["verdict"], asked["reasons"]) == ("VOID", ["peak_gpu: neither arm ran on a GPU"])
    assert render(asked).startswith("**VOID**")
