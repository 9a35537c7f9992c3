"""Make a checkpoint of a named shape with random weights: .models/NAME-random, bfloat16, sharded safetensors, no tokenizer.

    python -m tools.bench.make_checkpoint qwen3-4b

For speed the weights' values hardly matter, for checking ids they do: a model with the usual small initialisation repeats its last
token for ever.  Here every layer adds as much as the stream already holds and attention is peaked, so that outputs vary and each
prompt id counts.  Drawn on the CPU from one seed per tensor: the same bytes on every machine, in whatever order they are made.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from legs.protocol import to_json
from tools.bench.checkpoint import MODELS, CheckpointError, build_checkpoint
from tools.bench.qwen3_5_shape import HYBRID_SHAPES, Draw, HybridShape

if TYPE_CHECKING:
    import torch

SEED = 20260726
SHARD_BYTES = 2 << 30
EMBEDDING_STD, QK_NORM, RESIDUAL_GAIN = 0.1, 1.5, 0.5
"""Standard deviation of embeddings (small beside what a layer adds, or a tied head repeats the input); weight of the norms of q and k,
whose square scales attention scores; standard deviation that one layer's branch adds to the stream."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder's sizes, under config.json's own names.  `qk_norm` tells Qwen3 from Llama."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rope_theta: float
    qk_norm: bool
    max_position_embeddings: int = 40_960
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True


SHAPES: dict[str, Shape | HybridShape] = {
    **HYBRID_SHAPES,
    "qwen3-4b": Shape(
        hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        vocab_size=151_936, rope_theta=1e6, qk_norm=True),
    "tiny-qwen3": Shape(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2, head_dim=16,
        vocab_size=512, rope_theta=1e6, qk_norm=True, max_position_embeddings=512),
    "tiny-llama": Shape(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2, head_dim=8,
        vocab_size=512, rope_theta=1e5, qk_norm=False, max_position_embeddings=512, rms_norm_eps=1e-5),
}
"""Qwen3-4B as its published config.json has it; the tiny ones are for tests."""


def config(shape: Shape | HybridShape) -> dict[str, Any]:
    """config.json's content."""
    if isinstance(shape, HybridShape):
        return shape.config()
    sizes = {name: value for name, value in vars(shape).items() if name not in ("qk_norm", "rope_theta")}
    family = "Qwen3" if shape.qk_norm else "Llama"
    return {
        **sizes, "architectures": [f"{family}ForCausalLM"], "model_type": family.lower(), "attention_bias": False, "hidden_act": "silu",
        "rope_theta": shape.rope_theta, "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "dtype": "bfloat16", "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }


def tensors(shape: Shape | HybridShape) -> Iterator[tuple[str, tuple[int, ...], Draw]]:
    """(name, shape, standard deviation) of each tensor in checkpoint order; a norm has a negative value, its constant weight's negative."""
    if isinstance(shape, HybridShape):
        yield from shape.tensors()
        return
    hidden, heads, kv = shape.hidden_size, shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    unit = 1 / math.sqrt(hidden)
    score = 1.0 if shape.qk_norm else QK_NORM
    yield "model.embed_tokens.weight", (shape.vocab_size, hidden), EMBEDDING_STD
    for layer in range(shape.num_hidden_layers):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (hidden,), -1.0
        yield f"{at}.self_attn.q_proj.weight", (heads, hidden), unit * score
        yield f"{at}.self_attn.k_proj.weight", (kv, hidden), unit * score
        yield f"{at}.self_attn.v_proj.weight", (kv, hidden), unit
        yield f"{at}.self_attn.o_proj.weight", (hidden, heads), RESIDUAL_GAIN / math.sqrt(heads)
        if shape.qk_norm:
            yield f"{at}.self_attn.q_norm.weight", (shape.head_dim,), -QK_NORM
            yield f"{at}.self_attn.k_norm.weight", (shape.head_dim,), -QK_NORM
        yield f"{at}.post_attention_layernorm.weight", (hidden,), -1.0
        yield f"{at}.mlp.gate_proj.weight", (shape.intermediate_size, hidden), unit
        yield f"{at}.mlp.up_proj.weight", (shape.intermediate_size, hidden), unit
        yield f"{at}.mlp.down_proj.weight", (hidden, shape.intermediate_size), 2 * RESIDUAL_GAIN / math.sqrt(shape.intermediate_size)
    yield "model.norm.weight", (hidden,), -1.0
    if not shape.tie_word_embeddings:
        yield "lm_head.weight", (shape.vocab_size, hidden), unit


def draw(name: str, size: tuple[int, ...], std: Draw) -> torch.Tensor:
    """One tensor, bfloat16, from a generator seeded by its name."""
    import torch

    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(f"{SEED} {name}".encode()).digest()[:7], "big"))
    if isinstance(std, tuple):
        low, high = std
        return (low + (high - low) * torch.rand(size, generator=generator)).to(torch.bfloat16)
    if std <= 0:
        return torch.full(size, 0.0 - std, dtype=torch.bfloat16)
    return (torch.randn(size, generator=generator) * std).to(torch.bfloat16)


def fill(shape: Shape | HybridShape, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write config.json and the shards with their index into `folder`, one shard in memory at a time."""
    from safetensors.torch import save_file

    shards: list[list[tuple[str, tuple[int, ...], Draw]]] = [[]]
    room = shard_bytes
    for entry in tensors(shape):
        size = 2 * math.prod(entry[1])
        if shards[-1] and size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(entry)
        room -= size
    where: dict[str, str] = {}
    for number, entries in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        print(f"{file}: {len(entries)} tensors", flush=True)
        with ThreadPoolExecutor() as pool:  # a generator draws on one thread; tensors have a generator each
            drawn = dict(zip((name for name, _, _ in entries), pool.map(lambda entry: draw(*entry), entries), strict=True))
        save_file(drawn, folder / file, metadata={"format": "pt"})
        where |= {name: file for name, _, _ in entries}
    total = sum(2 * math.prod(size) for _, size, _ in tensors(shape))
    (folder / "model.safetensors.index.json").write_bytes(to_json({"metadata": {"total_size": total}, "weight_map": where}))
    (folder / "config.json").write_bytes(to_json(config(shape)))


def main(names: list[str]) -> int:
    root = Path(__file__).resolve().parents[2]
    if not names or set(names) - SHAPES.keys():
        print(f"usage: python -m tools.bench.make_checkpoint NAME ...   with NAME one of {', '.join(SHAPES)}", file=sys.stderr)
        return 64
    try:
        for name in names:
            shape = SHAPES[name]
            build_checkpoint(root / MODELS / f"{name}-random", lambda folder, shape=shape: fill(shape, folder), None)  # type: ignore[misc]
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 4
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
