"""What an arm ran from, as one file of the evidence: the files below a folder, in one order, with nothing of the machine about them."""

from __future__ import annotations

import io
import lzma
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from harness.evidence import layout


def archive(series: Path, code: str) -> Path:
    """Where the code of that SHA-256 is packed in a series."""
    return series / layout.STAGE / f"{code[:12]}.tar.xz"


def pack(root: Path, files: Sequence[Path], target: Path) -> None:
    """Write the files, named relative to `root`, into `target` in the order given; equal files give equal bytes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}")
    with tarfile.open(scratch, "w:xz", format=tarfile.USTAR_FORMAT) as out:
        for relative in files:
            data = (root / relative).read_bytes()
            entry = tarfile.TarInfo(relative.as_posix())
            entry.size, entry.mode = len(data), 0o644
            out.addfile(entry, io.BytesIO(data))
    scratch.rename(target)


def unpack(source: Path, target: Path) -> None:
    """Lay the files out below `target`, which is there whole or not at all.

    Raises ValueError for what is no archive of plain files below one folder.
    """
    scratch = target.with_name(f".{target.name}")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        with tarfile.open(source, "r:xz") as packed:
            if odd := [entry.name for entry in packed if not entry.isfile()]:
                raise ValueError(f"{source.name}: {odd[0]} is no plain file")
            packed.extractall(scratch, filter="data")
    except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise ValueError(f"{source.name}: cannot be unpacked: {error}") from None
    scratch.rename(target)


@contextmanager
def opened(series: Path) -> Iterator[Path]:
    """A folder for the while with what the one archive of a record holds."""
    (source,) = (series / layout.STAGE).iterdir()
    with tempfile.TemporaryDirectory() as scratch:
        unpack(source, Path(scratch, "stage"))
        yield Path(scratch, "stage")
