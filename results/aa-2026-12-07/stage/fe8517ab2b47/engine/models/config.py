"""A checkpoint's config.json as typed values, or a refusal that names the field.  No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError

ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
ROPE_TYPES = ("default", "llama3")
LAYER_KINDS = ("linear_attention", "full_attention")


@dataclass(frozen=True)
class LinearAttention:
    """Sizes of a gated delta net layer."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def channels(self) -> int:
        """Values of q, k and v together, which the convolution runs over."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


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
    layer_kinds: tuple[str, ...]
    """Of each layer: full_attention, or linear_attention with the sizes of `linear`."""
    linear: LinearAttention | None

    @property
    def full_layers(self) -> int:
        """Layers that have a KV cache."""
        return self.layer_kinds.count("full_attention")

    @property
    def rotary_dim(self) -> int:
        """Values of a head that the rotation turns."""
        return int(self.head_dim * self.rope.get("partial_rotary_factor", 1.0))


def read_config(folder: Path) -> ModelConfig:
    """Read config.json and generation_config.json of a checkpoint folder.

    Raises :class:`CheckpointError` for a missing or malformed field, or anything the engine does not compute exactly.
    """
    raw = _read_json(folder / "config.json")
    generation = _read_json(folder / "generation_config.json") if (folder / "generation_config.json").exists() else {}
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        raise CheckpointError(f"config.json: architectures is {names!r}; built are {', '.join(ARCHITECTURES)}")
    hybrid = names[0].startswith("Qwen3_5")
    if "text_config" in raw:
        raw = _text_config(raw)
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
    kinds = _layer_kinds(raw) if hybrid else ("full_attention",) * _size(raw, "num_hidden_layers")
    return ModelConfig(
        architecture=names[0], hidden_size=hidden, intermediate_size=_size(raw, "intermediate_size"),
        num_layers=_size(raw, "num_hidden_layers"), num_heads=heads, num_kv_heads=kv_heads,
        head_dim=_size(raw, "head_dim", hidden // heads), vocab_size=_size(raw, "vocab_size"),
        max_position_embeddings=_size(raw, "max_position_embeddings"), norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_rope(raw, hybrid), tied=bool(raw.get("tie_word_embeddings", False)), dtype=str(dtype),
        eos_ids=_ids(generation.get("eos_token_id")) or _ids(raw.get("eos_token_id")),
        layer_kinds=kinds, linear=_linear(raw) if hybrid else None,
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


def _text_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The text model's fields of a checkpoint that has several models; what the whole says of its head and ids goes before."""
    text = raw["text_config"]
    if not isinstance(text, dict):
        raise CheckpointError(f"config.json: text_config is {text!r}; an object is needed")
    return {**text, **{name: raw[name] for name in ("tie_word_embeddings", "dtype", "eos_token_id") if raw.get(name) is not None}}


def _layer_kinds(raw: dict[str, Any]) -> tuple[str, ...]:
    """Each layer's kind from `layer_types`, or every `full_attention_interval`-th layer full (transformers' Qwen3_5TextConfig)."""
    count = _size(raw, "num_hidden_layers")
    interval = _size(raw, "full_attention_interval", 4)
    kinds = raw.get("layer_types") or [LAYER_KINDS[(i + 1) % interval == 0] for i in range(count)]
    if len(kinds) != count or set(kinds) - set(LAYER_KINDS) or "full_attention" not in kinds:
        raise CheckpointError(f"config.json: layer_types is {kinds!r}; {count} of {' or '.join(LAYER_KINDS)} are needed, one full at least")
    return tuple(kinds)


def _linear(raw: dict[str, Any]) -> LinearAttention:
    found = LinearAttention(*(_size(raw, f"linear_{name}") for name in (
        "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")))
    if found.value_heads % found.key_heads:
        raise CheckpointError(f"config.json: linear_num_value_heads {found.value_heads} is no multiple of "
                              f"linear_num_key_heads {found.key_heads}")
    if found.conv_width < 2:
        raise CheckpointError(f"config.json: linear_conv_kernel_dim is {found.conv_width}; at least 2 is needed")
    if raw.get("mamba_ssm_dtype", "float32") != "float32":
        raise CheckpointError(f"config.json: mamba_ssm_dtype is {raw['mamba_ssm_dtype']!r}; only float32 states are built")
    return found


def _rope(raw: dict[str, Any], hybrid: bool) -> dict[str, Any]:
    """Rotary parameters from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    `hybrid` (Qwen3.5) turns a quarter of a head unless given; its multi-dimensional sections are all one for text.
    """
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    kind = rope.setdefault("rope_type", rope.pop("type", "default"))
    if kind not in ROPE_TYPES:
        raise CheckpointError(f"config.json: rope_type is {kind!r}; built are {', '.join(ROPE_TYPES)}")
    if hybrid:
        factor = rope.setdefault("partial_rotary_factor", raw.get("partial_rotary_factor", 0.25))
        if kind != "default" or not isinstance(factor, (int, float)) or not 0 < factor <= 1:
            raise CheckpointError(f"config.json: rope_type {kind!r} with partial_rotary_factor {factor!r}; default with 0 to 1 is built")
    elif rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(f"config.json: partial_rotary_factor is {rope['partial_rotary_factor']!r}; only 1.0 is built")
    if kind == "llama3":
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
            if not isinstance(rope.get(name), (int, float)):
                raise CheckpointError(f"config.json: rope_type llama3 needs {name}, found {rope.get(name)!r}")
    return rope
