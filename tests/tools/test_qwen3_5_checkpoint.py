"""Random Qwen3.5 checkpoints: the published size, loadable by both, sensitive, and states that neither fade nor grow."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.api import LLM, SamplingParams
from engine.models.build import MODELS
from engine.models.config import read_config
from legs.protocol import to_json
from tools.bench.make_checkpoint import SHAPES, config, fill, tensors
from tools.bench.qwen3_5_shape import HYBRID_SHAPES

VOCAB = 512


def prompt(length: int, seed: int = 1) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(VOCAB) for _ in range(length)]


def test_qwen3_5_4b_has_its_published_size(tmp_path: Path) -> None:
    """112.9 million parameters in a delta net layer, 107.5 in a full one, 635.7 in the embedding; and the tensors the engine asks for."""
    shape = HYBRID_SHAPES["qwen3.5-4b"]
    sizes = {name: size for name, size, _ in tensors(shape)}
    millions = [sum(math.prod(size) for name, size in sizes.items() if part in name) / 1e6 for part in ("layers.0.", "layers.3.", "embed")]
    assert millions == pytest.approx([112.9, 107.5, 635.7], abs=0.05)
    assert shape.layer_types.count("full_attention") == 8 and shape.layer_types[3] == shape.layer_types[31] == "full_attention"
    (tmp_path / "config.json").write_bytes(to_json(config(shape)))
    found = read_config(tmp_path)
    asked = MODELS[found.architecture].parameters(found)
    wanted = {name: (rows, *parameter.shape[1:]) for parameter in asked for name, rows in parameter.sources}
    assert sizes == wanted and found.rotary_dim == 64


def test_outputs_vary_every_prompt_id_counts_and_transformers_agrees(tmp_path: Path) -> None:
    fill(SHAPES["tiny-qwen3.5"], tmp_path, shard_bytes=100_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    llm = LLM(tmp_path, dtype="float32", max_num_seqs=17)
    ids = prompt(48)
    others = [[*ids[:at], (ids[at] + 7) % VOCAB, *ids[at + 1:]] for at in range(0, 48, 3)]
    params = SamplingParams(max_tokens=32, min_tokens=32, ignore_eos=True)
    found = [output.token_ids for output in llm.generate([ids, *others], params)]
    assert len(set(found[0])) >= 16
    assert all(other != found[0] for other in found[1:])
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    theirs = model.generate(torch.tensor([ids]), max_new_tokens=32, min_new_tokens=32, do_sample=False)
    assert theirs[0, 48:].tolist() == found[0]


def test_a_state_s_norm_per_head_stays_within_ten_times_from_token_128_to_1200(tmp_path: Path) -> None:
    """A cut of the real shape: its head sizes and decays, narrower and of four layers."""
    shape = dataclasses.replace(
        HYBRID_SHAPES["qwen3.5-4b"], hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=VOCAB, linear_num_key_heads=2, linear_num_value_heads=4)
    fill(shape, tmp_path)
    llm = LLM(tmp_path, dtype="float32", max_num_seqs=2, max_model_len=1280)
    ids = prompt(1200)
    llm.generate([ids[:128], ids], SamplingParams(max_tokens=1))
    for state in llm.runner.caches.states:
        early, late = state.recurrent.flatten(2).norm(dim=2)
        assert bool(early.isfinite().all()) and bool((early > 0).all())
        assert float((late / early).max()) < 10 and float((early / late).max()) < 10
