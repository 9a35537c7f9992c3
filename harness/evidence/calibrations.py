"""Where calibrations lie, and what a series quotes of the newest one of its machine.

A calibration is a folder of sealed series (one a group of cases) and a sealed record of what they showed:

    NAME/<series>/              a series folder, as of any series
    NAME/record/calibration.json, manifest.jsonl
    NAME/calibration.md         the same for people; derived
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.analysis.calibration import SERIES, Evidence, judge_calibration
from harness.evidence import store
from harness.evidence.schema import EvidenceError
from harness.report.build import load_summary
from legs.protocol import to_json, write_atomic

RESULTS = "results"
RECORD, CALIBRATION, PAGE = "record", "calibration.json", "calibration.md"


def calibrations(results: Path) -> list[Path]:
    """The calibrations below `results` (folders `calibration*` with a record), by name."""
    return sorted(path.parents[1] for path in results.glob(f"calibration*/{RECORD}/{CALIBRATION}"))


def find_quote(results: Path, host: str) -> dict[str, Any] | None:
    """What the newest calibration of machine `host` says of its instrument; None when `results` has none.

    A machine is known by its hash, so a calibration counts for the boot it was made in.  Raises BrokenSeal for a record that is not what
    was sealed.
    """
    found = [(record, path) for path in calibrations(results) if (record := read(path))["machine"]["host"] == host]
    if not found:
        return None
    record, path = max(found, key=lambda pair: (pair[0]["started_utc"], pair[1].name))
    return {
        "record": path.name, "head": store.read_manifest(path / RECORD).head, **{name: record[name] for name in (
            "started_utc", "axis", "detectable", "blocks", "slowdowns", "ok")},
    }


def read(path: Path) -> dict[str, Any]:
    """The stored judgement of a calibration, its seal proven.  :func:`read_record` computes it again from the series."""
    store.check_seal(path / RECORD)
    record: dict[str, Any] = json.loads((path / RECORD / CALIBRATION).read_bytes())
    return record


def read_record(path: Path) -> dict[str, Any]:
    """The judgement of a complete calibration, computed again from its series.

    Raises BrokenSeal, and :class:`EvidenceError` when the record says otherwise than its evidence.
    """
    stored, found = read(path), _judge(path)
    if unlike := [name for name in sorted(stored.keys() | found.keys()) if stored.get(name) != found.get(name)]:
        raise EvidenceError(f"{path.name}/{RECORD}/{CALIBRATION}: field `{unlike[0]}` is not what its evidence gives")
    return found


def write_record(path: Path) -> None:
    """Judge the series of a calibration and seal what was found; a crash between leaves a record without a seal, which is refused."""
    found = to_json(_judge(path))
    store.create_series(path / RECORD)
    write_atomic(path / RECORD / CALIBRATION, found)
    store.record(path / RECORD, CALIBRATION)
    store.seal(path / RECORD)


def _judge(path: Path) -> dict[str, Any]:
    record = judge_calibration({name: Evidence(*load_summary(path / name)) for name in SERIES})
    return dict(json.loads(to_json(record)))  # as a reader of the file sees it
