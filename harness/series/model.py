"""The checkpoint a series runs on: found by name, proven by hash."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from harness.series.spec import Model

LISTING = "checkpoint.json"
"""Beside the checkpoint: {name, files: [{path, bytes, sha256}], sha256 over that list as canonical JSON}."""


class ModelError(RuntimeError):
    """The checkpoint is missing or is not the one the spec names."""


def models_folder(root: Path) -> Path:
    """Where checkpoints lie: $PARITY_MODELS, else .models in the repository."""
    return Path(os.environ.get("PARITY_MODELS", root / ".models"))


def check_model(root: Path, model: Model) -> tuple[Path, dict[str, Any]]:
    """The checkpoint's folder and its record (name, sha256, files).  Every file is read and hashed again.

    Raises :class:`ModelError` when the folder or a file is missing, a byte changed, or the hash is not the spec's.
    """
    folder = models_folder(root) / model.name
    listing = folder / LISTING
    if not listing.is_file():
        raise ModelError(f"model {model.name}: no {LISTING} in its folder; make it with {model.made_by}")
    record = json.loads(listing.read_bytes())
    for entry in record["files"]:
        path = folder / entry["path"]
        if not path.is_file():
            raise ModelError(f"model {model.name}: {entry['path']} is missing; make it again with {model.made_by}")
        with path.open("rb") as source:
            found = hashlib.file_digest(source, "sha256").hexdigest()
        if found != entry["sha256"]:
            raise ModelError(f"model {model.name}: {entry['path']} has sha256 {found}, {entry['sha256']} is listed; "
                             f"make it again with {model.made_by}")
    if record["sha256"] != model.sha256:
        raise ModelError(f"model {model.name}: is checkpoint {record['sha256']}, the spec's field `model.sha256` says {model.sha256}")
    return folder, {"name": model.name, "sha256": record["sha256"], "files": record["files"]}
