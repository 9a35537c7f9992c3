"""`parity calibrate`: real legs of our own engine with known faults, through the runner, gates, lock and evidence of any series."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.analysis.calibration import SERIES
from harness.evidence import store
from harness.evidence.calibrations import PAGE, RECORD, read_record, write_record
from harness.leg.company import company
from harness.report.calibration import page
from harness.series.runner import Refused, prepare, run_series

SPECS = "legs/calibration"


def calibrate(root: Path, out: Path, resume: bool, lock_path: Path, lock_timeout_s: float | None, console: Console) -> dict[str, Any]:
    """Run every series of a calibration into `out` that is not there yet, and return the record; one that is complete is read again.

    Raises as `run_series` does; what was interrupted or refused goes on with `resume`.
    """
    specs = {name: root / SPECS / f"{name}.toml" for name in SERIES}
    for spec in specs.values():
        prepare(root, spec)
    if out.exists() != resume:
        problem = "exists already; choose another --out, or --resume it" if out.exists() else "there is no calibration to resume"
        raise Refused(f"{out}: {problem}")
    for number, (name, spec) in enumerate(specs.items(), 1):
        series = out / name
        if series.exists() and store.is_sealed(series):
            continue
        console.print(f"calibration, series {number} of {len(specs)}: {name}", markup=False, highlight=False)
        with company(series) if name == "foreign" else contextlib.nullcontext():
            run_series(root, spec, series, series.exists(), lock_path, lock_timeout_s, console, calibration=True)
    if not (out / RECORD).exists():
        write_record(out)
    record = read_record(out)
    (out / PAGE).write_text(page(record), encoding="utf-8")
    return record
