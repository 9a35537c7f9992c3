"""The series lock: one at a time, both ways with flock(1), never lost unseen."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.machine import lock as lock_module
from harness.machine.lock import LockBusy, LockError, LockLost, SeriesLock, find_holder, lock_path, read_note

FLOCK = shutil.which("flock") or ""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "series.lock"


@pytest.fixture
def flock_holder(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """flock(1) holding `path`."""
    process = subprocess.Popen([FLOCK, "--no-fork", str(path), "sleep", "30"])
    deadline = time.monotonic() + 5
    while subprocess.run([FLOCK, "-n", str(path), "true"], check=False).returncode == 0:
        assert time.monotonic() < deadline
    yield process
    process.kill()
    process.wait()


@contextmanager
def held(path: Path, command: str) -> Iterator[SeriesLock]:
    with SeriesLock(path, command) as lock:
        lock.acquire(1)
        yield lock


def is_free(path: Path) -> bool:
    return subprocess.run([FLOCK, "-n", str(path), "true"], check=False).returncode == 0


def test_excludes_flock_while_held_and_is_free_after(path: Path) -> None:
    with held(path, "parity run-series"):
        assert not is_free(path)
    assert is_free(path)


def test_busy_names_path_and_flock_holder_without_a_note(path: Path, flock_holder: subprocess.Popen[bytes]) -> None:
    started = time.monotonic()
    with pytest.raises(LockBusy) as busy:
        SeriesLock(path, "parity run-series").acquire(0.3)
    assert 0.3 <= time.monotonic() - started < 3
    for part in (str(path), f"pid {flock_holder.pid} ", "sleep 30"):
        assert part in str(busy.value)


def test_waits_until_the_holder_is_gone(path: Path, flock_holder: subprocess.Popen[bytes]) -> None:
    flock_holder.kill()
    lock = SeriesLock(path, "parity")
    lock.acquire(5)
    assert not is_free(path)
    lock.release()


def test_second_series_is_refused_with_the_note_of_the_first(path: Path) -> None:
    with held(path, "parity run-series quick.toml") as first, pytest.raises(LockBusy) as busy:
        SeriesLock(path, "parity").acquire(0)
    assert f"pid {os.getpid()} (parity run-series quick.toml), since 20" in str(busy.value)
    assert not first.note.exists()


def test_stale_note_is_not_named(path: Path, flock_holder: subprocess.Popen[bytes]) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    note = {"pid": gone.pid, "command": "long gone", "boot_id": lock_module.host.boot_id(), "start_ticks": 1, "since_utc": "2020"}
    path.with_name(path.name + ".holder").write_text(json.dumps(note))
    assert [holder.pid for holder in find_holder(path)] == [flock_holder.pid]


def test_note_of_a_later_process_with_the_same_pid_is_not_named(path: Path, flock_holder: subprocess.Popen[bytes]) -> None:
    note = {"pid": flock_holder.pid, "command": "long gone", "boot_id": lock_module.host.boot_id(), "start_ticks": 1, "since_utc": "2020"}
    path.with_name(path.name + ".holder").write_text(json.dumps(note))
    (holder,) = find_holder(path)
    assert "long gone" not in holder.command
    assert "sleep 30" in holder.command


def test_note_of_a_living_process_that_does_not_hold_it_is_not_named(path: Path, flock_holder: subprocess.Popen[bytes]) -> None:
    with held(path.with_name("another"), "me") as another:
        note = another.note.read_text()
    path.with_name(path.name + ".holder").write_text(note)
    assert [holder.pid for holder in find_holder(path)] == [flock_holder.pid]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "x"}', '{"pid": 1}'])
def test_broken_note_is_ignored(path: Path, text: str) -> None:
    path.with_name(path.name + ".holder").write_text(text)
    assert read_note(path) is None


def test_holder_is_found_by_descriptor_when_the_process_that_took_it_is_gone(path: Path) -> None:
    code = (
        "import os, subprocess, sys; from pathlib import Path; from harness.machine.lock import SeriesLock\n"
        f"lock = SeriesLock(Path({str(path)!r}), 'x'); lock.acquire(1)\n"
        "print(subprocess.Popen(['sleep', '30'], pass_fds=[lock.fd], stdout=-3, stderr=-3).pid, flush=True); os._exit(0)"
    )
    root = Path(lock_module.__file__).parents[2]
    sleeper = int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=root).stdout)
    try:
        with pytest.raises(LockBusy) as busy:
            SeriesLock(path, "parity").acquire(0)
        assert f"pid {sleeper} (sleep 30)" in str(busy.value)
    finally:
        os.kill(sleeper, signal.SIGKILL)


def test_release_leaves_the_lock_with_a_process_that_inherited_it(path: Path) -> None:
    lock = SeriesLock(path, "parity")
    lock.acquire(1)
    guard = subprocess.Popen(["sleep", "30"], pass_fds=[lock.fd])
    lock.release()
    assert not is_free(path)
    guard.kill()
    guard.wait()
    assert is_free(path)


def test_descriptor_is_not_inherited_unasked(path: Path) -> None:
    lock = SeriesLock(path, "parity")
    lock.acquire(1)
    child = subprocess.Popen(["sleep", "30"], close_fds=False)
    lock.release()
    assert is_free(path)
    child.kill()
    child.wait()


def test_verify_accepts_the_held_file_and_refuses_an_unlinked_or_replaced_one(path: Path) -> None:
    with held(path, "parity") as lock:
        lock.verify()
        path.unlink()
        with pytest.raises(LockLost, match="unlinked"):
            lock.verify()
        path.touch()
        with pytest.raises(LockLost, match="replaced"):
            lock.verify()


def test_symlink_is_refused(path: Path) -> None:
    path.symlink_to(path.with_name("elsewhere"))
    with pytest.raises(LockError, match=r"symlink.*remove it"):
        SeriesLock(path, "parity").acquire(0)


def test_fifo_is_refused_at_once(path: Path) -> None:
    os.mkfifo(path)
    with pytest.raises(LockError, match="not a regular file"):
        SeriesLock(path, "parity").acquire(0)


def test_a_note_that_is_a_symlink_is_replaced_not_followed(path: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("kept")
    path.with_name(path.name + ".holder").symlink_to(victim)
    with held(path, "parity"):
        pass
    assert victim.read_text() == "kept"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_unreadable_file_of_another_user_in_a_sticky_folder_says_how_to_cure_it() -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o1777)
        path = folder / "series.lock"
        path.touch(0o600)
        os.seteuid(65534)
        with pytest.raises(LockError) as error:
            SeriesLock(path, "parity").acquire(0)
        for part in (str(path), "uid 0 in a sticky folder", f"chmod 644 {path}", "PARITY_LOCK"):
            assert part in str(error.value)
    finally:
        os.seteuid(0)
        shutil.rmtree(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_two_users_share_one_lock_file() -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o1777)
        path = folder / "series.lock"
        with held(path, "root's"):
            os.seteuid(65534)
            with pytest.raises(LockBusy, match="root's"):
                SeriesLock(path, "parity").acquire(0)
            os.seteuid(0)
        os.seteuid(65534)
        with held(path, "nobody's"):
            pass
    finally:
        os.seteuid(0)
        shutil.rmtree(folder)


def test_configured_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PARITY_LOCK", raising=False)
    assert lock_path(None) == Path("/tmp/vllm-parity.lock")
    assert lock_path(tmp_path / "a") == tmp_path / "a"
    monkeypatch.setenv("PARITY_LOCK", str(tmp_path / "a"))
    assert lock_path(None) == lock_path(tmp_path / "a") == tmp_path / "a"
    with pytest.raises(LockError, match=r"/b by the option and .*/a by PARITY_LOCK"):
        lock_path(tmp_path / "b")


def test_record_holds_no_folder(path: Path) -> None:
    with held(path, "parity run-series") as lock:
        record = lock.record()
        state = path.stat()
    assert record["name"] == path.name
    assert (record["device"], record["inode"], record["pid"]) == (state.st_dev, state.st_ino, os.getpid())
    assert record["boot_id"] and record["acquired_utc"].startswith("20") and record["command"] == "parity run-series"
    assert str(path.parent) not in json.dumps(record)
    with pytest.raises(LockError, match="not held"):
        lock.record()
