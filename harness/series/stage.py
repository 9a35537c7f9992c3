"""Staging: an arm runs a copy of the code, never the repository.  The copy lies in the series, named by its own hash."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

PARTS = {"engine": ("legs", "engine"), "vllm": ("legs",), "harness": ("harness",)}
"""What each driver's stage holds; `harness` is never staged, only hashed for the record."""

SKIPPED_FOLDERS = {"__pycache__"}


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
            if SKIPPED_FOLDERS & set(relative.parts):
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


def stage(root: Path, driver: str, series: Path) -> tuple[Path, str]:
    """Copy the driver's code into the series and return (folder, SHA-256).  An existing copy is checked and used."""
    wanted = code_sha256(root, driver)
    target = series / "stage" / wanted[:12]
    if not target.exists():
        scratch = target.with_name(f".{target.name}")
        shutil.rmtree(scratch, ignore_errors=True)
        for relative in code_files(root, driver):
            (scratch / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / relative, scratch / relative)
        scratch.rename(target)
    if (found := code_sha256(target, driver)) != wanted:
        raise StageError(f"stage/{target.name}: holds code {found[:12]}, {wanted[:12]} was staged; begin a new series")
    return target, wanted
