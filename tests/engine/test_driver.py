"""The engine's leg, as the runner starts it: a staged copy, an empty-but-for-request folder, a process of its own."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import engine
from engine.errors import EngineError
from engine.kernels.dispatch import backends
from harness.series.arms import launch
from legs.drivers.engine import build, code_sha256
from legs.protocol import (
    COMMON_OPTIONS,
    MARK_NAMES,
    PROTOCOL,
    START_MARKS,
    LegRequest,
    Marks,
    check_result,
    read_marks,
    read_outputs,
    read_traces,
    sha256,
    to_gzip,
    to_json,
    write_request,
)
from tests.engine.checkpoints import prompt
from tests.engine.conftest import STEPS, Reference

ROOT = Path(engine.__file__).resolve().parent.parent
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "max_num_batched_tokens": 64, "max_num_seqs": 4, "max_model_len": 256, "block_size": 16,
    "num_blocks": 100, "enable_prefix_caching": False, "enable_chunked_prefill": True, "enforce_eager": True,
    "depth": 2, "threads": 1, "load": "direct",
}


def run_leg(folder: Path, reference: Reference, **options: Any) -> tuple[LegRequest, Path, subprocess.CompletedProcess[str]]:
    stage, leg = folder / "stage", folder / "leg"
    leg.mkdir(parents=True)
    for part in ("engine", "legs"):
        shutil.copytree(ROOT / part, stage / part, ignore=shutil.ignore_patterns("__pycache__"))
    prompts = [ids for ids in reference.prompts if len(ids) > 1]
    corpus = to_gzip(to_json({"name": "t", "source": "random", "vocab_size": 512, "prompts": prompts, "warmup": [prompt(20, 77)]}))
    (stage / "legs" / "corpora" / "t.json.gz").parent.mkdir(exist_ok=True)
    (stage / "legs" / "corpora" / "t.json.gz").write_bytes(corpus)
    request = LegRequest(
        protocol=PROTOCOL, leg="correctness/on", phase="correctness", arm="on", driver="engine", corpus="legs/corpora/t.json.gz",
        corpus_sha256=sha256(corpus), requests=len(prompts), warmup_requests=1, max_tokens=STEPS, min_tokens=STEPS, ignore_eos=True,
        concurrency=3, client="step", options={**OPTIONS, **options})
    write_request(leg, request)
    command = launch({"driver": "engine", "environment": {}}, stage, reference.folder, None, ROOT)
    done = subprocess.run(command.argv, cwd=leg, env=command.environment, capture_output=True, text=True, check=False)
    return request, leg, done


def result_of(leg: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((leg / "result.json").read_bytes())
    return result


@pytest.mark.parametrize(("depth", "load"), [(1, "staged"), (2, "direct")])
def test_a_leg_leaves_the_right_ids_and_says_what_ran(tmp_path: Path, references: dict[str, Reference], depth: int, load: str) -> None:
    reference = references["qwen3"]
    request, leg, done = run_leg(tmp_path, reference, depth=depth, load=load)
    assert done.returncode == 0, done.stderr
    result = result_of(leg)
    check_result(result, request)
    assert read_outputs(leg) == reference.ids[1:]
    assert all(len(trace.stamps) == STEPS and trace.finish == "length" for trace in read_traces(leg))
    marks = sorted(read_marks(leg), key=lambda mark: mark["t_ns"])
    started = ("imported", "load_start", *START_MARKS[:4], "loaded", "ready", "warmup_token", "warm")
    assert [mark["mark"] for mark in marks if mark["mark"] != "progress"] == [*started, *MARK_NAMES[5:]]
    assert {name: result["resolved"][name] for name in COMMON_OPTIONS} == {**OPTIONS, "depth": depth, "load": load}
    assert {name: result["resolved"][name] for name in ("attention_backend", "linear_backend")} == backends("cpu", torch.float32)
    counters = result["counters"]
    assert counters["sampler_calls"] == {"greedy": 0, "greedy_masked": counters["steps"]}
    assert 0 < counters["mixed_steps"] < counters["steps"]
    assert not [entry for entry in result["sys_path"] if entry.startswith("/")]
    assert result["device"]["kind"] == "cpu" and result["who"]["missing"] == []


def test_the_code_hash_follows_the_staged_code(tmp_path: Path, references: dict[str, Reference]) -> None:
    hashes = []
    for name, load in (("on", "direct"), ("off", "staged")):
        _, leg, _ = run_leg(tmp_path / name, references["llama"], load=load)
        hashes.append(result_of(leg)["who"]["record_sha256"])
    assert hashes[0] == hashes[1]
    (tmp_path / "on" / "stage" / "engine" / "loop.py").write_text("# changed\n")
    assert code_sha256(tmp_path / "off" / "stage") == hashes[0] != code_sha256(tmp_path / "on" / "stage")
    (tmp_path / "off" / "stage" / "engine" / "kernels" / "cpu" / "linear.cpp").write_text("// changed\n")
    assert code_sha256(tmp_path / "off" / "stage") != hashes[0]


def test_an_option_that_is_not_built_ends_the_leg_in_one_line(tmp_path: Path, references: dict[str, Reference]) -> None:
    _, leg, done = run_leg(tmp_path, references["llama"], depth=3)
    assert done.returncode == 1 and not (leg / "result.json").exists()
    assert done.stderr == "engine: depth is 3; built are 1, 2\n"


@pytest.mark.parametrize(("option", "value"), [
    ("enable_prefix_caching", True), ("enforce_eager", False), ("enable_chunked_prefill", False), ("speed", "high"),
])
def test_options_without_a_choice_are_refused_by_name(tmp_path: Path, references: dict[str, Reference], option: str, value: Any) -> None:
    request = LegRequest(
        protocol=PROTOCOL, leg="x", phase="performance", arm="on", driver="engine", corpus="c", corpus_sha256="0",
        requests=1, warmup_requests=0, max_tokens=4, min_tokens=4, ignore_eos=True, concurrency=1, client="step",
        options={**OPTIONS, option: value})
    with pytest.raises(EngineError, match=option):
        build(request, references["llama"].folder, Marks(tmp_path / "marks.jsonl"))


def test_the_version_is_the_distribution_s() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == engine.__version__


def test_every_common_option_is_reported() -> None:
    assert set(COMMON_OPTIONS) == OPTIONS.keys() and "options" in {field.name for field in dataclasses.fields(LegRequest)}
