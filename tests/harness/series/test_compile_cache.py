"""The caches of just-in-time compilers: where they are, whether they grew, when, and what is said when they cannot be read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.series.compile_cache import cache_folders, cache_state, compiled_anew


def environment(home: Path) -> dict[str, str]:
    return {"HOME": str(home), "TMPDIR": str(home / "tmp")}


def test_a_variable_of_the_arm_s_own_environment_wins_over_the_default(tmp_path: Path) -> None:
    found = cache_folders(environment(tmp_path))
    assert found["inductor"].parent == tmp_path / "tmp" and found["inductor"].name.startswith("torchinductor_")
    assert found["triton"] == tmp_path / ".triton" / "cache" and found["vllm"] == tmp_path / ".cache" / "vllm"
    assert found["engine"] == tmp_path / ".cache" / "vllm-parity"
    assert found["flashinfer"] == tmp_path / ".cache" / "flashinfer"
    own = {"TORCHINDUCTOR_CACHE_DIR": "/a", "TRITON_CACHE_DIR": "/b", "VLLM_CACHE_ROOT": "/c", "FLASHINFER_WORKSPACE_BASE": "/d"}
    found = cache_folders({**environment(tmp_path), **own})
    assert [str(found[name]) for name in ("inductor", "triton", "vllm", "flashinfer")] == ["/a", "/b", "/c", "/d/.cache/flashinfer"]


def test_growth_is_noted_with_the_cache_s_state_and_place_and_nothing_else_is(tmp_path: Path) -> None:
    before = cache_state(environment(tmp_path))
    assert before["triton"] == {"files": 0, "bytes": 0, "newest_ns": 0}
    kernel = tmp_path / ".triton" / "cache" / "abc" / "kernel.cubin"
    kernel.parent.mkdir(parents=True)
    kernel.write_bytes(b"12345")
    os.utime(kernel, ns=(50, 50))
    after = cache_state(environment(tmp_path))
    assert after["triton"] == {"files": 1, "bytes": 5, "newest_ns": 50}
    note = "compile cache triton (cold before): the arm compiled anew, 0 to 1 files, the last of them {} its measured window"
    assert compiled_anew(before, after, (40, 60)) == [note.format("WITHIN")]
    assert compiled_anew(before, after, (60, 90)) == compiled_anew(before, after, None) == [note.format("outside")]
    assert compiled_anew(after, after, (40, 60)) == []
    kernel.write_bytes(b"123456")
    assert compiled_anew(after, cache_state(environment(tmp_path)), None)[0].startswith("compile cache triton (warm before): ")


def test_a_cache_that_cannot_be_read_is_null_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".cache" / "vllm").mkdir(parents=True)
    before = cache_state(environment(tmp_path))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "no")

    monkeypatch.setattr(os, "scandir", refuse)
    after = cache_state(environment(tmp_path))
    assert after["vllm"] is None and after["triton"] is not None
    assert compiled_anew(before, after, None) == ["compile cache vllm: cannot be read, so whether the arm compiled is not known"]
