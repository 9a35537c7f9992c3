"""Direct loading onto a card: a late copy, memory that is given back, and no more of the card's memory than staged loading takes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.api import LLM, CheckpointError
from engine.kernels.transfer import CardCarrier, Copy
from engine.loader import direct, files, staged
from engine.loader.header import read_headers
from engine.loader.load import FILE_DTYPES, Piece
from harness.machine.page_cache import evict
from tests.engine.checkpoints import make_checkpoint
from tests.engine.test_direct_load import arrived, no_readers, write

MIB = 1 << 20
LATE = 20_000_000
"""Cycles by which each copy is held up, about a hundredth of a second: the readers are back for the buffer long before."""


def on_card(folder: Path, dtype: torch.dtype) -> list[Piece]:
    entries = read_headers(folder).values()
    return [Piece(entry, FILE_DTYPES[entry.dtype], torch.full(entry.shape, torch.nan, dtype=dtype, device="cuda")) for entry in entries]


def home(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces with their targets' values as they are now on the card, read on a stream that waits for no other."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        return [Piece(piece.entry, piece.dtype, piece.target.cpu()) for piece in pieces]


class LateCarrier(CardCarrier):
    """Its stream is busy before each copy; `honest` says whether it waits for that."""

    honest = True

    def send(self, copies: Sequence[Copy]) -> Callable[[], None]:
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(LATE)
        done = super().send(copies)
        return done if self.honest else lambda: None


class HastyCarrier(LateCarrier):
    honest = False


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WINDOW", 16384), ("BUFFERS", 3), ("READERS", 3)):
        monkeypatch.setattr(direct, name, value)


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("carrier", [LateCarrier, HastyCarrier])
def test_a_pinned_buffer_is_filled_again_only_after_the_card_has_read_it(
    tmp_path: Path, small_windows: None, carrier: Any, wanted: torch.dtype
) -> None:
    """The hasty carrier shows that the delay is long enough to tell."""
    tensors = write(tmp_path / "model.safetensors", torch.float32)
    filled = on_card(tmp_path, wanted)
    torch.cuda.synchronize()
    direct.fill(filled, lambda _: None, carrier)
    assert arrived(home(filled), tensors) == carrier.honest


@pytest.mark.parametrize("past_cache", [True, False])
@pytest.mark.parametrize("pad", [0, 1])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16], ids=str)
def test_every_byte_arrives_on_the_card(
    tmp_path: Path, small_windows: None, monkeypatch: pytest.MonkeyPatch, past_cache: bool, pad: int, wanted: torch.dtype
) -> None:
    monkeypatch.setattr(files, "mostly_cached", lambda *_: not past_cache)
    tensors = write(tmp_path / "model.safetensors", torch.bfloat16, pad)
    filled = on_card(tmp_path, wanted)
    direct.fill(filled, lambda _: None)
    assert arrived(home(filled), tensors)


def test_a_failing_reader_leaves_no_copy_under_way(tmp_path: Path, small_windows: None, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "model.safetensors", torch.float32)
    filled, read, calls = on_card(tmp_path, torch.float32), files.File.read, []

    def fail(*arguments: Any) -> int:
        calls.append(1)
        if len(calls) == 5:
            raise OSError(5, "Input/output error")
        return read(*arguments)

    monkeypatch.setattr(files.File, "read", fail)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read, at tensor t\d"):
        direct.fill(filled, lambda _: None, LateCarrier)
    assert no_readers() and torch.cuda.current_stream().query()
    torch.cuda.synchronize()


def shared_memory() -> int:
    """Bytes of this process's shared anonymous pages, which pinned memory and what a driver registers count as."""
    text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    return sum(1024 * int(value) for value in re.findall(r"^Pss_(?:Shmem|Anon): +(\d+) kB", text, re.MULTILINE))


def test_the_ring_is_given_back_and_the_card_holds_no_more_than_staged(tmp_path: Path) -> None:
    """Full-sized windows over 512 MiB: what is left on the host afterwards, and the card's high water of either way."""
    write(tmp_path / "model.safetensors", torch.bfloat16, sizes=(64 * MIB, 31 * MIB, 5, 161 * MIB - 5))
    peak, left = {}, {}
    for name, way in (("once", direct), ("direct", direct), ("staged", staged)):
        torch.cuda.empty_cache()
        evict([tmp_path / "model.safetensors"])
        filled, before = on_card(tmp_path, torch.bfloat16), shared_memory()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        way.fill(filled, lambda _: None)
        peak[name], left[name] = torch.cuda.max_memory_reserved(), shared_memory() - before
        del filled
    assert peak["direct"] <= peak["staged"] + 32 * MIB
    assert left["direct"] < 16 * MIB


def test_served_weights_are_the_same_either_way(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16, shard="100KB")
    made = []
    for load in ("direct", "staged"):
        notes: list[str] = []
        llm = LLM(tmp_path, notes.append, device="cuda", load=load, max_num_seqs=2)
        assert notes == ["context", "read", "copied", "captured"]
        made.append({name: weight.cpu() for name, weight in llm.runner.model.weights.items()})
    assert made[0].keys() == made[1].keys() and all(torch.equal(made[0][name], made[1][name]) for name in made[0])
