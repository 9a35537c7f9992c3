"""`parity doctor` runs a kernel of each extension where an arm would: right, wrong, rejected by the driver, crashed, or not at all."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import doctor
from harness.machine.lock import SeriesLock
from harness.oracle import load_oracle
from harness.series.arms import Launch
from legs.drivers import smoke

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock of the test's own, and a machine without a GPU and without oracles."""
    monkeypatch.setenv("PARITY_LOCK", str(tmp_path / "lock"))
    monkeypatch.setattr(doctor, "read_gpus", lambda: None)
    monkeypatch.setattr(doctor, "list_oracles", lambda _: [])


def interpreter(monkeypatch: pytest.MonkeyPatch, program: str) -> list[Any]:
    """Have every arm's interpreter run `program` instead of the kernels; returns what was launched."""
    asked: list[Any] = []

    def launch(arm: dict[str, Any], stage: Path, model: Path, oracle: Any, root: Path) -> Launch:
        asked.append((arm["driver"], oracle.name if oracle else None))
        return Launch(argv=[sys.executable, "-c", program, "-m", "driver"], environment={}, shown=[], oracle_environment=None)

    monkeypatch.setattr(doctor, "launch", launch)
    return asked


def line(kernel: str, ok: bool, detail: str) -> str:
    return f"print({json.dumps(json.dumps({'kernel': kernel, 'ok': ok, 'detail': detail}))}, flush=True)\n"


def test_the_engine_s_kernels_of_this_machine_run() -> None:
    ok, text = doctor._kernels(ROOT)
    assert ok, text
    assert text.startswith("engine on cpu: torch matmul ok (torch ") and "engine rms_norm ok (" in text


def test_a_kernel_that_the_driver_rejects_is_told_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter(monkeypatch, line("torch matmul", True, "torch 2") + line("Triton rms_norm", False, "E: cudaErrorUnsupportedPtxVersion"))
    assert doctor._kernels(ROOT) == (
        False, "engine on cpu: torch matmul ok (torch 2), Triton rms_norm FAILS (E: cudaErrorUnsupportedPtxVersion)")


@pytest.mark.parametrize(("program", "said"), [
    (line("torch matmul", True, "t") + "import os, sys; print('bad build', file=sys.stderr, flush=True); os.abort()",
     "torch matmul ok (t), then it ended with -6: bad build"),
    ("raise ImportError('no torch')", "then it ended with 1: ImportError: no torch"),
    ("pass", "then it ended with 0: no words"),
])
def test_an_interpreter_that_crashes_or_says_nothing_is_no_pass(program: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter(monkeypatch, program)
    assert doctor._kernels(ROOT) == (False, f"engine on cpu: {said}")


def test_each_oracle_that_is_installed_is_asked_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = interpreter(monkeypatch, line("torch matmul", True, "t"))
    monkeypatch.setattr(doctor, "read_gpus", lambda: ["card"])
    monkeypatch.setattr(doctor, "list_oracles", lambda _: [load_oracle(name, ROOT) for name in ("vllm-cpu", "vllm-cuda")])
    monkeypatch.setattr(doctor, "describe_oracle", lambda oracle, _: {"installed": oracle.name == "vllm-cuda"})
    assert doctor._kernels(ROOT) == (True, "engine on cuda: torch matmul ok (t); vllm-cuda on cuda: torch matmul ok (t)")
    assert asked == [("engine", None), ("vllm", "vllm-cuda")]


def test_nothing_is_run_while_a_series_holds_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = interpreter(monkeypatch, line("torch matmul", True, "t"))
    with SeriesLock(tmp_path / "lock", "a series") as lock:
        lock.acquire(0.0)
        ok, text = doctor._kernels(ROOT)
    assert not ok and text.startswith("not run: lock ") and asked == []


def test_a_wrong_result_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.kernels import dispatch

    assert smoke.run("rms_norm", smoke.rms_norm, "cpu")["ok"]
    monkeypatch.setattr(dispatch, "rms_norm", lambda x, weight, eps: x)
    found = smoke.run("rms_norm", smoke.rms_norm, "cpu")
    assert not found["ok"] and str(found["detail"]).startswith("RuntimeError: a wrong result: off by ")


def test_kernels_by_driver_and_device() -> None:
    assert {(driver, device): list(smoke.kernels(driver, device)) for driver in ("engine", "vllm") for device in ("cpu", "cuda")} == {
        ("engine", "cpu"): ["torch matmul", "engine rms_norm"], ("engine", "cuda"): ["torch matmul", "Triton rms_norm"],
        ("vllm", "cpu"): ["torch matmul", "vllm._C silu_and_mul"],
        ("vllm", "cuda"): ["torch matmul", "Triton rms_norm", "vllm._C silu_and_mul"],
    }
