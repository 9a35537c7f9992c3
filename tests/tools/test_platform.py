"""The readers of platform facts measure what they name: page residency, eviction, PSS of a tree; an error is recorded as one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.bench import platform_facts, platform_host

MIB = 1 << 20


def test_eviction_shows_in_the_resident_pages(tmp_path: Path) -> None:
    path = tmp_path / "file"
    if platform_host.file_system(tmp_path) in ("tmpfs", "ramfs"):
        pytest.skip("a memory file system keeps its pages")
    path.write_bytes(os.urandom(4 * MIB))
    assert platform_host.resident_pages(path) == 4 * MIB // platform_host.PAGE
    platform_host.evict(path)
    assert platform_host.resident_pages(path) == 0


def test_read_rate_refuses_a_short_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(3 * platform_host.BLOCK))
    assert platform_host.read_rate(path, 2, direct=False) > 0
    monkeypatch.setattr(os, "preadv", lambda *_: 1)
    with pytest.raises(OSError, match="3 of"):
        platform_host.read_rate(path, 2, direct=False)


def test_a_tree_pass_sees_the_child_and_its_memory() -> None:
    hold = "x = bytearray(64 << 20); print('held', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None and child.stdout.readline() == "held\n"
        told = platform_host.tree_pass(os.getpid(), repeats=2)
        alone = platform_host.tree_pass(child.pid, repeats=1)
        child.stdin.write("\n")
    assert len(told["processes"]) >= 2 and len(told["wall_ms"]) == 2
    assert alone["pss"] >= 64 * MIB and told["pss"] > alone["pss"]


def test_a_failing_section_holds_its_error_and_the_rest_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("no such card")

    monkeypatch.setattr(platform_facts, "sections", lambda _: {"first": fail, "second": lambda: {"value": 2}})
    out = tmp_path / "facts.json"
    assert platform_facts.main([str(out), "--commit", "abc"]) == 1
    record = json.loads(out.read_bytes())
    assert record["sections"]["first"]["error"] == "RuntimeError: no such card" and "value" not in record["sections"]["first"]
    assert record["sections"]["second"]["value"] == {"value": 2} and record["commit"] == "abc"


def test_an_unknown_section_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        platform_facts.main([str(tmp_path / "facts.json"), "--only", "nonsense"])
    assert "nonsense" in capsys.readouterr().err and not (tmp_path / "facts.json").exists()
