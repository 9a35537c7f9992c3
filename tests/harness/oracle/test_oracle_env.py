"""The toolkit an oracle compiles with, and versions that do not go together, in words that cure; check 15 is in test_checks_oracle.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness import oracle_env
from harness.machine.gpu import Gpu, GpuUnreadable
from harness.oracle import OracleError, load_oracle
from harness.oracle_env import Versions, diagnose_versions, read_versions, refuse_unfit, toolkit_version
from harness.series import arms
from tests.harness.machine.fake_nvml import FakeNvml

ROOT = Path(__file__).resolve().parents[3]
FIT = Versions(driver="13.2", toolkit="13.2", torch="13.0", extension="13", libc="2.39")


def toolkit(folder: Path, version: int = 13020) -> Path:
    """A toolkit as far as anyone looks at it; `version` as in cuda.h."""
    for name, text in (("bin/nvcc", "#!/bin/sh\n"), ("include/cuda.h", f"#ifndef X\n#define CUDA_VERSION {version}\n")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "bin" / "nvcc").chmod(0o755)
    return folder


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One card whose driver takes CUDA 13.2."""
    monkeypatch.setattr(oracle_env, "Gpu", lambda: Gpu(FakeNvml({}), ()))


def test_version_of_a_toolkit(tmp_path: Path) -> None:
    assert toolkit_version(toolkit(tmp_path / "old", 12090)) == "12.9"
    assert toolkit_version(tmp_path) is None


# --- an arm's environment ---


@pytest.fixture
def fake_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arms, "oracle_python", lambda *_: Path("python3"))
    monkeypatch.setattr(arms, "oracle_site", lambda *_: None)


def launch(name: str | None) -> arms.Launch:
    oracle = load_oracle(name, ROOT) if name else None
    arm = {"driver": "vllm" if name else "engine", "environment": {"OMP_NUM_THREADS": "2"}}
    return arms.launch(arm, Path("/stage"), Path("/model"), oracle, ROOT)


def test_the_chosen_toolkit_reaches_the_accelerators_oracle_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_oracle: None
) -> None:
    home = toolkit(tmp_path / "cuda")
    monkeypatch.setenv("VLLM_CUDA_HOME", str(home))
    pin, other, ours = launch("vllm-cuda"), launch("vllm-cpu"), launch(None)
    assert (pin.environment["CUDA_HOME"], pin.oracle_environment) == (str(home), {"state": "set", "toolkit": "13.2"})
    assert pin.environment["PATH"].startswith(f"{home}/bin:")
    for one in (other, ours):
        assert "CUDA_HOME" not in one.environment
        assert one.oracle_environment is None
    monkeypatch.delenv("VLLM_CUDA_HOME")
    assert launch("vllm-cuda").oracle_environment == {"state": "unset", "toolkit": None}


# --- versions ---


def test_versions_that_fit() -> None:
    assert diagnose_versions(FIT) == []
    assert diagnose_versions(replace(FIT, toolkit=None, extension=None, torch=None, libc=None)) == []


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"toolkit": "13.3"}, "toolkit 13.3 makes PTX that this driver rejects when it loads it (cudaErrorUnsupportedPtxVersion), after a "
                              "clean build: the driver takes CUDA 13.2 at most; name an older toolkit in VLLM_CUDA_HOME, or update the "
                              "driver"),
        ({"driver": "12.8", "toolkit": None}, "torch is built for CUDA 13.0, the driver takes CUDA 12.8 at most: update the driver"),
        ({"toolkit": "12.9", "extension": None}, "toolkit 12.9 and torch for CUDA 13.0 are of two majors, and mixed headers do not "
                                                 "compile: name a toolkit 13.x in VLLM_CUDA_HOME"),
        ({"extension": "12"}, "the oracle's extensions link libcudart.so.12, the toolkit is 13.2: name a toolkit 12.x in VLLM_CUDA_HOME"),
        ({"toolkit": "13.0", "libc": "2.42"}, "headers of toolkit 13.0 collide with those of glibc 2.42 (rsqrt): name a newer toolkit in "
                                              "VLLM_CUDA_HOME"),
        ({"driver": None}, "the driver's CUDA version is unreadable; check that nvidia-smi works for this user"),
    ],
)
def test_versions_that_do_not_go_together_are_diagnosed(changed: dict[str, str | None], reason: str) -> None:
    assert diagnose_versions(replace(FIT, **changed)) == [reason]


def test_a_table_is_read_and_refused_before_a_series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: None) -> None:
    """A 13.2 driver beside a 13.3 toolkit, which only the loading of a compiled kernel would show."""
    oracle = load_oracle("vllm-cuda", ROOT)
    extension = tmp_path / ".oracles" / "vllm-cuda" / "vllm" / "_C.abi3.so"
    extension.parent.mkdir(parents=True)
    extension.write_bytes(b"\x7fELF" + bytes(5000) + b"libcudart.so.13\0")
    environment = {"VLLM_CUDA_HOME": str(toolkit(tmp_path / "cuda", 13020)), "PATH": ""}
    versions = read_versions(oracle, tmp_path, environment)
    assert replace(versions, libc=None) == Versions(driver="13.2", toolkit="13.2", torch="13.0", extension="13", libc=None)
    assert refuse_unfit(oracle, tmp_path, environment) is not None
    toolkit(tmp_path / "cuda", 13030)
    with pytest.raises(OracleError, match=r"oracle vllm-cuda cannot run here: toolkit 13\.3 makes PTX .*CUDA 13\.2 at most"):
        refuse_unfit(oracle, tmp_path, environment)
    assert refuse_unfit(load_oracle("vllm-cpu", ROOT), tmp_path, environment) is None


def test_the_toolkit_on_the_path_is_the_one_an_arm_would_find(tmp_path: Path, gpu: None) -> None:
    home = toolkit(tmp_path / "cuda", 13010)
    assert read_versions(load_oracle("vllm-cuda", ROOT), tmp_path, {"PATH": f"/nowhere:{home}/bin"}).toolkit == "13.1"


def test_a_driver_that_cannot_be_asked_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Gpu):
        def identities(self) -> list[object]:  # type: ignore[override]
            raise GpuUnreadable("no")

    monkeypatch.setattr(oracle_env, "Gpu", lambda: Broken(FakeNvml({}), ()))
    with pytest.raises(OracleError, match="driver's CUDA version is unreadable"):
        refuse_unfit(load_oracle("vllm-cuda", ROOT), tmp_path, {"PATH": ""})
