"""What a running performance leg costs the measured machine: the runner's own loop and its watcher, on real processes."""

from __future__ import annotations

import json
import os
import sys
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from rich.console import Console

from harness.leg.telemetry_summary import OWN_SHARE_MAX, summarise_telemetry
from harness.machine.idle_rule import IdleLimits
from harness.machine.lock import SeriesLock
from harness.series.arms import Launch
from harness.series.leg import LegPlace, _supervise
from harness.series.progress import Progress

ARM = """
import json, time
with open("marks.jsonl", "a", buffering=1) as marks:
    mark = lambda name, **more: marks.write(json.dumps({"mark": name, "t_ns": time.monotonic_ns(), **more}) + "\\n")
    mark("warm"), mark("first_submit")
    for second in range(1, 41):
        time.sleep(0.25)
        mark("progress", tokens=1000 * second, finished=second)
    mark("last_token")
"""


def test_runner_and_watcher_use_under_two_per_cent_of_a_core_over_ten_seconds(tmp_path: Path) -> None:
    """With the live line that a person at a terminal sees, which is dearer than plain lines."""
    progress = Progress(Console(file=StringIO(), force_terminal=True), 1)
    progress.leg("performance-1-on", "performance-on")
    lock = SeriesLock(tmp_path / "series.lock", "test")
    lock.acquire(1)
    shared = SimpleNamespace(own_roots={os.getpid()}, lock=lock, plan={"leg_timeout_s": 60.0}, progress=progress)
    place = LegPlace(name="performance-1-on", phase="performance", repetition=1, attempt=1, order=0, arm="on")
    command = Launch(argv=[sys.executable, "-c", ARM], shown=[], environment={}, oracle_environment=None)
    try:
        rows = _supervise(cast(Any, shared), place, tmp_path, command, tmp_path)
    finally:
        progress.stop()
        lock.release()
    assert rows is not None and rows[-1]["wall_s"] > 10
    marks = [json.loads(line) for line in (tmp_path / "marks.jsonl").read_text().splitlines()]
    summary, _, notes = summarise_telemetry(rows, marks, vars(IdleLimits()))
    assert summary["samples"] >= 3 and summary["cpu"]["window_s"] > 10
    assert 0 < summary["own_cpu_share"] < OWN_SHARE_MAX == 0.02
    assert notes == []
