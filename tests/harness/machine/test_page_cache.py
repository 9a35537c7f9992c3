"""Eviction from the page cache, proven or told that it is not."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.machine.page_cache import evict, resident_pages

PAGES = 1000


@pytest.fixture
def file() -> Iterator[Path]:
    """A file on a real file system: pages of tmpfs are never evicted."""
    folder = Path(tempfile.mkdtemp(dir=Path(__file__).parent))
    path = folder / "weights"
    path.write_bytes(os.urandom(PAGES * mmap.PAGESIZE - 7))
    yield path
    shutil.rmtree(folder)


def test_pages_of_a_written_file_are_evicted_with_proof(file: Path) -> None:
    record = evict([file])
    assert record == {"proven": True, "pages_before": PAGES, "pages_after": 0, "reasons": [], "files": ["weights"]}
    file.read_bytes()
    assert evict([file])["pages_before"] == PAGES


def test_pages_that_a_process_maps_stay_and_refuse(file: Path) -> None:
    with file.open("rb") as source, mmap.mmap(source.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[offset] for offset in range(0, len(mapped), mmap.PAGESIZE)) > 0
        record = evict([file])
    assert record["proven"] is False
    assert record["pages_after"] > 0
    assert "weights" in record["reasons"][0]
    assert "maps" in record["reasons"][0]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_file_of_another_user_is_not_provable_and_says_how_to_cure_it(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    file.parent.chmod(0o755)
    file.chmod(0o644)
    path = Path(f"/proc/self/fd/{descriptor}")
    try:
        os.seteuid(65534)
        record = evict([path])
    finally:
        os.seteuid(0)
        os.close(descriptor)
    assert (record["proven"], record["pages_before"], record["pages_after"]) == (None, None, None)
    assert "uid 0; copy the model" in record["reasons"][0]


def test_empty_file_and_no_file(file: Path) -> None:
    file.write_bytes(b"")
    assert evict([file])["proven"] is True
    descriptor = os.open(file, os.O_RDONLY)
    assert resident_pages(descriptor) == 0
    os.close(descriptor)
    with pytest.raises(FileNotFoundError):
        evict([file.with_name("none")])
