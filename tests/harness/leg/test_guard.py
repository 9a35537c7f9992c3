"""The guard on real process trees: nothing of a leg outlives it, and the lock is held until nothing is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import harness
from harness.leg import launch
from harness.leg.launch import LegProcess, start_leg
from harness.machine.lock import SeriesLock
from harness.machine.page_cache import evict

FLOCK = shutil.which("flock") or ""
ROOT = Path(harness.__file__).parents[1]

TREE = """
    import os, signal, subprocess, sys, threading, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    def daemon():
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                note(); time.sleep(60)
            os._exit(0)
        os.wait()
    def note():
        with open("pids", "a") as sink:
            sink.write(f"{os.getpid()}\\n")
    note()
    daemon()
    def worker():
        if os.fork() == 0:
            os.setsid(); note(); daemon(); time.sleep(60)
        time.sleep(60)
    threading.Thread(target=worker, daemon=True).start()
    while len(open("pids").read().split()) < 4:
        time.sleep(0.01)
    open("grown", "w").close()
"""
"""An arm of four processes: itself, a daemon, a worker thread's child in a session of its own, and that child's daemon."""


class Arm:
    """Starts arms in `folder`, under a lock there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = SeriesLock(folder / "series.lock", "test")
        self.lock.acquire(1)

    def __call__(self, *argv: str, timeout_s: float = 30.0, env: dict[str, str] | None = None) -> LegProcess:
        record, out, err = (self.folder / name for name in ("guard.json", "out", "err"))
        return start_leg(argv, env or {}, self.folder, self.lock.fd, timeout_s, record, out, err)

    def python(self, code: str, timeout_s: float = 30.0) -> LegProcess:
        return self(sys.executable, "-c", textwrap.dedent(code), timeout_s=timeout_s)

    def record(self) -> dict[str, Any]:
        return json.loads((self.folder / "guard.json").read_text())

    def pids(self) -> list[int]:
        return [int(pid) for pid in (self.folder / "pids").read_text().split()]


@pytest.fixture
def arm(tmp_path: Path) -> Any:
    arm = Arm(tmp_path)
    yield arm
    arm.lock.release()


