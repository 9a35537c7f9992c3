"""The owner of one arm's process tree: starts it, watches the runner and the clock, kills the whole tree, and exits last.

A program of its own, standard library only, run as a plain file by :mod:`harness.leg.launch`.  It holds the series lock's inherited
descriptor while it lives, so the lock is never free while a process of an arm is: as child subreaper it adopts every orphan of its tree,
and it ends only when the kernel says that it has no child left.

Exit status: 0 the arm ended with status 0, 1 it failed or could not be started, 124 timeout, 137 the runner died, 143 terminated.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import select
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

SCHEMA = 1
EXIT = {"timeout": 124, "runner-died": 137, "terminated": 143, "not-started": 1}
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Leg:
    """What happened to the arm, as the record tells it."""

    started_ns: int = 0
    arm_pid: int | None = None
    status: int | None = None
    """The arm's wait status once it is reaped."""
    reason: str = "exit"
    error: str | None = None
    killed: dict[int, str] = field(default_factory=dict)
    read_before: int | None = None

    def exit_code(self) -> int:
        return EXIT[self.reason] if self.reason in EXIT else int(self.status != 0)


def main(argv: list[str] | None = None) -> int:
    arguments = _parse(argv)
    _prctl(_PR_SET_NAME, ctypes.c_char_p(b"parity-guard"))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # Besides the pipe: a process that the runner forked without exec would keep the pipe's other end open.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write)
    signals: set[int] = set()
    for number in (*_SIGNALS, signal.SIGCHLD):
        signal.signal(number, lambda number, _: signals.add(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    leg = Leg(started_ns=time.monotonic_ns(), read_before=_read_bytes())
    try:
        _start(leg, arguments)
        if leg.arm_pid is not None:
            _watch(leg, arguments, signals, wake_read)
    finally:
        _kill_tree(leg)
    _write_record(leg, arguments)
    return leg.exit_code()


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lock-fd", type=int, required=True)
    parser.add_argument("--alive-fd", type=int, required=True, help="read end of a pipe whose other end the runner keeps")
    parser.add_argument("--runner-pid", type=int, required=True)
    parser.add_argument("--timeout", type=float, required=True, help="seconds")
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--stdout", type=Path, required=True)
    parser.add_argument("--stderr", type=Path, required=True)
    parser.add_argument("argv", nargs="+")
    return parser.parse_args(argv)


def _start(leg: Leg, arguments: argparse.Namespace) -> None:
    """Start the arm in a session of its own, with no descriptor of ours but its three streams."""
    guard = os.getpid()
    try:
        with open(os.open(arguments.stdout, _new_file()), "wb") as out, open(os.open(arguments.stderr, _new_file()), "wb") as err:
            arm = subprocess.Popen(
                arguments.argv,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                close_fds=True,
                start_new_session=True,
                preexec_fn=lambda: _follow(guard),  # noqa: PLW1509  # the guard has one thread
            )
    except (OSError, subprocess.SubprocessError) as error:
        leg.reason, leg.error = "not-started", str(error)
        return
    leg.arm_pid = arm.pid
    arm.returncode = 0  # reaped below, with the orphans


def _follow(guard: int) -> None:
    """In the arm, before it runs: die when the guard does, and at once if it has died already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(leg: Leg, arguments: argparse.Namespace, signals: set[int], wake_read: int) -> None:
    """Return when the arm's main process ended, the runner died, we were told to end it, or its time is over."""
    deadline = time.monotonic() + arguments.timeout
    poll = select.poll()
    poll.register(arguments.alive_fd, select.POLLIN)
    poll.register(wake_read, select.POLLIN)
    ready: set[int] = set()
    while True:
        _reap(leg)
        if leg.status is not None:
            return
        remaining = deadline - time.monotonic()
        if arguments.alive_fd in ready or os.getppid() != arguments.runner_pid:
            leg.reason = "runner-died"
        elif signals.intersection(_SIGNALS):
            leg.reason = "terminated"
        elif remaining <= 0:
            leg.reason = "timeout"
        if leg.reason != "exit":
            return
        ready = {fd for fd, _ in poll.poll(min(remaining, 3600.0) * 1000)}
        if wake_read in ready:
            os.read(wake_read, 4096)


def _reap(leg: Leg) -> bool:
    """Reap every dead child, adopted ones too.  False when no child is left, dead or alive."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        if pid == leg.arm_pid:
            leg.status = status


def _kill_tree(leg: Leg) -> None:
    """Kill all descendants until waitpid says that there is none: whatever forks meanwhile is adopted and found in the next round."""
    while _reap(leg):
        for pid, name in _descendants().items():
            leg.killed.setdefault(pid, name)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def _descendants() -> dict[int, str]:
    """Name by pid of every living process below this one.  The parent in /proc/PID/stat is a process, whichever thread of it forked."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                head, _, tail = Path("/proc", entry, "stat").read_text(errors="replace").rpartition(")")
                state, parent = tail.split()[:2]
                parents[int(entry)] = int(parent)
                if state not in "ZX":
                    names[int(entry)] = head.partition("(")[2]
    found: dict[int, str] = {}
    for pid, name in names.items():
        ancestor = parents[pid]
        while ancestor in parents and ancestor != os.getpid():
            ancestor = parents[ancestor]
        if ancestor == os.getpid():
            found[pid] = name
    return found


def _write_record(leg: Leg, arguments: argparse.Namespace) -> None:
    returncode = os.waitstatus_to_exitcode(leg.status) if leg.reason == "exit" and leg.status is not None else None
    read = _read_bytes()
    record = {
        "schema": SCHEMA,
        "guard_pid": os.getpid(),
        "arm_pid": leg.arm_pid,
        "started_ns": leg.started_ns,
        "ended_ns": time.monotonic_ns(),
        "returncode": returncode,
        "reason": leg.reason,
        "error": leg.error,
        "killed": [{"pid": pid, "name": name} for pid, name in sorted(leg.killed.items())],
        "stdout_bytes": _size(arguments.stdout),
        "stderr_bytes": _size(arguments.stderr),
        "read_bytes": None if read is None or leg.read_before is None else read - leg.read_before,
    }
    scratch = arguments.record.with_name(f".{arguments.record.name}.{os.getpid()}")
    with open(os.open(scratch, _new_file()), "w", encoding="utf-8") as sink:
        sink.write(json.dumps(record, indent=2, sort_keys=True) + "\n")
        sink.flush()
        os.fsync(sink.fileno())
    os.replace(scratch, arguments.record)


def _read_bytes() -> int | None:
    """Bytes that this process and every process it has reaped, with all that those reaped, fetched from storage (proc(5), PID/io)."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.partition(":")[2]) for line in lines if line.startswith("read_bytes:")), None)


def _size(path: Path) -> int | None:
    try:
        return os.lstat(path).st_size
    except OSError:
        return None


def _new_file() -> int:
    return os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def _environment() -> dict[bytes, bytes]:
    """The environment exactly as given to us: the interpreter may have added LC_CTYPE to its own (PEP 538)."""
    items = Path("/proc/self/environ").read_bytes().split(b"\0")
    return {name: value for name, equals, value in (item.partition(b"=") for item in items) if equals}


def _prctl(option: int, value: int | ctypes.c_char_p) -> None:
    if _libc.prctl(option, value if isinstance(value, ctypes.c_char_p) else ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


if __name__ == "__main__":
    raise SystemExit(main())
