"""The one lock a series holds from its first gate to its last leg.

The lock is flock(2), so it excludes flock(1) both ways.  It lives with the open file description: every guard inherits the descriptor,
and the lock is free only when the runner and the last guard have closed it.  For that reason nothing here ever unlocks: closing is the
only release, since LOCK_UN in the runner would also free the lock under a guard that still holds it.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from filelock import lock_descriptor

from harness.machine import host

DEFAULT_LOCK = Path("/tmp/vllm-parity.lock")
LOCK_VARIABLE = "PARITY_LOCK"
_POLL_S = 0.05


class LockError(Exception):
    """The lock cannot be used as configured; the message names the path and the cure."""


class LockBusy(LockError):
    """Another process holds the lock; the message names the path and, where it can be known, the holder."""


class LockLost(LockError):
    """The path no longer leads to the file that is locked, so another series could lock the new one."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who holds a lock.  `start_ticks` (field 22 of /proc/PID/stat) tells a process from a later one with the same pid."""

    pid: int
    command: str
    boot_id: str | None
    start_ticks: int | None
    since_utc: str | None

    def __str__(self) -> str:
        since = f", since {self.since_utc}" if self.since_utc else ""
        return f"pid {self.pid} ({self.command}){since}"


def lock_path(flag: Path | None) -> Path:
    """The configured lock: `flag`, else the environment's PARITY_LOCK, else :data:`DEFAULT_LOCK`.

    Raises LockError when both are given and differ: two configured paths would be two locks.
    """
    variable = os.environ.get(LOCK_VARIABLE)
    if flag and variable and flag.absolute() != Path(variable).absolute():
        raise LockError(f"two locks are configured, {flag} by the option and {variable} by {LOCK_VARIABLE}: give one, or both the same")
    return (flag or (Path(variable) if variable else DEFAULT_LOCK)).absolute()


