"""Tiny random Qwen3.5 checkpoints whose greedy output reacts to what it is given, made with transformers' own classes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3_5Config, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration, Qwen3_5TextConfig

from tests.engine.checkpoints import VOCAB, prompt, reference_greedy
from tests.engine.conftest import EOS, STEPS, Reference

VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4,
          "num_position_embeddings": 16}


def make_qwen3_5(
    folder: Path, *, whole: bool = False, seed: int = 3, dtype: torch.dtype = torch.float32, gain: float = 1.0, **overrides: Any
) -> Any:
    """Write a random checkpoint into `folder` and return transformers' model of it (of the written weights; float32, eval).

    `whole`: as Qwen3_5ForConditionalGeneration, vision tower and all, else Qwen3_5ForCausalLM.  The scales were found by trying: states
    that last over the whole prompt (decays from 0.9 to 0.999 a token), writes of every strength, gates on both sides of a half.  `gain`
    is what a layer adds beside what the stream holds: with little of it the ids hardly vary and rounding does not grow.  The norms' eps
    and the seed leave float32 a factor of two below 1e-5 even at a prompt's first token, where q . k may cancel and a norm raises the rest.
    """
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048, "rms_norm_eps": 1e-4, "tie_word_embeddings": True,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "eos_token_id": 2, "bos_token_id": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0],
                            "mrope_interleaved": True}, **overrides,
    }
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    if whole:
        model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(
            text_config=sizes, vision_config=VISION, tie_word_embeddings=sizes["tie_word_embeddings"], eos_token_id=2))
    else:
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes))
    with torch.no_grad():
        for name, weight in model.eval().named_parameters():
            if "visual" not in name:
                _draw(name, weight, gain, generator)
    model = model.to(dtype)
    model.save_pretrained(folder)
    return model.float()


def _draw(name: str, weight: torch.Tensor, gain: float, generator: torch.Generator) -> None:
    if name.endswith("linear_attn.norm.weight"):
        weight.uniform_(0.5, 1.5, generator=generator)
    elif "norm" in name:
        weight.uniform_(-0.5, 0.5, generator=generator)
    elif name.endswith("A_log"):
        weight.uniform_(-4, 0, generator=generator)
    elif name.endswith("dt_bias"):
        weight.uniform_(-3, 0, generator=generator)
    elif "embed" in name or "lm_head" in name:
        weight.normal_(0, 0.3, generator=generator)
    elif "conv1d" in name:
        weight.normal_(0, 0.6, generator=generator)
    else:
        scale = gain if "mlp" in name else 1.5 * gain if any(one in name for one in ("o_proj", "out_proj")) else 1.0
        weight.normal_(0, scale / weight.shape[1] ** 0.5, generator=generator)


def refer(folder: Path, lengths: Sequence[int], **options: Any) -> Reference:
    """Greedy ids and logits of the model in float64 (transformers computes norms and delta rule in float32 all the same): its float32
    is off by 1e-5 on the shortest prompts, which would leave no room for the engine's own rounding."""
    model = make_qwen3_5(folder, **options)
    exact = copy.deepcopy(model).double()
    prompts = [prompt(length, seed=length) for length in lengths]
    outputs = [reference_greedy(exact, ids, STEPS, (EOS,)) for ids in prompts]
    return Reference(folder, model, prompts, [ids for ids, _ in outputs], [logits for _, logits in outputs])
