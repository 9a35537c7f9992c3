"""Machine and repository records."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path
from typing import Any

import pynvml
import pytest

from harness.machine import identity
from harness.machine.gpu import Gpu
from harness.machine.identity import machine_record, repository_record
from tests.harness.machine.fake_nvml import FakeNvml

GIT = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    run(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("one\n")
    run(tmp_path, "add", "file")
    run(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def run(folder: Path, *arguments: str) -> str:
    return subprocess.run([*GIT, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_clean_checkout_binds(checkout: Path) -> None:
    head = run(checkout, "rev-parse", "HEAD")
    assert repository_record(checkout) == {"commit": head, "dirty": False, "diff_sha256": None, "binding": True}


def test_every_kind_of_change_unbinds_and_has_its_own_hash(checkout: Path) -> None:
    (checkout / "file").write_text("two\n")
    changed = repository_record(checkout)
    run(checkout, "add", "file")
    staged = repository_record(checkout)
    (checkout / "new").write_text("a")
    untracked = repository_record(checkout)
    (checkout / "new").write_text("b")
    other = repository_record(checkout)
    for record in (changed, staged, untracked, other):
        assert record["dirty"] is True
        assert record["binding"] is False
        assert len(record["diff_sha256"]) == 64
    assert changed["diff_sha256"] == staged["diff_sha256"]
    assert len({record["diff_sha256"] for record in (changed, untracked, other)}) == 3


def test_no_checkout_is_null_and_does_not_bind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkout: Path) -> None:
    nothing: dict[str, Any] = {"commit": None, "dirty": None, "diff_sha256": None, "binding": False}
    assert repository_record(tmp_path / "nowhere") == nothing
    monkeypatch.setenv("PATH", "")
    assert repository_record(checkout) == nothing


def test_machine_hides_its_name() -> None:
    record = machine_record()
    assert record["boot_id"] and record["cpu"] and record["cores"] and record["memory_bytes"] and record["kernel"]
    text = json.dumps(record, allow_nan=False)
    if len(socket.gethostname()) > 3:
        assert socket.gethostname() not in text


@pytest.mark.parametrize(
    ("nvml", "gpus"),
    [
        (FakeNvml(init_error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND), []),
        (FakeNvml(init_error=pynvml.NVML_ERROR_UNKNOWN), None),
        (
            FakeNvml({"total": pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)}),
            [{"index": 0, "uuid": "GPU-0", "name": "Fake H200", "driver": "580.1", "cuda_driver": "13.2", "compute_capability": "9.0",
              "memory_total": None}],
        ),
    ],
)
def test_gpus_are_listed_or_empty_or_unknown(nvml: FakeNvml, gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "Gpu", lambda: Gpu(nvml, ()))
    assert machine_record()["gpus"] == gpus
