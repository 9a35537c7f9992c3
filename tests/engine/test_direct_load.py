"""Direct loading: every byte arrives, whatever the file system allows; no buffer is filled while a copy reads it; one failure stops all."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.api import LLM, CheckpointError
from engine.kernels.transfer import Copy, HostCarrier
from engine.loader import direct, files, staged
from engine.loader.header import Entry, read_headers
from engine.loader.load import FILE_DTYPES, Parameter, Piece, load
from harness.machine.page_cache import evict, resident_pages
from tests.engine.checkpoints import make_checkpoint

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
SIZES = (70_001, 3, 40_000, 1, 9, 123_456, 5_000, 77)


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors larger and smaller than a chunk, more chunks than buffers, as many buffers as readers."""
    for name, value in (("WINDOW", 16384), ("BUFFERS", 3), ("READERS", 3)):
        monkeypatch.setattr(direct, name, value)


def write(path: Path, dtype: torch.dtype, pad: int = 0, sizes: Sequence[int] = SIZES) -> dict[str, torch.Tensor]:
    """A safetensors file of random values whose data begin `pad` bytes further on than the header's own end would have them."""
    generator = torch.Generator().manual_seed(1)
    tensors = {f"t{number}": torch.randn(size, generator=generator).to(dtype) for number, size in enumerate(sizes)}
    header, end = {}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": NAMES[dtype], "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * ((-len(text)) % 8 + pad)
    data = b"".join(tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return tensors


def pieces(folder: Path, dtype: torch.dtype) -> list[Piece]:
    """What `load` would ask for, with targets that hold no value of any file."""
    entries = read_headers(folder).values()
    return [Piece(entry, FILE_DTYPES[entry.dtype], torch.full(entry.shape, torch.nan, dtype=dtype)) for entry in entries]


def arrived(filled: Sequence[Piece], tensors: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(piece.target, tensors[piece.entry.name].to(piece.target.dtype)) for piece in filled)


class SlowCarrier(HostCarrier):
    """Copies in order, as late as it may: when somebody waits for a copy, or at the end.  `honest` says whether a wait is one."""

    honest = True

    def __init__(self, _: torch.device) -> None:
        self._guard = threading.Lock()
        self._sent: list[Sequence[Copy]] = []
        self._done = 0

    def send(self, copies: Sequence[Copy]) -> Callable[[], None]:
        with self._guard:
            self._sent.append(copies)
            return partial(self._copy, len(self._sent)) if self.honest else lambda: None

    def close(self) -> None:
        self._copy(len(self._sent))

    def _copy(self, until: int) -> None:
        with self._guard:
            while self._done < until:
                super().send(self._sent[self._done])
                self._done += 1


class HastyCarrier(SlowCarrier):
    honest = False


@pytest.fixture
def through_ring(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Host memory that counts as a device's: nothing is read straight into it."""
    monkeypatch.setattr(direct, "HOST", "another device")
    yield


@pytest.mark.parametrize("carrier", [SlowCarrier, HastyCarrier])
def test_a_buffer_is_filled_again_only_after_its_copies_are_complete(tmp_path: Path, through_ring: None, carrier: Any) -> None:
    """The hasty carrier shows that the copies are late enough to tell."""
    tensors = write(tmp_path / "model.safetensors", torch.float32)
    filled, noted = pieces(tmp_path, torch.float32), []
    direct.fill(filled, lambda word: noted.append((word, arrived(filled, tensors))), carrier)
    assert [word for word, _ in noted] == ["read", "copied"]
    assert noted == [("read", False), ("copied", True)] if carrier.honest else not noted[1][1]


@pytest.mark.parametrize("past_cache", [True, False])
@pytest.mark.parametrize("pad", [0, 1, 3, 4090])
@pytest.mark.parametrize(("stored", "wanted"), [
    (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float16, torch.float32)])
def test_every_byte_arrives_from_any_offset(
    tmp_path: Path, through_ring: None, monkeypatch: pytest.MonkeyPatch, past_cache: bool, pad: int, stored: torch.dtype,
    wanted: torch.dtype,
) -> None:
    monkeypatch.setattr(files, "mostly_cached", lambda *_: not past_cache)
    tensors = write(tmp_path / "model.safetensors", stored, pad)
    filled = pieces(tmp_path, wanted)
    direct.fill(filled, lambda _: None)
    assert arrived(filled, tensors)


def test_the_host_s_own_parameters_are_read_straight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No ring is made for them; one of another dtype beside them passes through one."""
    tensors = write(tmp_path / "model.safetensors", torch.bfloat16)
    same = pieces(tmp_path, torch.bfloat16)

    def no_ring(_: torch.device) -> Any:
        raise AssertionError("a ring was made")

    direct.fill(same, lambda _: None, no_ring)
    assert arrived(same, tensors)
    mixed = [*pieces(tmp_path, torch.bfloat16)[:3], *pieces(tmp_path, torch.float32)[3:]]
    direct.fill(mixed, lambda _: None)
    assert arrived(mixed, tensors)


def opened(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each read to come goes past the page cache."""
    seen, preadv = [], os.preadv

    def spy(descriptor: int, buffers: Any, offset: int) -> int:
        seen.append(bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(files.os, "preadv", spy)
    return seen


def test_what_is_not_cached_is_read_past_the_cache_and_stays_out_of_it(
    tmp_path: Path, through_ring: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    tensors = write(path, torch.float32)
    seen = opened(monkeypatch)
    with path.open("rb") as held:
        for cached in (False, True):
            filled = pieces(tmp_path, torch.float32)
            path.read_bytes()
            assert cached or evict([path])["proven"], "this test needs a file system whose page cache can be evicted"
            seen.clear()
            direct.fill(filled, lambda _: None)
            assert arrived(filled, tensors)
            assert set(seen) == {not cached}
            assert (resident_pages(held.fileno()) > 0) == cached


def test_pages_in_the_cache_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, size = tmp_path / "file", 1 << 20
    path.write_bytes(os.urandom(size))
    assert evict([path])["proven"]
    with path.open("rb") as held:
        os.posix_fadvise(held.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        assert not files.mostly_cached(held.fileno(), 0, size)
        os.preadv(held.fileno(), [bytearray(size // 2)], 0)
        assert files.mostly_cached(held.fileno(), 0, size) and not files.mostly_cached(held.fileno(), size // 4, size)
        assert files.mostly_cached(held.fileno(), 0, size // 2) and not files.mostly_cached(held.fileno(), size // 2, size)
        monkeypatch.setattr(files, "_CACHESTAT", 9999)
        assert files.mostly_cached(held.fileno(), size // 2, size)


@pytest.mark.parametrize("when", ["opened", "read"])
def test_a_file_system_without_o_direct_is_read_through_the_cache(
    tmp_path: Path, through_ring: None, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    tensors = write(tmp_path / "model.safetensors", torch.float32)
    filled, seen, real_open = pieces(tmp_path, torch.float32), opened(monkeypatch), os.open
    spied = os.preadv

    def refuse_open(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *rest)

    def refuse_read(descriptor: int, buffers: Any, offset: int) -> int:
        count = spied(descriptor, buffers, offset)
        if seen[-1]:
            raise OSError(errno.EINVAL, "Invalid argument")
        return count

    monkeypatch.setattr(files, "mostly_cached", lambda *_: False)
    if when == "opened":
        monkeypatch.setattr(files.os, "open", refuse_open)
    else:
        monkeypatch.setattr(files.os, "preadv", refuse_read)
    direct.fill(filled, lambda _: None)
    assert arrived(filled, tensors)
    assert seen.count(True) <= (direct.READERS if when == "read" else 0) < len(seen)


def no_readers() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name.startswith("weights")]


@pytest.mark.parametrize("straight", [True, False])
def test_one_failing_reader_stops_all_and_names_file_and_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, straight: bool
) -> None:
    write(tmp_path / "model.safetensors", torch.float32)
    if not straight:
        monkeypatch.setattr(direct, "HOST", "another device")
    filled, calls, preadv = pieces(tmp_path, torch.float32), [], os.preadv
    total = len(list(direct.chunks(filled, direct.WINDOW)))

    def fail(descriptor: int, buffers: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) == 4:
            raise OSError(errno.EIO, "Input/output error")
        time.sleep(0.002)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(files.os, "preadv", fail)
    notes: list[str] = []
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read, at tensor t\d \(Input/output error\)"):
        direct.fill(filled, notes.append, None if straight else SlowCarrier)  # type: ignore[arg-type]
    assert notes == [] and no_readers()
    assert len(calls) < total // 2


@pytest.mark.parametrize("way", ["straight", "past-cache", "cached", "staged"])
def test_a_file_that_shrinks_meanwhile_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """It is cut inside t5 once reading has begun; the tensor named is one that is not all there any more."""
    path = tmp_path / "model.safetensors"
    write(path, torch.float32)
    if way not in ("straight", "staged"):
        monkeypatch.setattr(direct, "HOST", "another device")
    monkeypatch.setattr(files, "mostly_cached", lambda *_: way != "past-cache")
    filled, preadv = pieces(tmp_path, torch.float32), os.preadv
    cut = next(piece.entry.offset for piece in filled if piece.entry.name == "t5") + 100_001

    def shrink(descriptor: int, buffers: Any, offset: int) -> int:
        os.truncate(path, cut)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(files.os, "preadv", shrink)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: ended at byte {cut}, before tensor t[567] does; the file shrank"):
        (staged if way == "staged" else direct).fill(filled, lambda _: None)
    assert no_readers()


@pytest.mark.parametrize("way", ["direct", "staged"])
@pytest.mark.parametrize("change", [os.utime, lambda path: path.unlink(), lambda path: path.open("ab").write(b"x")])
def test_a_file_that_is_written_or_replaced_meanwhile_is_refused(tmp_path: Path, way: str, change: Callable[[Path], Any]) -> None:
    path = tmp_path / "model.safetensors"
    tensors = write(path, torch.float32)
    parameters = [Parameter(name, tuple(tensor.shape), ((name, tensor.shape[0]),)) for name, tensor in tensors.items()]
    load(tmp_path, parameters, lambda _: False, torch.float32, way)

    def note(word: str) -> None:
        if word == "copied":
            time.sleep(0.01)
            change(path)

    with pytest.raises(CheckpointError, match=r"model\.safetensors: changed while it was read"):
        load(tmp_path, parameters, lambda _: False, torch.float32, way, note=note)


@pytest.mark.parametrize("way", ["direct", "staged"])
def test_no_model_is_made_of_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    make_checkpoint(tmp_path, "qwen3", shard="100KB")
    preadv, calls = os.preadv, []

    def fail(descriptor: int, buffers: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) == 9:
            raise OSError(errno.EIO, "Input/output error")
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(files.os, "preadv", fail)
    with pytest.raises(CheckpointError, match=r"model-0000\d-of-.*\.safetensors: cannot be read, at tensor model\."):
        LLM(tmp_path, load=way)


def test_an_index_that_names_a_tensor_twice_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", shard="100KB")
    path = tmp_path / "model.safetensors.index.json"
    name, shard = next(iter(json.loads(path.read_bytes())["weight_map"].items()))
    path.write_text(path.read_text().replace('"weight_map": {', f'"weight_map": {{"{name}": "{shard}",'))
    with pytest.raises(CheckpointError, match=r"index\.json: no readable weight_map .*a name appears twice"):
        LLM(tmp_path)


@pytest.mark.parametrize("way", ["direct", "staged"])
def test_no_file_of_weights_is_ever_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    write(tmp_path / "model.safetensors", torch.float32)
    seen, preadv = [], os.preadv

    def look() -> None:
        seen.append("model.safetensors" in Path("/proc/self/maps").read_text(encoding="utf-8"))

    def read(descriptor: int, buffers: Any, offset: int) -> int:
        look()
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(files.os, "preadv", read)
    (staged if way == "staged" else direct).fill(pieces(tmp_path, torch.float32), lambda _: look())
    assert len(seen) > 2 and not any(seen)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 60), st.booleans(), st.sampled_from([torch.float32, torch.bfloat16])), max_size=12),
    first=st.integers(0, 9), window=st.integers(8, 64), gap_at=st.integers(0, 12),
    second=st.integers(0, 12),
)
def test_chunks_cover_each_byte_once_in_order_and_cut_no_value(
    lengths: list[tuple[int, bool, torch.dtype]], first: int, window: int, gap_at: int, second: int
) -> None:
    """`second` is the first piece of a second file, whose offsets go on where the first file's ended."""
    given_pieces, at = [], first
    for number, (length, same, dtype) in enumerate(lengths):
        at += 5 if number == gap_at else 0
        nbytes = length * dtype.itemsize
        target = torch.empty(length, dtype=dtype if same else torch.float16)
        path = Path("first" if number < second else "second")
        given_pieces.append(Piece(Entry(path, f"t{number}", NAMES[dtype], (length,), at, nbytes, ()), dtype, target))
        at += nbytes
    made = list(direct.chunks(given_pieces[::-1], window))
    covered = [(piece.entry.offset + begin, piece.entry.offset + end) for chunk in made for piece, begin, end in chunk.parts]
    wanted = [offset for piece in given_pieces for offset in range(piece.entry.offset, piece.entry.offset + piece.entry.nbytes)]
    assert [offset for begin, end in covered for offset in range(begin, end)] == wanted
    for chunk in made:
        assert {piece.entry.file for piece, *_ in chunk.parts} == {chunk.path}
        assert 0 < chunk.end - chunk.begin == sum(end - begin for _, begin, end in chunk.parts) <= window
        assert chunk.begin == chunk.parts[0].piece.entry.offset + chunk.parts[0].begin
        for piece, begin, end in chunk.parts:
            assert begin % piece.dtype.itemsize == end % piece.dtype.itemsize == 0
            assert chunk.straight == (piece.target.dtype == piece.dtype)
