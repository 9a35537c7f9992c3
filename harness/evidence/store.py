"""The series directory as an append-only, sealed store.

`manifest.jsonl` holds one line per evidence file, in the order they were recorded: its path, SHA-256, size, and
`chain` = SHA-256 of (previous chain, path, sha256), the first previous chain being empty.  The last line, `sealed`, repeats the number
of files and the head of the chain, so that quoting the head quotes every byte of the series.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from harness.evidence.layout import DERIVED, MANIFEST


class BrokenSeal(Exception):
    """The evidence is not what was recorded; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class Manifest:
    """The lines of a manifest: `files` by path in recording order, the head of the chain, and whether it is sealed."""

    files: dict[str, dict[str, Any]]
    head: str
    sealed: bool


def create_series(path: Path) -> None:
    """Create the series directory, and its parents, exclusively.

    Raises FileExistsError naming what exists already: the directory itself, or a symbolic link or a file among the parents as given.
    """
    for parent in reversed(path.parents):
        if parent.is_symlink() or (parent.exists() and not parent.is_dir()):
            kind = "a symbolic link" if parent.is_symlink() else "not a directory"
            raise FileExistsError(errno.EEXIST, f"is {kind}; a series lies below plain directories, give the real path", str(parent))
        parent.mkdir(exist_ok=True)
    if path.exists() or path.is_symlink():
        raise FileExistsError(errno.EEXIST, "exists already; a series is written once, choose another --out or --resume it", str(path))
    path.mkdir()


def record(series: Path, relative: str | list[str]) -> None:
    """Append files of the series, named by their path inside it, to its manifest.

    Raises :class:`BrokenSeal` when a file is missing, no plain file, recorded already, derived, or when the series is sealed.
    """
    manifest = read_manifest(series)
    if manifest.sealed:
        raise BrokenSeal(f"{series.name}/{MANIFEST}: the series is sealed, nothing can be added")
    head, lines, seen = manifest.head, [], set(manifest.files)
    for name in [relative] if isinstance(relative, str) else relative:
        _check_name(name)
        if name in seen:
            raise BrokenSeal(f"{name}: recorded already; evidence is written once")
        digest, size = _digest(series, name)
        head = _link(head, name, digest)
        seen.add(name)
        lines.append({"path": name, "sha256": digest, "bytes": size, "chain": head})
    _append(series, lines)


def record_tree(series: Path, relative_folder: str) -> None:
    """Record every file below a folder of the series, in sorted order.  A symbolic link in it raises :class:`BrokenSeal`."""
    folder = series / relative_folder
    if not folder.is_dir() or folder.is_symlink():
        raise BrokenSeal(f"{relative_folder}: is not a folder of the series")
    record(series, sorted(_walk(series, folder)))


def unrecorded(series: Path) -> list[str]:
    """Names of evidence files that the manifest does not hold yet, sorted: what a crash left between writing and recording."""
    known = read_manifest(series).files
    return [name for name in _walk(series, series) if name not in known and name != MANIFEST]


def is_sealed(series: Path) -> bool:
    return read_manifest(series).sealed


def seal(series: Path) -> None:
    """Append the line that closes the manifest, after proving that every evidence file is recorded and unchanged."""
    check_seal(series, require_sealed=False)
    manifest = read_manifest(series)
    if manifest.sealed:
        raise BrokenSeal(f"{series.name}/{MANIFEST}: the series is sealed already")
    _append(series, [{"sealed": True, "files": len(manifest.files), "chain": manifest.head}])


def check_seal(series: Path, require_sealed: bool = True) -> None:
    """Prove that the series holds exactly what was recorded.

    Raises :class:`BrokenSeal` naming the first file that is changed, missing, a symbolic link, or not recorded; or the manifest line
    that breaks the chain; or, with `require_sealed`, that the series was never closed.
    """
    if not series.is_dir():
        raise BrokenSeal(f"{series}: there is no such series")
    manifest = read_manifest(series)
    if require_sealed and not manifest.sealed:
        raise BrokenSeal(f"{series.name}/{MANIFEST}: not sealed; the series did not end, --resume it")
    for name, entry in manifest.files.items():
        digest, size = _digest(series, name)
        if (digest, size) != (entry["sha256"], entry["bytes"]):
            raise BrokenSeal(f"{name}: changed since it was recorded (sha256 {digest[:12]}, {size} bytes; "
                             f"recorded {entry['sha256'][:12]}, {entry['bytes']} bytes)")
    if extra := unrecorded(series):
        raise BrokenSeal(f"{extra[0]}: is not in the manifest; evidence holds recorded files only")


