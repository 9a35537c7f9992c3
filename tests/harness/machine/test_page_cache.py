"""Eviction from the page cache, proven or told that it is not."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.machine import page_cache
from harness.machine.page_cache import evict, filesystem, resident_pages

PAGES = 1000


@pytest.fixture
def file() -> Iterator[Path]:
    """A file on a real file system: pages of tmpfs are never evicted."""
    folder = Path(tempfile.mkdtemp(dir=Path(__file__).parent))
    path = folder / "weights"
    path.write_bytes(os.urandom(PAGES * mmap.PAGESIZE - 7))
    yield path
    shutil.rmtree(folder)


def test_check_16_eviction_reports_that_no_page_is_resident(file: Path) -> None:
    record = evict([file])
    assert record == {"proven": True, "pages_before": PAGES, "pages_after": 0, "reasons": [], "files": ["weights"]}
    file.read_bytes()
    assert evict([file])["pages_before"] == PAGES


def test_check_16_pages_that_a_process_maps_stay_and_refuse(file: Path) -> None:
    with file.open("rb") as source, mmap.mmap(source.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[offset] for offset in range(0, len(mapped), mmap.PAGESIZE)) > 0
        record = evict([file])
    assert record["proven"] is False
    assert record["pages_after"] > 0
    assert "weights" in record["reasons"][0]
    assert "maps" in record["reasons"][0] and "copy the model to a local disk" in record["reasons"][0]


@pytest.mark.skipif(filesystem(Path("/dev/shm")) != "tmpfs", reason="needs a tmpfs")
def test_check_16_a_model_in_memory_refuses_and_is_told_to_move_to_a_disk() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        files = [Path(folder) / name for name in "abcde"]
        for file in files:
            file.write_bytes(b"x" * mmap.PAGESIZE)
        record = evict(files)
    assert (record["proven"], record["pages_after"]) == (False, 5)
    assert record["reasons"] == [
        "a, b, c and 2 more: pages stayed: on tmpfs they are the file itself and cannot leave memory; copy the model to a disk"]


@pytest.mark.parametrize(("files", "proven"), [
    ([(True, 0), (True, 0)], True), ([(True, 0), (False, 9)], None), ([(True, 1), (False, 9)], False), ([(True, 1), (True, 0)], False),
])
def test_what_stayed_outweighs_what_cannot_be_known(monkeypatch: pytest.MonkeyPatch, files: list[tuple[bool, int]], proven: bool) -> None:
    found = iter(files)

    def one(path: Path) -> dict[str, object]:
        provable, after = next(found)
        return {"name": path.name, "pages_before": 9, "pages_after": after, "provable": provable, "cause": None}

    monkeypatch.setattr(page_cache, "_evict", one)
    assert evict([Path("a"), Path("b")])["proven"] is proven


def test_the_file_system_is_that_of_the_innermost_mount(tmp_path: Path) -> None:
    inner = tmp_path / "with space" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "mounts").write_text(
        f"a / ext4 rw 0 0\nb {tmp_path}/with\\040space overlay rw 0 0\nc {inner}er tmpfs rw 0 0\n".replace("with space", "with\\040space"))
    assert filesystem(inner / "weights", tmp_path) == "overlay"
    assert filesystem(tmp_path, tmp_path) == "ext4"
    assert filesystem(inner, tmp_path / "none") is None


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
    (reason,) = record["reasons"]
    assert "neither owns a file (it is uid 0's) nor may write to it" in reason
    assert reason.endswith("; copy the model to files of your own, or run as their owner")


def test_empty_file_and_no_file(file: Path) -> None:
    file.write_bytes(b"")
    assert evict([file])["proven"] is True
    descriptor = os.open(file, os.O_RDONLY)
    assert resident_pages(descriptor) == 0
    os.close(descriptor)
    with pytest.raises(FileNotFoundError):
        evict([file.with_name("none")])