def until(condition: Callable[[], object], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def is_free(path: Path) -> bool:
    return subprocess.run([FLOCK, "-n", str(path), "true"], check=False).returncode == 0


def test_clean_exit(arm: Arm) -> None:
    before = time.monotonic_ns()
    leg = arm("sh", "-c", "echo hello; echo oops >&2")
    assert leg.wait(10) == 0
    record = arm.record()
    assert record["guard_pid"] == leg.pid
    assert (record["schema"], record["reason"], record["returncode"], record["killed"]) == (1, "exit", 0, [])
    assert before < record["started_ns"] < record["ended_ns"] < time.monotonic_ns()
    assert (record["stdout_bytes"], record["stderr_bytes"]) == (6, 5)
    assert ((arm.folder / "out").read_text(), (arm.folder / "err").read_text()) == ("hello\n", "oops\n")
    assert leg.alive_fd is None


@pytest.mark.parametrize(("script", "returncode"), [("exit 3", 3), ("kill -SEGV $$", -signal.SIGSEGV)])
def test_failed_arm(arm: Arm, script: str, returncode: int) -> None:
    assert arm("sh", "-c", script).wait(10) == 1
    assert (arm.record()["reason"], arm.record()["returncode"]) == ("exit", returncode)


def test_arm_that_cannot_start(arm: Arm) -> None:
    assert arm("./no-such-program").wait(10) == 1
    record = arm.record()
    assert (record["reason"], record["returncode"], record["arm_pid"]) == ("not-started", None, None)
    assert "no-such-program" in record["error"]


@pytest.mark.parametrize("kind", ["file", "symlink"])
def test_output_is_never_written_over(arm: Arm, kind: str) -> None:
    victim = arm.folder / "victim"
    victim.write_text("kept")
    (arm.folder / "out").symlink_to(victim) if kind == "symlink" else victim.rename(arm.folder / "out")
    assert arm("echo", "lost").wait(10) == 1
    assert arm.record()["reason"] == "not-started"
    assert (arm.folder / "out").read_text() == "kept"


def test_bytes_read_from_storage_are_counted_over_the_whole_tree(arm: Arm) -> None:
    """The reader is the child of a child, both gone before the arm ends; its file is evicted first."""
    data = arm.folder / "data"
    data.write_bytes(os.urandom(4 << 20))
    assert evict([data])["proven"]
    reading = "sh -c 'cat data; true' | wc -c"
    assert arm("sh", "-c", reading).wait(20) == 0
    assert arm.record()["read_bytes"] >= 4 << 20
    for stream in ("out", "err"):
        (arm.folder / stream).unlink()
    assert arm("sh", "-c", reading).wait(20) == 0
    assert arm.record()["read_bytes"] < 4 << 20


def test_children_left_behind_are_killed_and_listed(arm: Arm) -> None:
    leg = arm.python(TREE)
    assert leg.wait(20) == 0
    record, pids = arm.record(), arm.pids()
    assert not any(map(lives, pids))
    assert (record["reason"], record["returncode"]) == ("exit", 0)
    assert {entry["pid"] for entry in record["killed"]} == set(pids) - {record["arm_pid"]}
    assert {entry["name"] for entry in record["killed"]} <= {"python", "python3", "python3.11", "python3.12"}


def test_timeout_kills_the_tree(arm: Arm) -> None:
    leg = arm.python(TREE + "\n    time.sleep(60)", timeout_s=1.5)
    assert leg.wait(15) == 124
    record, pids = arm.record(), arm.pids()
    assert (record["reason"], record["returncode"]) == ("timeout", None)
    assert 1.5e9 <= record["ended_ns"] - record["started_ns"] < 6e9
    assert len(pids) == 4
    assert not any(map(lives, pids))
    assert {entry["pid"] for entry in record["killed"]} == set(pids)


def test_terminate_returns_when_the_tree_is_gone(arm: Arm) -> None:
    leg = arm.python(TREE + "\n    time.sleep(60)")
    until((arm.folder / "grown").exists)
    assert leg.poll() is None
    assert leg.wait(0.05) is None
    started = time.monotonic()
    assert leg.terminate() == 143
    assert time.monotonic() - started < 5
    assert not any(map(lives, arm.pids()))
    assert (arm.record()["reason"], arm.record()["returncode"]) == ("terminated", None)
    assert leg.terminate() == 143


def test_terminate_at_once_still_leaves_a_record(arm: Arm) -> None:
    leg = arm("sleep", "60")
    assert leg.terminate() == 143
    assert arm.record()["reason"] == "terminated"


def test_lock_is_held_until_the_last_process_is_gone_when_the_runner_is_killed(tmp_path: Path) -> None:
    """kill -9 of a runner in the middle of a leg whose processes have sessions of their own and ignore SIGTERM."""
    code = f"""
        import sys, time
        from pathlib import Path
        from harness.leg.launch import start_leg
        from harness.machine.lock import SeriesLock
        folder = Path({str(tmp_path)!r})
        lock = SeriesLock(folder / "series.lock", "stand-in"); lock.acquire(1)
        leg = start_leg([sys.executable, "-c", {textwrap.dedent(TREE + "    time.sleep(60)")!r}], {{}}, folder, lock.fd, 60,
                        folder / "guard.json", folder / "out", folder / "err")
        (folder / "guard").write_text(str(leg.pid))
        time.sleep(60)
    """
    runner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT)
    try:
        until((tmp_path / "grown").exists)
    finally:
        started = time.monotonic()
        runner.kill()
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    guard = int((tmp_path / "guard").read_text())
    assert len(pids) == 4
    while not is_free(tmp_path / "series.lock"):
        assert time.monotonic() - started < 5
        time.sleep(0.002)
    assert not any(map(lives, pids)), "the lock was free while a process of the arm lived"
    until(lambda: not lives(guard), 5)
    runner.wait()
    record = json.loads((tmp_path / "guard.json").read_text())
    assert (record["reason"], record["returncode"]) == ("runner-died", None)
    assert {entry["pid"] for entry in record["killed"]} == set(pids)


