"""Tiny random checkpoints of both architectures whose greedy output reacts to what it is given, made with transformers' own classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

ARCHITECTURES = ("llama", "qwen3")
VOCAB = 512


def make_checkpoint(
    folder: Path, architecture: str, seed: int = 0, shard: str = "1GB", dtype: torch.dtype = torch.float32, gain: float = 2.0,
    **overrides: Any,
) -> Any:
    """Write a random checkpoint into `folder` and return transformers' model of it (of the written weights; float32, eval).

    The usual initialisation (0.02) makes every output collapse onto one or two ids, whatever the prompt.  These scales were found by
    trying: attention spread over the whole prompt, an MLP of `gain` that outweighs the residual, norm weights that are not all ones.
    tests/engine/test_parity.py holds that the output is sensitive.
    """
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        "eos_token_id": 2, "bos_token_id": 1, **overrides,
    }
    kind, config = (LlamaForCausalLM, LlamaConfig) if architecture == "llama" else (Qwen3ForCausalLM, Qwen3Config)
    torch.manual_seed(seed)
    model = kind(config(**sizes)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
            elif "embed" in name or "lm_head" in name:
                weight.normal_(0, 0.3)
            else:
                scale = gain if "mlp" in name else 1.5 if ("v_proj" in name or "o_proj" in name) else 1.0
                weight.normal_(0, scale / weight.shape[1] ** 0.5)
    model = model.to(dtype)
    model.save_pretrained(folder, max_shard_size=shard)
    return model.float()


def prompt(length: int, seed: int) -> list[int]:
    """`length` ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
    return ids


def reference_greedy(model: Any, ids: list[int], steps: int, suppress: tuple[int, ...] = ()) -> tuple[list[int], torch.Tensor]:
    """(ids, logits [steps, vocab]) of greedy decoding by full forwards of transformers' model, without a cache."""
    held, rows = list(ids), []
    with torch.inference_mode():
        for _ in range(steps):
            logits = model(torch.tensor([held]), use_cache=False).logits[0, -1].float()
            logits[list(suppress)] = float("-inf")
            rows.append(logits)
            held.append(int(logits.argmax()))
    return held[len(ids):], torch.stack(rows)