class SeriesLock:
    """An exclusive flock(2) on `path`, with a note beside it (`PATH.holder`) that tells others who holds it.

    `command` is what the note says is running.  `with` takes nothing, it releases at its end: acquire() inside it says how long to wait.
    The descriptor :attr:`fd` is for guards (`pass_fds`); it is closed on exec otherwise.
    """

    def __init__(self, path: Path, command: str) -> None:
        self.path = path.absolute()
        self.command = command
        self._fd: int | None = None
        self._holder: Holder | None = None

    @property
    def fd(self) -> int:
        """The locked descriptor; LockError when the lock is not held."""
        if self._fd is None:
            raise LockError(f"{self.path}: the lock is not held")
        return self._fd

    @property
    def note(self) -> Path:
        """Where the holder's note lies."""
        return _note(self.path)

    def acquire(self, timeout_s: float | None) -> None:
        """Take the lock within `timeout_s` seconds (None: wait for ever; 0: try once), or raise LockBusy naming the holder."""
        if self._fd is not None:
            raise LockError(f"{self.path}: the lock is held already")
        started = time.monotonic()
        while True:
            fd = _open(self.path)
            if _try_lock(fd, self.path):
                break
            os.close(fd)
            waited = time.monotonic() - started
            if timeout_s is not None and waited >= timeout_s:
                raise LockBusy(_busy_message(self.path, waited))
            time.sleep(_POLL_S)
        self._fd = fd
        pid = os.getpid()
        times = host.process_times(pid)
        self._holder = Holder(
            pid=pid,
            command=self.command,
            boot_id=host.boot_id(),
            start_ticks=times.start_ticks if times else None,
            since_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        self._write_note(self._holder)

    def record(self) -> dict[str, Any]:
        """What evidence keeps of the lock: the file's name (never its folder), device, inode and the holder."""
        state = os.fstat(self.fd)
        assert self._holder is not None
        return {
            "name": self.path.name,
            "device": state.st_dev,
            "inode": state.st_ino,
            "pid": self._holder.pid,
            "command": self._holder.command,
            "boot_id": self._holder.boot_id,
            "acquired_utc": self._holder.since_utc,
        }

    def verify(self) -> None:
        """Raise LockLost unless the path still leads to the very file that is locked."""
        held = os.fstat(self.fd)
        try:
            found = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            raise LockLost(f"{self.path}: the lock file was unlinked while held; another series could now start") from None
        if not os.path.samestat(held, found):
            raise LockLost(
                f"{self.path}: the lock file was replaced while held (inode {held.st_ino} is locked, the path leads to "
                f"{found.st_ino}); another series could now start"
            )

    def release(self) -> None:
        """Close the descriptor and take the note away.  The lock is free once every guard has closed its copy too."""
        if self._fd is None:
            return
        if read_note(self.path) == self._holder:
            with suppress(OSError):
                self.note.unlink()
        os.close(self._fd)
        self._fd = self._holder = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    def _write_note(self, holder: Holder) -> None:
        """Best effort: the note serves other people's messages, and find_holder() does without one."""
        scratch = self.note.with_name(f".{self.note.name}.{holder.pid}")
        with suppress(OSError):
            scratch.unlink(missing_ok=True)
            descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
            with os.fdopen(descriptor, "w", encoding="utf-8") as sink:
                json.dump(asdict(holder), sink)
            try:
                os.replace(scratch, self.note)
            except OSError:
                scratch.unlink()


def find_holder(path: Path) -> list[Holder]:
    """Who holds the flock on `path`, as far as can be known: the living writer of the note, else the process that /proc/locks names,
    else those whose descriptor holds it (guards that outlived their runner).  Empty when nothing readable tells.
    """
    try:
        state = os.stat(path, follow_symlinks=False)
    except OSError:
        return []
    pids = _flock_pids(state)
    note = read_note(path)
    if note is not None and _is_alive(note) and note.pid in (pids or [note.pid]):
        return [note]
    pids = pids or list(_pids_with_locked_fd(state))
    return [Holder(pid=pid, command=host.command_line(pid), boot_id=None, start_ticks=None, since_utc=None) for pid in pids]


def read_note(path: Path) -> Holder | None:
    """The note beside the lock `path`, or None when there is none that can be read."""
    try:
        descriptor = os.open(_note(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, encoding="utf-8") as source:
            note = Holder(**json.loads(source.read(1 << 16)))
    except (OSError, ValueError, TypeError):
        return None
    return note if isinstance(note.pid, int) and note.pid > 0 else None


def _note(path: Path) -> Path:
    return path.with_name(f"{path.name}.holder")


def _is_alive(holder: Holder) -> bool:
    times = host.process_times(holder.pid)
    return times is not None and holder.boot_id == host.boot_id() and holder.start_ticks == times.start_ticks


def _open(path: Path) -> int:
    """Open the lock file, making it when it is not there.

    Existing files are opened without O_CREAT and for reading alone: flock(2) needs no more, and in a sticky folder the kernel refuses
    O_CREAT on another user's file, even to root (fs.protected_regular).
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        try:
            fd = os.open(path, flags)
        except FileNotFoundError:
            fd = os.open(path, flags | os.O_CREAT, 0o644)
            with suppress(PermissionError):
                os.fchmod(fd, 0o644)
    except OSError as error:
        raise LockError(_open_message(path, error)) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise LockError(f"{path}: not a regular file; choose another lock with --lock or {LOCK_VARIABLE}")
    return fd


def _open_message(path: Path, error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return f"{path}: is a symlink, which could lead two series to two files; remove it or name its target"
    message = f"{path}: cannot be opened as the lock file: {error.strerror}"
    if error.errno in (errno.EACCES, errno.EPERM):
        with suppress(OSError):
            owner = os.stat(path, follow_symlinks=False).st_uid
            sticky = " in a sticky folder" if os.stat(path.parent).st_mode & stat.S_ISVTX else ""
            message += f"; it belongs to uid {owner}{sticky}: let that user run `chmod 644 {path}` or remove it"
        message += f", or choose one lock for all users of this machine with --lock or {LOCK_VARIABLE}"
    return message


def _try_lock(fd: int, path: Path) -> bool:
    """Lock `fd`; False when another holds it, or when the path no longer leads to it (it was unlinked between open and lock)."""
    try:
        if not lock_descriptor(fd, blocking=False):
            return False
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
    except OSError as error:
        os.close(fd)
        raise LockError(f"{path}: flock(2) failed: {error.strerror}; put the lock on a local file system") from None


def _busy_message(path: Path, waited_s: float) -> str:
    holders = find_holder(path)
    named = "; ".join(str(holder) for holder in holders) if holders else "a process that this user cannot see"
    return f"lock {path} is held by {named}; gave up after {waited_s:.1f} s"


def _flock_pids(state: os.stat_result) -> list[int]:
    """Living processes that /proc/locks gives for a held FLOCK on this inode; it goes on naming one that took the lock and died.
    Some file systems show another device number there than stat(2) does, so the device decides only where it matches at all.
    """
    exact, loose = [], []
    for line in host.read_text("locks").splitlines():
        fields = line.split()
        if len(fields) < 6 or fields[1] != "FLOCK":
            continue
        major, minor, inode = fields[5].split(":")
        if int(inode) == state.st_ino and host.process_times(pid := int(fields[4])):
            loose.append(pid)
            if os.makedev(int(major, 16), int(minor, 16)) == state.st_dev:
                exact.append(pid)
    return exact or loose


def _pids_with_locked_fd(state: os.stat_result) -> Iterator[int]:
    """Processes with a descriptor that holds a lock on this inode: /proc/PID/fdinfo shows it even when the process that took it is gone."""
    for pid in host.pids():
        folder = Path(f"/proc/{pid}/fd")
        with suppress(OSError):
            for name in os.listdir(folder):
                if os.path.samestat(os.stat(folder / name), state) and "lock:" in Path(f"/proc/{pid}/fdinfo/{name}").read_text():
                    yield pid
                    break