def test_runner_death_is_seen_though_a_fork_of_it_keeps_the_pipe_open(tmp_path: Path) -> None:
    code = f"""
        import os, time
        from pathlib import Path
        from harness.leg.launch import start_leg
        def children(pid):
            return Path(f"/proc/{{pid}}/task/{{pid}}/children").read_text().split()
        folder = Path({str(tmp_path)!r})
        lock_fd = os.open(folder / "series.lock", os.O_CREAT | os.O_RDONLY)
        leg = start_leg(["sleep", "60"], {{}}, folder, lock_fd, 60, folder / "guard.json", folder / "out", folder / "err")
        while "sleep" not in "".join(Path(f"/proc/{{pid}}/comm").read_text() for pid in children(leg.pid)):
            time.sleep(0.01)
        time.sleep(0.3)  # the guard is waiting by now
        fork = os.fork()
        if fork:
            (folder / "fork.new").write_text(str(fork))
            os.rename(folder / "fork.new", folder / "fork")
        time.sleep(60)
    """
    runner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT)
    try:
        until((tmp_path / "fork").exists)
    finally:
        runner.kill()
        runner.wait()
    try:
        until((tmp_path / "guard.json").exists, 5)
        assert json.loads((tmp_path / "guard.json").read_text())["reason"] == "runner-died"
    finally:
        os.kill(int((tmp_path / "fork").read_text()), signal.SIGKILL)


def test_pipe_alone_tells_that_the_runner_died(arm: Arm) -> None:
    leg = arm("sleep", "60")
    assert leg._alive_fd is not None
    os.close(leg._alive_fd)
    leg._alive_fd = None
    assert leg.wait(5) == 137
    assert arm.record()["reason"] == "runner-died"


def test_lock_stays_with_the_guard_while_it_cannot_end(arm: Arm) -> None:
    """The guard alone keeps the lock: the runner lets go of it, and a stopped guard still holds it."""
    leg = arm("sleep", "60")
    until(lambda: _children(leg.pid))
    os.kill(leg.pid, signal.SIGSTOP)
    arm.lock.release()
    assert not is_free(arm.lock.path)
    os.kill(leg.pid, signal.SIGCONT)
    assert leg.terminate() == 143
    assert is_free(arm.lock.path)


def test_process_that_a_listing_of_proc_misses_is_still_killed_before_the_guard_ends(arm: Arm, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may fork while /proc is being listed: the guard ends when the kernel says that no child is left, not before."""
    blind = arm.folder / "blind_guard.py"
    blind.write_text(textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(launch.GUARD.parent)!r})
        import guard
        listings = [{{}}, {{}}]
        seeing = guard._descendants
        guard._descendants = lambda: listings.pop() if listings else seeing()
        raise SystemExit(guard.main())
    """))
    monkeypatch.setattr(launch, "GUARD", blind)
    leg = arm.python(TREE)
    assert leg.wait(20) == 0
    assert len(arm.pids()) == 4
    assert not any(map(lives, arm.pids()))


def test_guard_killed_takes_the_arm_with_it(arm: Arm) -> None:
    leg = arm("sleep", "60")
    until(lambda: [name(pid) for pid in _children(leg.pid)] == ["sleep"])
    (sleeper,) = _children(leg.pid)
    os.kill(leg.pid, signal.SIGKILL)
    assert leg.wait(5) == -signal.SIGKILL
    until(lambda: not lives(sleeper), 5)
    assert not (arm.folder / "guard.json").exists()


def test_arm_inherits_neither_lock_nor_pipe_nor_session(arm: Arm) -> None:
    leg = arm.python("""
        import os
        print(sorted(os.listdir('/proc/self/fd')))
        print(os.getsid(0) == os.getpid(), os.readlink('/proc/self/fd/0'))
    """)
    assert leg.wait(10) == 0
    assert (arm.folder / "out").read_text() == "['0', '1', '2', '3']\nTrue /dev/null\n"  # 3 is the listing itself


def test_environment_folder_and_signals_are_as_given(arm: Arm) -> None:
    assert arm("sh", "-c", "env; pwd; grep SigBlk /proc/self/status", env={"A": "1", "PATH": "/usr/bin:/bin"}).wait(10) == 0
    lines = (arm.folder / "out").read_text().splitlines()
    assert {line for line in lines if "=" in line and not line.startswith(("PWD=", "SHLVL=", "_="))} == {"A=1", "PATH=/usr/bin:/bin"}
    assert lines[-2:] == [str(arm.folder), "SigBlk:\t0000000000000000"]


def test_start_off_the_main_thread_is_refused(arm: Arm) -> None:
    errors: list[Exception] = []

    def start() -> None:
        try:
            arm("true")
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert len(errors) == 1
    assert "main thread" in str(errors[0])


def test_guard_names_itself(arm: Arm) -> None:
    leg = arm("sleep", "60")
    until(lambda: _children(leg.pid))
    assert Path(f"/proc/{leg.pid}/comm").read_text() == "parity-guard\n"
    leg.terminate()


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
