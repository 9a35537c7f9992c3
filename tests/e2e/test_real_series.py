"""The main job on real input: our engine and the real oracle on the real model, killed in the middle and resumed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.toy import LOCK_VARIABLE, ROOT

pytestmark = [pytest.mark.oracle, pytest.mark.slow]


def small_spec(folder: Path) -> Path:
    """quick.toml with the least work that still fills its batch: 4 prompts, 8 ids each, one repetition, two arms."""
    text = (ROOT / "legs" / "series" / "quick.toml").read_text(encoding="utf-8")
    for pattern, new in (
        (r"requests = 16", "requests = 4"), (r"prompt_tokens = 2048", "prompt_tokens = 512"), (r"max_tokens = 32", "max_tokens = 8"),
        (r"min_tokens = 32", "min_tokens = 8"), (r"memory = 1", "memory = 0"), (r"performance = 3", "performance = 1"),
        (r"\[arms\.off\][\s\S]*?(?=\[arms\.pin\])", ""), (r"pairs = .*", 'pairs = [["on", "pin"]]'), (r"\[correctness\][\s\S]*", ""),
    ):
        text, found = re.subn(pattern, new, text, count=1)
        assert found, pattern
    path = folder / "small.toml"
    path.write_text(text, encoding="utf-8")
    return path


def start(folder: Path, *arguments: str | Path) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "harness.cli", "run-series", str(small_spec(folder)), *map(str, arguments)]
    environment = {**os.environ, LOCK_VARIABLE: str(folder / "lock")}
    return subprocess.Popen(argv, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lock_is_free(folder: Path) -> bool:
    return subprocess.run(["flock", "-n", str(folder / "lock"), "true"], check=False).returncode == 0


def processes_in(folder: Path) -> list[str]:
    """Commands of living processes that work in a folder of the series or below it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if Path(os.readlink(entry / "cwd")).is_relative_to(folder):
                    found.append((entry / "comm").read_text().strip())
            except OSError:
                continue
    return found


def mark_of(leg: Path, mark: str) -> bool:
    marks = leg / "marks.jsonl"
    return marks.exists() and f'"{mark}"' in marks.read_text(encoding="utf-8")


@pytest.mark.timeout(420)
def test_kill_9_in_a_real_oracle_leg_holds_the_lock_until_all_is_gone_and_the_series_resumes(tmp_path: Path) -> None:
    series = tmp_path / "out"
    leg = series / "warmup" / "attempt-1" / "pin"
    with start(tmp_path, "--out", series) as runner:
        while not mark_of(leg, "ready"):
            assert runner.poll() is None, runner.communicate()[1]
            time.sleep(0.1)
        alive = processes_in(series)
        assert len(alive) >= 3, f"driver, engine core and worker were expected, found {alive}"
        assert not lock_is_free(tmp_path)
        runner.send_signal(signal.SIGKILL)
        runner.wait()
        killed = time.monotonic()
        while not lock_is_free(tmp_path):
            assert time.monotonic() - killed < 5, f"the lock is still held; alive: {processes_in(series)}"
            time.sleep(0.02)
        assert processes_in(series) == [], "the lock was free while an arm lived"
    with start(tmp_path, "--resume", series) as runner:
        _, said = runner.communicate(timeout=300)
    assert runner.returncode == 2, said
    summary = json.loads((series / "summary.json").read_bytes())
    assert summary["arms"]["pin"]["role"] == "eager"
    assert any("no verdict: eager" in reason for reason in summary["reasons"])
    assert [row["status"] for row in summary["attempts"] if row["phase"] == "warmup"] == ["interrupted", "ok"]
    assert all(row["identical"] == row["of"] for row in summary["tokens"] if row["gated"])
    assert summary["arms"]["pin"]["who"]["name"] == "vllm"
