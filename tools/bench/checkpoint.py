"""A checkpoint folder's identity: checkpoint.json lists each file with its size and SHA-256, and one hash stands for the listing."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from legs.protocol import sha256, to_json

MODELS = ".models"
"""Folder of all checkpoints, relative to the repository; each lies in a folder named as the series' `[model] name`."""

IDENTITY = "checkpoint.json"


class CheckpointError(RuntimeError):
    """A checkpoint that is not what it should be; the message names the folder, both hashes and what to do."""


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def identify(folder: Path, name: str) -> dict[str, Any]:
    """The content of checkpoint.json for `folder`: name, files [{path, bytes, sha256}] sorted by path, and `sha256` of that listing."""
    files = [
        {"path": path.name, "bytes": path.stat().st_size, "sha256": file_sha256(path)}
        for path in sorted(folder.iterdir()) if path.name != IDENTITY
    ]
    return {"name": name, "files": files, "sha256": sha256(to_json(files))}


def recorded_sha256(folder: Path) -> str | None:
    """The listing's hash as checkpoint.json holds it, or None when there is no such file or a listed file is gone or of another size."""
    try:
        identity = json.loads((folder / IDENTITY).read_bytes())
        complete = all((folder / entry["path"]).stat().st_size == entry["bytes"] for entry in identity["files"])
    except FileNotFoundError:
        return None
    return str(identity["sha256"]) if complete else None


def keep_json(path: Path, keep: tuple[str, ...] | None = None) -> None:
    """Make a JSON file canonical, with only the `keep` fields of its top level: equal content then has equal bytes."""
    content = json.loads(path.read_bytes())
    path.write_bytes(to_json({key: value for key, value in content.items() if keep is None or key in keep}))


def build_checkpoint(
    target: Path, fill: Callable[[Path], None], expected_sha256: str | None, say: Callable[[str], None] = print,
) -> str:
    """Have `fill` write the checkpoint into a scratch folder, check its hash, move it to `target`; return the hash.

    Does nothing when `target` is complete with the expected hash (or with any, when none is expected).  A folder that is something else
    is refused, never replaced.  Raises :class:`CheckpointError`.
    """
    found = recorded_sha256(target)
    if found is not None and expected_sha256 in (None, found):
        say(f"{target.name}: complete, sha256 {found}; nothing to do")
        return found
    if target.exists():
        raise CheckpointError(f"{target}: exists but is incomplete or has sha256 {found}, expected {expected_sha256}; "
                              "move the folder away and run this again")
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    scratch.mkdir()
    try:
        fill(scratch)
        identity = identify(scratch, target.name)
        if expected_sha256 is not None and identity["sha256"] != expected_sha256:
            listing = ", ".join(f"{entry['path']} {entry['sha256'][:12]}" for entry in identity["files"])
            raise CheckpointError(
                f"{target.name}: made sha256 {identity['sha256']}, expected {expected_sha256} ({listing}); nothing was kept. "
                "Another release of the packages that convert it may write other bytes: install the versions that this project locks")
        (scratch / IDENTITY).write_bytes(to_json(identity))
        os.replace(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    say(f"{target.name}: made, sha256 {identity['sha256']}")
    return str(identity["sha256"])
