"""A checkpoint's config.json as typed values, or a refusal that names the field.  No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError

ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM")
ROPE_TYPES = ("default", "llama3")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of a dense decoder; `rope` holds theta and, for type llama3, its four scaling values under config.json's names."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    norm_eps: float
    rope: dict[str, Any]
    tied: bool
    dtype: str
    eos_ids: tuple[int, ...]


def read_config(folder: Path) -> ModelConfig:
    """Read config.json and generation_config.json of a checkpoint folder.

    Raises :class:`CheckpointError` for a missing or malformed field, or anything the engine does not compute exactly.
    """
    raw = _read_json(folder / "config.json")
    generation = _read_json(folder / "generation_config.json") if (folder / "generation_config.json").exists() else {}
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        raise CheckpointError(f"config.json: architectures is {names!r}; built are {', '.join(ARCHITECTURES)}")
    for field in ("attention_bias", "mlp_bias", "use_sliding_window", "quantization_config"):
        if raw.get(field):
            raise CheckpointError(f"config.json: {field} is {raw[field]!r}; only models without it are built")
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"config.json: hidden_act is {raw['hidden_act']!r}; only silu is built")
    heads = _size(raw, "num_attention_heads")
    kv_heads = _size(raw, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    hidden = _size(raw, "hidden_size")
    dtype = raw.get("dtype", raw.get("torch_dtype")) or "float32"
    return ModelConfig(
        architecture=names[0], hidden_size=hidden, intermediate_size=_size(raw, "intermediate_size"),
        num_layers=_size(raw, "num_hidden_layers"), num_heads=heads, num_kv_heads=kv_heads,
        head_dim=_size(raw, "head_dim", hidden // heads), vocab_size=_size(raw, "vocab_size"),
        max_position_embeddings=_size(raw, "max_position_embeddings"), norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_rope(raw), tied=bool(raw.get("tie_word_embeddings", False)), dtype=str(dtype),
        eos_ids=_ids(generation.get("eos_token_id")) or _ids(raw.get("eos_token_id")),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; a checkpoint folder with config.json and *.safetensors is needed") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: holds {type(raw).__name__}, an object is needed")
    return raw


def _size(raw: dict[str, Any], name: str, default: int | None = None) -> int:
    value = raw.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json: {name} is {value!r}; a positive integer is needed")
    return value


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    kind = rope.setdefault("rope_type", rope.pop("type", "default"))
    if kind not in ROPE_TYPES:
        raise CheckpointError(f"config.json: rope_type is {kind!r}; built are {', '.join(ROPE_TYPES)}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(f"config.json: partial_rotary_factor is {rope['partial_rotary_factor']!r}; only 1.0 is built")
    if kind == "llama3":
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
            if not isinstance(rope.get(name), (int, float)):
                raise CheckpointError(f"config.json: rope_type llama3 needs {name}, found {rope.get(name)!r}")
    return rope