def read_manifest(series: Path) -> Manifest:
    """Read the manifest and check its own chain; a series without one yet has an empty manifest."""
    path = series / MANIFEST
    if path.is_symlink():
        raise BrokenSeal(f"{MANIFEST}: is a symbolic link")
    if not path.exists():
        return Manifest({}, "", False)
    files: dict[str, dict[str, Any]] = {}
    head, sealed = "", False
    text = path.read_text(encoding="utf-8")
    if text and not text.endswith("\n"):
        raise BrokenSeal(f"{MANIFEST}: its last line is cut short")
    for number, line in enumerate(text.splitlines(), 1):
        entry = _parse(line, number)
        if sealed:
            raise BrokenSeal(f"{MANIFEST}: line {number} comes after the seal")
        if "sealed" in entry:
            if (entry["files"], entry["chain"]) != (len(files), head):
                raise BrokenSeal(f"{MANIFEST}: the seal on line {number} does not close the {len(files)} files before it")
            sealed = True
            continue
        head = _link(head, entry["path"], entry["sha256"])
        if entry["chain"] != head:
            raise BrokenSeal(f"{MANIFEST}: line {number} ({entry['path']}) breaks the chain")
        if entry["path"] in files:
            raise BrokenSeal(f"{MANIFEST}: line {number} records {entry['path']} a second time")
        files[entry["path"]] = entry
    return Manifest(files, head, sealed)


def _parse(line: str, number: int) -> dict[str, Any]:
    try:
        entry = json.loads(line)
        fields = {"sealed", "files", "chain"} if "sealed" in entry else {"path", "sha256", "bytes", "chain"}
        if entry.keys() != fields:
            raise ValueError(f"its fields are {', '.join(entry)}")
        if "path" in entry:
            _check_name(entry["path"])
    except (ValueError, TypeError, AttributeError) as error:
        raise BrokenSeal(f"{MANIFEST}: line {number} is not a manifest line: {error}") from None
    return dict(entry)


def _check_name(name: str) -> None:
    """Only plain relative names: what a manifest points at lies inside the series."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or str(PurePosixPath(name)) != name:
        raise BrokenSeal(f"{name!r}: is not a plain path inside the series")
    if parts[0] in DERIVED or name == MANIFEST:
        raise BrokenSeal(f"{name}: is derived from the evidence and cannot be part of it")


def _link(head: str, name: str, digest: str) -> str:
    return hashlib.sha256((head + name + digest).encode()).hexdigest()


def _digest(series: Path, name: str) -> tuple[str, int]:
    """SHA-256 and size of a file reached without following a symbolic link anywhere below the series."""
    path = series
    for part in PurePosixPath(name).parts:
        path = path / part
        if path.is_symlink():
            raise BrokenSeal(f"{name}: a symbolic link lies on its path; evidence is plain files")
    if not path.is_file():
        raise BrokenSeal(f"{name}: is missing")
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest(), os.fstat(source.fileno()).st_size


def _walk(series: Path, folder: Path) -> Iterator[str]:
    """Names of the files below a folder, derived ones left out."""
    for entry in sorted(folder.iterdir()):
        name = entry.relative_to(series).as_posix()
        if entry.parent == series and entry.name in DERIVED:
            continue
        if entry.is_symlink():
            raise BrokenSeal(f"{name}: is a symbolic link; evidence is plain files")
        if entry.is_dir():
            yield from _walk(series, entry)
        elif entry.is_file():
            yield name
        else:
            raise BrokenSeal(f"{name}: is neither a file nor a folder")


def _append(series: Path, lines: list[dict[str, Any]]) -> None:
    """One write, then fsync: a crash leaves whole lines or a cut last one, which reading refuses."""
    data = "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines).encode()
    descriptor = os.open(series / MANIFEST, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    with os.fdopen(descriptor, "wb") as sink:
        sink.write(data)
        sink.flush()
        os.fsync(sink.fileno())
