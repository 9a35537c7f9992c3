"""Arrows run one way, and device words live in few places: read from the source, so that no import can slip by."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

MAY_IMPORT = {
    "harness": {"harness", "legs"},
    "legs": {"legs", "engine", "vllm", "torch"},
    "engine": {"engine", "torch", "triton", "safetensors"},
}
"""Of the packages that matter here, which ones each of ours may import."""
GUARDED = {"harness", "legs", "engine", "torch", "vllm", "triton", "safetensors", "transformers"}

NO_TORCH = ("request.py", "scheduler.py", "kv_cache.py")
DEVICE_WORD = re.compile(r"\bcuda\b|\bis_cuda\b|\bnvml\w*\b", re.IGNORECASE)
DEVICE_PLACES = (
    "engine/kernels/", "engine/graphs.py", "engine/runner.py", "harness/machine/gpu.py", "harness/machine/gpu_memory.py",
    "harness/machine/idle.py",
    "harness/machine/identity.py", "harness/doctor.py", "legs/drivers/vllm.py", "harness/oracle", "harness/series/arms.py",
)


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where an arrow points"
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_arrows_run_one_way(package: str) -> None:
    files = sources(package)
    assert files
    for path in files:
        tops = {name.split(".")[0] for name in imported(path)} & GUARDED
        assert tops <= MAY_IMPORT[package], f"{path.relative_to(ROOT)} imports {tops - MAY_IMPORT[package]}"


def test_harness_knows_only_the_protocol_of_legs() -> None:
    for path in sources("harness"):
        legs = {name for name in imported(path) if name.split(".")[0] == "legs"}
        assert legs <= {"legs.protocol"}, f"{path.relative_to(ROOT)} imports {legs}"


def test_only_drivers_know_an_engine() -> None:
    for path in sources("legs"):
        tops = {name.split(".")[0] for name in imported(path)} & {"engine", "vllm", "torch"}
        assert not tops or path.parent.name == "drivers", f"{path.relative_to(ROOT)} imports {tops}"


def test_scheduling_needs_no_torch() -> None:
    for name in NO_TORCH:
        assert not {i for i in imported(ROOT / "engine" / name) if i.split(".")[0] == "torch"}, name


def code_only(path: Path) -> str:
    """The source without comments and docstrings: words in prose are no device code."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            node.value.value = ""
    return ast.unparse(tree)


def test_device_words_live_in_few_places() -> None:
    for package in MAY_IMPORT:
        for path in sources(package):
            place = str(path.relative_to(ROOT))
            if not place.startswith(DEVICE_PLACES):
                assert not (found := DEVICE_WORD.findall(code_only(path))), f"{place}: {found}"


def test_the_command_line_loads_no_torch() -> None:
    """A harness that holds a device context would be a foreign process on its own card."""
    code = "import sys, harness.series.runner, harness.cli; sys.exit('torch' in sys.modules or 'vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_no_file_is_too_long() -> None:
    for package in (*MAY_IMPORT, "tools", "tests"):
        for path in sources(package):
            lines = len(path.read_text(encoding="utf-8").splitlines())
            assert lines <= 400, f"{path.relative_to(ROOT)}: {lines} lines"
