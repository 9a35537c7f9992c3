"""Random checkpoints: loadable, the same bytes each time, and sensitive enough that wrong arithmetic shows in the ids."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tools.bench.checkpoint import CheckpointError, build_checkpoint, recorded_sha256
from tools.bench.make_checkpoint import SHAPES, fill, tensors


def greedy(model: Any, prompt: list[int], n: int = 32) -> list[int]:
    out = model.generate(torch.tensor([prompt]), max_new_tokens=n, min_new_tokens=n, do_sample=False, use_cache=True)
    ids: list[int] = out[0, len(prompt):].tolist()
    return ids


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-llama"])
def test_outputs_vary_and_every_prompt_id_counts(name: str, tmp_path: Path) -> None:
    fill(SHAPES[name], tmp_path, shard_bytes=100_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    dice = random.Random(1)
    prompt = [dice.randrange(512) for _ in range(48)]
    outputs = greedy(model, prompt)
    assert len(set(outputs)) >= 16
    for position in dice.sample(range(48), 16):
        changed = [*prompt[:position], (prompt[position] + 7) % 512, *prompt[position + 1:]]
        assert greedy(model, changed) != outputs, f"id {position} of the prompt does not count"


def test_the_same_bytes_every_time_and_nothing_done_twice(tmp_path: Path) -> None:
    said: list[str] = []
    first = build_checkpoint(tmp_path / "a", lambda folder: fill(SHAPES["tiny-llama"], folder), None, said.append)
    second = build_checkpoint(tmp_path / "b", lambda folder: fill(SHAPES["tiny-llama"], folder), first, said.append)
    assert first == second == recorded_sha256(tmp_path / "b")
    build_checkpoint(tmp_path / "b", lambda folder: pytest.fail("made again"), first, said.append)
    assert "nothing to do" in said[-1]


def test_a_wrong_hash_keeps_nothing_and_an_incomplete_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected 00"):
        build_checkpoint(tmp_path / "a", lambda folder: fill(SHAPES["tiny-llama"], folder), "00", lambda _: None)
    assert list(tmp_path.iterdir()) == []
    good = build_checkpoint(tmp_path / "a", lambda folder: fill(SHAPES["tiny-llama"], folder), None, lambda _: None)
    shard = next((tmp_path / "a").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert recorded_sha256(tmp_path / "a") is None
    with pytest.raises(CheckpointError, match="incomplete"):
        build_checkpoint(tmp_path / "a", lambda folder: fill(SHAPES["tiny-llama"], folder), good, lambda _: None)


def test_qwen3_4b_has_its_published_size() -> None:
    shape = SHAPES["qwen3-4b"]
    layers = sum(torch.Size(size).numel() for name, size, _ in tensors(shape) if "layers" in name)
    assert (layers / 1e9, shape.vocab_size * shape.hidden_size / 1e6) == (pytest.approx(3.633, abs=1e-3), pytest.approx(389, abs=0.1))
