"""The foreign process of a calibration: nobody's child, busy while a leg is measured and only then, gone at the end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.analysis.calibration import COMPANY
from harness.leg.company import NAME, company, measured_now
from harness.machine.host import process_times
from harness.machine.load import own_tree


def ticks(pid: int) -> int:
    found = process_times(pid)
    assert found is not None
    return found.cpu_ticks


def wait_until(holds: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def leg(series: Path, phase: str = "performance", last: str = "warm") -> Path:
    folder = series / "blocks" / f"{phase}-1" / "attempt-1" / "a"
    folder.mkdir(parents=True)
    (folder / "marks.jsonl").write_text(f'{{"mark": "ready", "t_ns": 1}}\n{{"mark": "{last}", "t_ns": 2}}\n')
    return folder


def test_it_is_foreign_and_busy_while_a_leg_is_measured(tmp_path: Path) -> None:
    with company(tmp_path / "out") as pid:
        wait_until(lambda: (process_times(pid) or (0, ""))[1] == NAME)
        before = process_times(pid)
        assert before is not None and before.parent != os.getpid()
        assert pid not in own_tree({pid: before}, {os.getpid()}) and ticks(pid) < 30
        leg(tmp_path / "out")
        wait_until(lambda: ticks(pid) > before.cpu_ticks + 20)
        wait_until(lambda: (process_times(pid) or (0,) * 3)[2] == "S")
        quiet = ticks(pid)
        assert 200 < quiet - before.cpu_ticks < 340, "seconds of it, once a leg"
        time.sleep(0.5)
        assert ticks(pid) - quiet < 10
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or (process_times(pid) or (0,) * 3)[2] == "Z")


def test_it_ends_with_its_runner(tmp_path: Path) -> None:
    code = ("import os, sys; from pathlib import Path; from harness.leg.company import company\n"
            "with company(Path(sys.argv[1])) as pid: print(pid, flush=True); os._exit(0)")
    pid = int(subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True).stdout)
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or (process_times(pid) or (0,) * 3)[2] == "Z")


@pytest.mark.parametrize(("phase", "last", "file", "busy"), [
    ("performance", "warm", None, True), ("performance", "ready", None, False), ("memory", "warm", None, False),
    ("performance", "warm", "result.json", False), ("performance", "warm", "guard.json", False),
])
def test_what_counts_as_measured(tmp_path: Path, phase: str, last: str, file: str | None, busy: bool) -> None:
    folder = leg(tmp_path, phase, last)
    if file:
        (folder / file).touch()
    assert measured_now(tmp_path) == ({folder} if busy else set())


def test_the_judgement_knows_it_by_its_name() -> None:
    assert NAME == COMPANY and len(NAME) <= 15, "the kernel cuts a name at 15 characters"
