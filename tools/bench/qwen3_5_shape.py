"""Qwen3.5's text model as make_checkpoint.py draws it: sizes, config.json, tensors.

States must neither fade nor grow: decays per token from 0.5 to 0.999 over the heads of a layer, write strengths around a half.
tests/tools/test_qwen3_5_checkpoint.py holds that a state's norm stays within ten times from token 128 to 1,200.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

EMBEDDING_STD, HEAD_NORM, RESIDUAL_GAIN = 0.1, 0.5, 0.5
"""As make_checkpoint.py's, norms zero-centred: queries and keys are scaled by 1.5."""
A_LOG, DT_BIAS = (-4.0, 0.0), (-3.0, 0.0)
"""Ranges drawn from: a head forgets exp(A_log) softplus(a + dt_bias) a token, in logarithms."""

Draw = float | tuple[float, float]
"""A standard deviation of 0 or more, a constant's negative, or the range of a uniform distribution."""


@dataclass(frozen=True, kw_only=True)
class HybridShape:
    """The text model's sizes, under config.json's own names."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    mrope_section: tuple[int, int, int]
    linear_conv_kernel_dim: int = 4
    max_position_embeddings: int = 40_960
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True

    @property
    def layer_types(self) -> list[str]:
        """Every fourth layer is full attention."""
        return ["linear_attention" if (layer + 1) % 4 else "full_attention" for layer in range(self.num_hidden_layers)]

    def config(self) -> dict[str, Any]:
        """config.json's content, of the architecture that has no vision tower."""
        sizes = {name: value for name, value in vars(self).items() if name != "mrope_section"}
        return {
            **sizes, "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "attention_bias": False, "hidden_act": "silu",
            "layer_types": self.layer_types, "full_attention_interval": 4, "mamba_ssm_dtype": "float32", "attn_output_gate": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                                "mrope_section": list(self.mrope_section), "mrope_interleaved": True},
            "dtype": "bfloat16", "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
        }

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], Draw]]:
        """(name, shape, how it is drawn) of each tensor in checkpoint order."""
        hidden, inner = self.hidden_size, self.intermediate_size
        unit = 1 / math.sqrt(hidden)
        yield "model.embed_tokens.weight", (self.vocab_size, hidden), EMBEDDING_STD
        for layer, kind in enumerate(self.layer_types):
            at = f"model.layers.{layer}"
            yield f"{at}.input_layernorm.weight", (hidden,), 0.0
            yield from self._delta_net(f"{at}.linear_attn") if kind == "linear_attention" else self._attention(f"{at}.self_attn")
            yield f"{at}.post_attention_layernorm.weight", (hidden,), 0.0
            yield f"{at}.mlp.gate_proj.weight", (inner, hidden), unit
            yield f"{at}.mlp.up_proj.weight", (inner, hidden), unit
            yield f"{at}.mlp.down_proj.weight", (hidden, inner), 2 * RESIDUAL_GAIN / math.sqrt(inner)
        yield "model.norm.weight", (hidden,), 0.0
        if not self.tie_word_embeddings:
            yield "lm_head.weight", (self.vocab_size, hidden), unit

    def _attention(self, at: str) -> Iterator[tuple[str, tuple[int, ...], Draw]]:
        hidden, query, kv = self.hidden_size, self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        unit = 1 / math.sqrt(hidden)
        yield f"{at}.q_proj.weight", (2 * query, hidden), unit
        yield f"{at}.k_proj.weight", (kv, hidden), unit
        yield f"{at}.v_proj.weight", (kv, hidden), unit
        yield f"{at}.o_proj.weight", (hidden, query), 2 * RESIDUAL_GAIN / math.sqrt(query)
        yield f"{at}.q_norm.weight", (self.head_dim,), -HEAD_NORM
        yield f"{at}.k_norm.weight", (self.head_dim,), -HEAD_NORM

    def _delta_net(self, at: str) -> Iterator[tuple[str, tuple[int, ...], Draw]]:
        hidden, heads = self.hidden_size, self.linear_num_value_heads
        values = heads * self.linear_value_head_dim
        channels = 2 * self.linear_num_key_heads * self.linear_key_head_dim + values
        unit = 1 / math.sqrt(hidden)
        yield f"{at}.in_proj_qkv.weight", (channels, hidden), unit
        yield f"{at}.in_proj_z.weight", (values, hidden), unit
        yield f"{at}.in_proj_b.weight", (heads, hidden), unit
        yield f"{at}.in_proj_a.weight", (heads, hidden), 0.5 * unit
        yield f"{at}.conv1d.weight", (channels, 1, self.linear_conv_kernel_dim), 1 / math.sqrt(self.linear_conv_kernel_dim)
        yield f"{at}.A_log", (heads,), A_LOG
        yield f"{at}.dt_bias", (heads,), DT_BIAS
        yield f"{at}.norm.weight", (self.linear_value_head_dim,), -1.0
        yield f"{at}.out_proj.weight", (hidden, values), 2 * RESIDUAL_GAIN / math.sqrt(values)


HYBRID_SHAPES = {
    "qwen3.5-4b": HybridShape(
        hidden_size=2560, intermediate_size=9216, num_hidden_layers=32, num_attention_heads=16, num_key_value_heads=4, head_dim=256,
        vocab_size=248_320, linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128,
        mrope_section=(11, 11, 10)),
    "tiny-qwen3.5": HybridShape(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        vocab_size=512, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
        mrope_section=(1, 1, 0), max_position_embeddings=2048),
}
"""Qwen3.5-4B's text model after public descriptions of it; the tiny one is for tests."""
