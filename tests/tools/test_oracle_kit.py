"""The kit keeps exactly one architecture's machine code and refuses what it does not understand."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

import pytest

from harness.oracle_install import KIT_ARCHIVE
from tools.bench import oracle_kit
from tools.bench.oracle_kit import ENTRY_HEADER, FAT_HEADER, FAT_MAGIC, KitError, main, prune_device_code, read_pins

PTX, ELF = 1, 2
ROOT = Path(__file__).resolve().parents[2]


def entry(kind: int, architecture: int, payload: bytes, length: int | None = None) -> bytes:
    size = len(payload) if length is None else length
    return ENTRY_HEADER.pack(kind, 0x101, 64, size, 0, 0, 0, 0, architecture).ljust(64, b"h") + payload


def fat_binary(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return FAT_HEADER.pack(FAT_MAGIC, 1, FAT_HEADER.size, len(body)) + body


def test_only_machine_code_of_the_architecture_survives_and_nothing_moves() -> None:
    keep, ptx, older = b"K" * 40, b"P" * 24, b"O" * 32
    data = b"before" + fat_binary(entry(PTX, 90, ptx), entry(ELF, 80, older), entry(ELF, 90, keep)) + b"between" + fat_binary(
        entry(ELF, 100, older), entry(ELF, 90, keep)) + b"after"
    pruned = bytearray(data)
    assert prune_device_code(pruned, 90) == (2, 3)
    assert pruned == data.replace(ptx, bytes(24)).replace(older, bytes(32))


def test_the_magic_word_by_chance_is_left_alone() -> None:
    lone = b"x" + FAT_MAGIC.to_bytes(4, "little") + b"\xff" * 40
    data = bytearray(lone + fat_binary(entry(PTX, 90, b"P" * 8), entry(ELF, 90, b"K" * 8)))
    assert prune_device_code(data, 90) == (1, 1)
    assert data.startswith(lone)


def test_an_entry_that_leaves_its_fat_binary_is_refused() -> None:
    data = bytearray(fat_binary(entry(ELF, 80, b"O" * 8, length=4096)) + b"z" * 8192)
    before = bytes(data)
    with pytest.raises(KitError, match="unknown layout"):
        prune_device_code(data, 90)
    assert data == before


@pytest.mark.parametrize("line", ["torch>=2", "torch", "torch==", "a==1==2"])
def test_loose_pins_are_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "pins"
    path.write_text(f"# comment\nvllm==0.26.0\n{line}\n")
    with pytest.raises(KitError, match="exact versions"):
        read_pins(path)


def test_the_committed_pins_name_vllm_first() -> None:
    pins = read_pins(ROOT / oracle_kit.PINS)
    assert pins[0] == "vllm==0.26.0" and len(pins) == len({pin.partition("==")[0] for pin in pins})


def test_a_missing_pins_file_is_a_message_not_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", str(tmp_path / "kit"), "--pins", str(tmp_path / "none")]) == 1
    assert "--pins" in capsys.readouterr().err


def test_a_release_without_what_is_left_out_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KitError, match="another release"):
        oracle_kit.reduce(tmp_path)


def test_a_packed_site_is_whole_and_the_same_each_time(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "module.py").write_text("value = 1\n")
    for name in ("a", "b"):
        oracle_kit.pack(site, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    with tarfile.open(tmp_path / "a") as archive:
        found = archive.extractfile("./module.py")
        assert found is not None and found.read() == b"value = 1\n"


def test_a_kit_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "kit"
    folder.mkdir()
    (folder / KIT_ARCHIVE).write_bytes(b"packed")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("nothing may run"))
    before = (folder / KIT_ARCHIVE).read_bytes()
    assert main(["build", str(folder), "--pins", str(ROOT / oracle_kit.PINS)]) == 1
    assert (folder / KIT_ARCHIVE).read_bytes() == before
