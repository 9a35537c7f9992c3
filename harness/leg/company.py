"""A foreign process for a calibration: a busy loop of seconds in each performance leg's measured window, next to nothing at other times.

It must be nobody's child: what descends from the runner is the series' own.  So it is forked twice, and ends by itself when its runner
is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

NAME = "parity-company"
LOOK_S = 0.1
SPIN_S = 3.0
"""Once a leg: many times what voids one, and the leg still ends in its time."""
LONGEST_S = 3600.0
"""It never outlives this, whatever else goes wrong."""


@contextlib.contextmanager
def company(series: Path) -> Iterator[int]:
    """Its pid; it is beside the legs of `series`, which need not exist yet, until the block ends."""
    argv = [sys.executable, "-m", "harness.leg.company", str(series), str(os.getpid())]
    pid = int(subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True, timeout=30).stdout)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def measured_now(series: Path) -> set[Path]:
    """The folders of performance legs that are past their warm-up and not over."""
    return {marks.parent for marks in series.glob("blocks/performance-*/attempt-*/*/marks.jsonl")
            if not {"guard.json", "result.json"} & set(os.listdir(marks.parent)) and '"warm"' in marks.read_text()}


def main(series: Path, runner: int) -> None:
    """Be there until the runner is gone."""
    Path("/proc/self/comm").write_text(NAME)
    end = time.monotonic() + LONGEST_S
    met: set[Path] = set()
    while Path(f"/proc/{runner}").exists() and time.monotonic() < end:
        if new := measured_now(series) - met:
            met |= new
            spin = time.monotonic() + SPIN_S
            while time.monotonic() < spin:
                pass
        time.sleep(LOOK_S)


if __name__ == "__main__":
    if (child := os.fork()) > 0:
        print(child, flush=True)
        os._exit(0)
    os.setsid()
    with open(os.devnull, "r+b") as null:
        for descriptor in (0, 1, 2):
            os.dup2(null.fileno(), descriptor)
    main(Path(sys.argv[1]), int(sys.argv[2]))
