"""Staging: an arm runs a copy of the code, never the repository.  The copy lies in the series, named by its own hash."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

PARTS = {"engine": ("legs", "engine"), "vllm": ("legs",), "null": ("legs",), "harness": ("harness",)}
"""What each driver's stage holds; `harness` is never staged, only hashed for the record."""

DATA = tuple(("legs", folder) for folder in ("corpora", "references", "series", "calibration", "nightly", "oracles"))
"""Folders that hold no code: no arm imports them, and the one corpus it reads is staged beside the code under its own hash."""


class StageError(RuntimeError):
    """The code on disk is not the code that was staged."""


def repository_root() -> Path:
    """The checkout this harness runs from."""
    return Path(__file__).resolve().parents[2]


def code_files(root: Path, driver: str) -> list[Path]:
    """Files of the driver's stage relative to `root`, sorted; symlinks are refused."""
    found = []
    for part in PARTS[driver]:
        for path in sorted((root / part).rglob("*")):
            relative = path.relative_to(root)
            if "__pycache__" in relative.parts or relative.parts[:2] in DATA:
                continue
            if path.is_symlink():
                raise StageError(f"{relative}: a symlink cannot be staged; replace it with the file")
            if path.is_file():
                found.append(relative)
    return found


def code_sha256(root: Path, driver: str) -> str:
    """SHA-256 over the names and bytes of the stage's files."""
    digest = hashlib.sha256()
    for relative in code_files(root, driver):
        data = (root / relative).read_bytes()
        digest.update(f"{relative}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def stage(root: Path, driver: str, series: Path, corpus: str) -> tuple[Path, str]:
    """Copy the driver's code and the corpus (a path relative to `root`) into the series; returns (folder, SHA-256 of the code).

    An existing copy is checked and used.  The arm itself checks the corpus against the hash it is asked for.
    """
    wanted = code_sha256(root, driver)
    target = series / "stage" / wanted[:12]
    if not target.exists():
        scratch = target.with_name(f".{target.name}")
        shutil.rmtree(scratch, ignore_errors=True)
        for relative in (*code_files(root, driver), Path(corpus)):
            (scratch / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / relative, scratch / relative)
        scratch.rename(target)
    if (found := code_sha256(target, driver)) != wanted:
        raise StageError(f"stage/{target.name}: holds code {found[:12]}, {wanted[:12]} was staged; begin a new series")
    return target, wanted
