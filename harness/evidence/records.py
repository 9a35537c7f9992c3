"""What is said of a series after it was sealed: results/records.jsonl, which only ever grows.

A line is one record: `void` (its numbers no longer count) or `correction` (something said of it was wrong), the series it is about by name
and manifest head, the reason, and the number of the record it supersedes, null for the first about a series.  `chain` is SHA-256 of
(previous chain, the line without it), so an edited or removed line breaks every later one; that none was cut off at the end is for
:func:`check_grown` to tell, against an earlier state of the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from harness.evidence.schema import EvidenceError
from harness.evidence.store import check_seal, read_manifest

RECORDS = "records.jsonl"
KINDS = ("void", "correction")


@dataclass(frozen=True, kw_only=True)
class Record:
    number: int
    kind: str
    series: str
    manifest_head: str
    reason: str
    supersedes: int | None
    recorded_utc: str


def read_records(results: Path) -> list[Record]:
    """All records, oldest first; none without a file.  Raises :class:`EvidenceError` naming the line that does not hold."""
    path = results / RECORDS
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    if text and not text.endswith("\n"):
        raise EvidenceError(f"{RECORDS}: its last line is cut short")
    records: list[Record] = []
    chain = ""
    for number, line in enumerate(text.splitlines(), 1):
        try:
            entry = json.loads(line)
            found = entry.pop("chain")
            record = Record(**entry)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise EvidenceError(f"{RECORDS}: line {number} is no record: {error}") from None
        chain = _chain(chain, record)
        if found != chain:
            raise EvidenceError(f"{RECORDS}: line {number} breaks the chain: it, or a line before it, was changed or removed")
        _check(record, records)
        records.append(record)
    return records


def add_record(results: Path, kind: str, series: str, reason: str, supersedes: int | None = None) -> Record:
    """Append a record about a sealed series below `results`.

    Raises :class:`EvidenceError` for an unknown kind, no reason, or when `supersedes` is not the record that stands for the series;
    BrokenSeal when the series is not there as it was sealed.
    """
    records = read_records(results)
    if Path(series).name != series:
        raise EvidenceError(f"{RECORDS}: field `series` is {series!r}: the name of a folder of results/ is needed")
    check_seal(results / series)
    record = Record(number=len(records) + 1, kind=kind, series=series, manifest_head=read_manifest(results / series).head, reason=reason,
                    supersedes=supersedes, recorded_utc=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
    _check(record, records)
    chain = ""
    for one in (*records, record):
        chain = _chain(chain, one)
    line = json.dumps({**asdict(record), "chain": chain}, sort_keys=True) + "\n"
    descriptor = os.open(results / RECORDS, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    with os.fdopen(descriptor, "wb") as sink:
        sink.write(line.encode())
        os.fsync(sink.fileno())
    return record


def standing(records: list[Record]) -> dict[str, Record]:
    """The newest record of each series that has one."""
    return {record.series: record for record in records}


def check_grown(before: str, now: str) -> None:
    """Raise :class:`EvidenceError` unless `now`, the text of the file, is `before` with lines added at its end."""
    old, new = before.splitlines(), now.splitlines()
    for number, line in enumerate(old, 1):
        if number > len(new):
            raise EvidenceError(f"{RECORDS}: line {number} was removed; records are only added, put it back and add a correction")
        if new[number - 1] != line:
            raise EvidenceError(f"{RECORDS}: line {number} was changed; records are only added, restore it and add a correction")


def committed_records(root: Path, base: str) -> str:
    """The file as it was in commit `base` of the checkout at `root`; empty when that commit had none."""
    git = ["git", "--no-optional-locks", "-C", str(root)]
    known = subprocess.run([*git, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{base}^{{commit}}"], check=False,
                           capture_output=True, text=True)
    if known.returncode != 0:
        raise EvidenceError(f"--base {base}: git knows no such commit here")
    commit = known.stdout.strip()
    listed = subprocess.run([*git, "ls-tree", "--name-only", commit, f"results/{RECORDS}"], check=True, capture_output=True, text=True)
    if not listed.stdout.strip():
        return ""
    return subprocess.run([*git, "show", f"{commit}:results/{RECORDS}"], check=True, capture_output=True, text=True).stdout


def _check(record: Record, before: list[Record]) -> None:
    def need(good: bool, field: str, advice: str) -> None:
        if not good:
            raise EvidenceError(f"{RECORDS}: record {record.number}: field `{field}` is {getattr(record, field)!r}: {advice}")

    last = standing(before).get(record.series)
    need(record.number == len(before) + 1, "number", f"{len(before) + 1} comes next")
    need(record.kind in KINDS, "kind", f"one of {', '.join(KINDS)}")
    need(isinstance(record.reason, str) and bool(record.reason.strip()), "reason", "say why")
    need(record.supersedes == (last.number if last else None), "supersedes",
         f"record {last.number} stands for {record.series}; name it" if last else f"no record stands for {record.series}; leave it out")
    need(last is None or last.manifest_head == record.manifest_head, "manifest_head", "a series keeps its seal")


def _chain(chain: str, record: Record) -> str:
    return hashlib.sha256((chain + json.dumps(asdict(record), sort_keys=True)).encode()).hexdigest()
