"""Starts a leg under its guard, and ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

GUARD = Path(__file__).with_name("guard.py")


class LegProcess:
    """A running guard and the arm below it.  When this process dies, however it dies, the guard kills the arm's whole tree."""

    def __init__(self, guard: subprocess.Popen[bytes], alive_fd: int) -> None:
        self._guard = guard
        self._alive_fd: int | None = alive_fd

    @property
    def pid(self) -> int:
        """The guard's pid: the root of the leg's process tree."""
        return self._guard.pid

    @property
    def alive_fd(self) -> int | None:
        """The end of the pipe that tells the guard that the runner lives; None once the guard is gone."""
        return self._alive_fd

    def poll(self) -> int | None:
        """The guard's exit status (see :mod:`harness.leg.guard`), or None while it lives."""
        status = self._guard.poll()
        if status is not None:
            self._close()
        return status

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait `timeout` seconds (None: for ever) for the guard to be gone; its exit status, or None when it still lives."""
        try:
            self._guard.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        return self.poll()

    def terminate(self) -> int:
        """Have the guard kill the tree; returns its exit status when all of it is gone."""
        if self.poll() is None:
            self._guard.send_signal(signal.SIGTERM)
        self._guard.wait()
        status = self.poll()
        assert status is not None
        return status

    def _close(self) -> None:
        if self._alive_fd is not None:
            os.close(self._alive_fd)
            self._alive_fd = None


def start_leg(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: Path,
    lock_fd: int,
    timeout_s: float,
    record: Path,
    stdout: Path,
    stderr: Path,
) -> LegProcess:
    """Start `argv` under a guard, with exactly the environment `env`, in `cwd`.

    The guard keeps `lock_fd` open while any process of the leg lives and leaves `record` (guard.json); `stdout` and `stderr` take the
    arm's output and must not exist.  Raises RuntimeError off the main thread: the guard's parent-death signal fires when the *thread*
    that forked it ends.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("start_leg must be called from the main thread: the guard's parent-death signal follows the forking thread")
    alive_read, alive_write = os.pipe2(os.O_CLOEXEC)
    command = [sys.executable, "-I", "-S", str(GUARD), "--lock-fd", str(lock_fd), "--alive-fd", str(alive_read)]
    command += ["--runner-pid", str(os.getpid()), "--timeout", str(timeout_s), "--record", str(record.absolute())]
    command += ["--stdout", str(stdout.absolute()), "--stderr", str(stderr.absolute())]
    # Blocked until the guard has its handlers, so that a terminate() at once is not a guard that dies without a record.
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    try:
        guard = subprocess.Popen(
            [*command, "--", *argv],
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=True,
            pass_fds=(lock_fd, alive_read),
            start_new_session=True,
        )
    except BaseException:
        os.close(alive_write)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        os.close(alive_read)
    return LegProcess(guard, alive_write)
