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
from harness.report.build import load_summary
from harness.report.calibration import page
from harness.series.runner import Refused, prepare, run_series
from harness.verdict import Exit

SPECS = "legs/calibration"
FOREIGN = "foreign"
"""The series that runs in company, and is void because of it."""


class CalibrationVoid(Exception):
    """The conditions of a series were broken, and not by the calibration: nothing can be said; the message says why."""


def calibrate(root: Path, out: Path, resume: bool, lock_path: Path, lock_timeout_s: float | None, console: Console) -> dict[str, Any]:
    """Run every series of a calibration into `out` that is not there yet, and return the record; one that is complete is read again.

    Raises as `run_series` does, and :class:`CalibrationVoid`.  What was interrupted, refused or void goes on with `resume`; a void series
    is kept beside the one that is run instead.
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
            if not _why_void(series):
                continue
            _set_aside(series)
        console.print(f"calibration, series {number} of {len(specs)}: {name}", markup=False, highlight=False)
        with company(series) if name == FOREIGN else contextlib.nullcontext():
            run_series(root, spec, series, series.exists(), lock_path, lock_timeout_s, console, calibration=True)
        if why := _why_void(series):
            raise CalibrationVoid(f"{name}: {'; '.join(why)}; go on with `--resume`")
    if not (out / RECORD).exists():
        write_record(out)
    record = read_record(out)
    (out / PAGE).write_text(page(record), encoding="utf-8")
    return record


def _why_void(series: Path) -> list[str]:
    """Why a sealed series says nothing of the instrument; empty for one that does."""
    summary = load_summary(series)[1]
    return list(summary["reasons"]) if summary["exit_code"] == Exit.VOID and series.name != FOREIGN else []


def _set_aside(series: Path) -> None:
    number = 1
    while (kept := series.with_name(f"{series.name}-void-{number}")).exists():
        number += 1
    series.rename(kept)
