"""Staging: an arm runs a copy of the code, never the repository.  It lies in the series as one file, named by the
code's hash, and unpacked beside it while legs run."""

from __future__ import annotations

import hashlib
from pathlib import Path

from harness.evidence import layout, packed

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
    """Pack the driver's code and the corpus (a path relative to `root`) into the series; returns (folder to run from, SHA-256 of the code).

    What is there already is checked and used.  The arm itself checks the corpus against the hash it is asked for.
    """
    wanted = code_sha256(root, driver)
    source, target = packed.archive(series, wanted), series / layout.UNPACKED / wanted[:12]
    if not source.exists():
        packed.pack(root, [*code_files(root, driver), Path(corpus)], source)
    if not target.exists():
        target.parent.mkdir(exist_ok=True)
        try:
            packed.unpack(source, target)
        except ValueError as error:
            raise StageError(f"{layout.STAGE}/{error}; begin a new series") from None
    if (found := code_sha256(target, driver)) != wanted:
        raise StageError(f"{layout.UNPACKED}/{target.name}: holds code {found[:12]}, {wanted[:12]} was staged; remove the folder to have "
                         "it unpacked again, or begin a new series")
    return target, wanted
