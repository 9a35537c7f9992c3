"""`parity nightly CONFIG`: a list of series, one after the other, and one page about them.

Contention is never a regression: a series that ran in company, or did not run because of it, says nothing, and is shown so.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.series.runner import Refused, prepare, run_series
from harness.strict import SpecError, build, read_toml
from harness.verdict import Exit

SCHEMA = 1
WORST = (Exit.PASS, Exit.INCONCLUSIVE, Exit.VOID, Exit.REFUSED, Exit.FAIL, Exit.ERROR)
"""From best to worst: what is known to be wrong is worse than what is not known."""


@dataclass(frozen=True, kw_only=True)
class Nightly:
    """A nightly as a person writes it; `series` are spec files, relative to the root of the repository."""

    schema: int
    title: str
    series: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Night:
    """What one series of a nightly came to: its exit code, and its summary, or why there is none."""

    name: str
    code: Exit
    summary: dict[str, Any] | None
    refused: str | None = None


def load_nightly(root: Path, path: Path) -> Nightly:
    """Read a nightly and every spec it names.  Raises :class:`SpecError` naming file, field, value and cure."""
    config = build(Nightly, read_toml(path), path.name)
    if config.schema != SCHEMA:
        raise SpecError(path.name, "schema", config.schema, f"this version reads schema {SCHEMA}")
    if not config.series:
        raise SpecError(path.name, "series", [], "at least one spec")
    names = [Path(one).stem for one in config.series]
    for number, (one, name) in enumerate(zip(config.series, names, strict=True)):
        if names.index(name) != number:
            raise SpecError(path.name, f"series[{number}]", one, "a file of this name is listed already; both would write one folder")
        if not (root / one).is_file():
            raise SpecError(path.name, f"series[{number}]", one, "there is no such file below the root of the repository")
        if prepare(root, root / one).spec.calibration:
            raise SpecError(path.name, f"series[{number}]", one, "is a series of a calibration; `parity calibrate` runs it")
    return config


def run_nightly(
    root: Path, config: Nightly, out: Path, lock_path: Path, lock_timeout_s: float | None, console: Console
) -> list[Night]:
    """Run every series into a folder of its own below `out`; one that is refused does not keep the next from running."""
    if out.exists():
        raise Refused(f"{out}: exists already; choose another --out")
    nights = []
    for number, one in enumerate(config.series, 1):
        name = Path(one).stem
        console.print(f"nightly, series {number} of {len(config.series)}: {name}", markup=False, highlight=False)
        try:
            summary = run_series(root, root / one, out / name, False, lock_path, lock_timeout_s, console)
        except Refused as refused:
            nights.append(Night(name=name, code=Exit.REFUSED, summary=None, refused=str(refused)))
        else:
            nights.append(Night(name=name, code=code_of(summary), summary=summary))
    return nights


def code_of(summary: dict[str, Any]) -> Exit:
    """The exit code of a series in a nightly: its own, but VOID for a contended one that is not broken, because it says nothing."""
    code = Exit(summary["exit_code"])
    return Exit.VOID if summary["contention"]["contended"] and code != Exit.ERROR else code


def worst(nights: list[Night]) -> Exit:
    """The exit code of the nightly."""
    return max((night.code for night in nights), key=WORST.index)
