"""`parity ab`: a series of one build and one difference.  The rule is checked before anything runs; the run is that of any series."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from harness.analysis.ab import why_no_ab
from harness.series.runner import prepare, run_series
from harness.strict import SpecError


def check_ab(root: Path, spec: Path) -> None:
    """Raise :class:`SpecError` naming the field unless the spec is an A/B: two arms of one build that differ in at most one option."""
    plan = prepare(root, spec).plan
    if reasons := why_no_ab(plan):
        field, _, text = reasons[0].removeprefix("field `").partition("`: ")
        raise SpecError(spec.name, field, [arm["name"] for arm in plan["arms"]], text + "; run it with `parity run-series`")


def run_ab(
    root: Path, spec: Path, out: Path, resume: bool, lock_path: Path, lock_timeout_s: float | None, console: Console
) -> dict[str, Any]:
    """Carry an A/B out into `out` and return its summary; as `run_series`, but a spec that is none is refused before the lock is taken."""
    check_ab(root, spec)
    return run_series(root, spec, out, resume, lock_path, lock_timeout_s, console)
