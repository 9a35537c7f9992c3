"""Qwen3.5's text model, dense (Qwen Team 2026): three gated delta net layers, then one of gated attention, and so on; SwiGLU after each.

    x = x + mixer(n)                                     n = rmsnorm(x), weights zero-centred
    x = x + W_down (silu(W_gate m) * W_up m)             m = rmsnorm(x)
    attention: W_o (sigmoid(gate) * attention(rope(rmsnorm(q)), rope(rmsnorm(k)), v))     q, gate, k, v = W n; rope turns a part of a head
    delta net: W_o (rmsnorm(delta rule(silu(conv(q, k, v)), a, b)) * silu(z))             q, k, v, z, b, a = W n

As transformers has it (models/qwen3_5).  For text the three rows of its multi-dimensional positions are equal, so plain rotary positions
are exact.  Vision and multi-token-prediction tensors of a checkpoint are passed over by name.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.batch import Batch, SlotBatch
from engine.kernels import dispatch as ops
from engine.kernels.gdn import GdnState, GdnWeights
from engine.layers.attention import Caches, paged_attention
from engine.layers.gated_delta_net import gated_delta_net
from engine.layers.rotary import rotary_table
from engine.loader.load import Parameter
from engine.models.config import ModelConfig
from engine.models.llama import Llama

PASSED_OVER = {"Qwen3_5ForConditionalGeneration": ("model.visual.", "mtp."), "Qwen3_5ForCausalLM": ("mtp.",)}
"""Beginnings of the names of tensors that are no part of the text model, by architecture."""


class Qwen3_5(Llama):  # noqa: N801
    """Feed-forward and head as :class:`Llama`; mixers and norms its own."""

    def __init__(self, config: ModelConfig, weights: dict[str, torch.Tensor], length: int) -> None:
        self.config = config
        self.weights = weights
        self.embed = weights["embed"]
        self.head = weights["embed" if config.tied else "head"]
        self.scale = config.head_dim**-0.5
        self.cos, self.sin = (
            table.to(self.embed.device) for table in rotary_table(config.rope, config.rotary_dim, length, self.embed.dtype))
        kinds = config.layer_kinds
        self.index = [kinds[:i].count(kind) for i, kind in enumerate(kinds)]
        """Of each layer among those of its kind: where its cache or state lies."""
        self.gdn = {
            i: GdnWeights(weights[f"{i}.conv"].squeeze(1), weights[f"{i}.a_log"], weights[f"{i}.dt_bias"], weights[f"{i}.gdn_norm"],
                          config.norm_eps)
            for i, kind in enumerate(kinds) if kind == "linear_attention"}

    @classmethod
    def parameters(cls, config: ModelConfig) -> list[Parameter]:
        """What the checkpoint must hold, and how what reads the same input is merged by rows."""
        hidden, inner = config.hidden_size, config.intermediate_size
        base = "model.language_model." if config.architecture == "Qwen3_5ForConditionalGeneration" else "model."
        found = [_merged("embed", (hidden,), (base + "embed_tokens.weight", config.vocab_size)),
                 _merged("norm", (), (base + "norm.weight", hidden))]
        if not config.tied:
            found.append(_merged("head", (hidden,), ("lm_head.weight", config.vocab_size)))
        for i, kind in enumerate(config.layer_kinds):
            mine, theirs = f"{i}.", f"{base}layers.{i}."
            mixer = _linear_parameters if kind == "linear_attention" else _full_parameters
            found += [
                _merged(mine + "mixer_norm", (), (theirs + "input_layernorm.weight", hidden)),
                *mixer(config, mine, theirs),
                _merged(mine + "mlp_norm", (), (theirs + "post_attention_layernorm.weight", hidden)),
                _merged(mine + "gate_up", (hidden,), (theirs + "mlp.gate_proj.weight", inner), (theirs + "mlp.up_proj.weight", inner)),
                _merged(mine + "down", (inner,), (theirs + "mlp.down_proj.weight", hidden)),
            ]
        return found

    @staticmethod
    def ignored(config: ModelConfig, name: str) -> bool:
        """Vision and multi-token-prediction tensors, and the copy of a tied head."""
        return name.startswith(PASSED_OVER[config.architecture]) or (config.tied and name == "lm_head.weight")

    def forward(self, batch: Batch | SlotBatch, caches: Caches) -> torch.Tensor:
        """As :meth:`Llama.forward`; the slots' delta net states move on too."""
        eps = self.config.norm_eps
        cos, sin = self.cos.index_select(0, batch.positions), self.sin.index_select(0, batch.positions)
        x = F.embedding(batch.token_ids, self.embed)
        normed = ops.rms_norm_centred(x, self.weights["0.mixer_norm"], eps)
        rows = slice(None) if batch.sample_rows is None else batch.sample_rows
        last = self.config.num_layers - 1
        for i, kind in enumerate(self.config.layer_kinds):
            if kind == "linear_attention":
                delta = self.delta_net(i, normed, batch, caches)
            else:
                delta = self.attention(i, normed, cos, sin, batch, caches)
            if batch.cuts_last_layer and i == last:
                delta, x, rows = delta[rows], x[rows], slice(None)
            normed, x = ops.add_rms_norm_centred(delta, x, self.weights[f"{i}.mlp_norm"], eps)
            delta = self.mlp(i, normed)
            if i < last:
                normed, x = ops.add_rms_norm_centred(delta, x, self.weights[f"{i + 1}.mixer_norm"], eps)
        return ops.add_rms_norm_centred(delta[rows], x[rows], self.weights["norm"], eps)[0]

    def attention(
        self, i: int, normed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: Batch | SlotBatch, caches: Caches
    ) -> torch.Tensor:
        """normed [T, hidden] -> W_o (sigmoid(gate) * attention) [T, hidden]."""
        heads, kv_heads, dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        projected = ops.linear(normed, self.weights[f"{i}.qgkv"]).view(-1, 2 * (heads + kv_heads), dim)
        cache = caches.keys_values[self.index[i]]
        norms = self.weights[f"{i}.q_norm"], self.weights[f"{i}.k_norm"]
        query = ops.place_gated(projected, heads, norms, self.config.norm_eps, cos, sin, cache, batch.cache_rows)
        out = paged_attention(query, cache, caches.block_tables, batch, self.scale)
        return ops.linear(ops.gate(out, projected, heads), self.weights[f"{i}.out"])

    def delta_net(self, i: int, normed: torch.Tensor, batch: Batch | SlotBatch, caches: Caches) -> torch.Tensor:
        """normed [T, hidden] -> W_o of the gated delta rule [T, hidden]."""
        states: GdnState = caches.states[self.index[i]]
        projected = ops.linear(normed, self.weights[f"{i}.qkvzba"])
        return ops.linear(gated_delta_net(projected, self.gdn[i], states, batch), self.weights[f"{i}.out"])


def _linear_parameters(config: ModelConfig, mine: str, theirs: str) -> list[Parameter]:
    sizes, hidden, at = config.linear, config.hidden_size, theirs + "linear_attn."
    assert sizes is not None
    channels, values, heads = sizes.channels, sizes.value_heads * sizes.value_dim, sizes.value_heads
    return [
        _merged(mine + "qkvzba", (hidden,), (at + "in_proj_qkv.weight", channels), (at + "in_proj_z.weight", values),
                (at + "in_proj_b.weight", heads), (at + "in_proj_a.weight", heads)),
        _merged(mine + "conv", (1, sizes.conv_width), (at + "conv1d.weight", channels)),
        _merged(mine + "a_log", (), (at + "A_log", heads), dtype=torch.float32),
        _merged(mine + "dt_bias", (), (at + "dt_bias", heads), dtype=torch.float32),
        _merged(mine + "gdn_norm", (), (at + "norm.weight", sizes.value_dim)),
        _merged(mine + "out", (values,), (at + "out_proj.weight", hidden)),
    ]


def _full_parameters(config: ModelConfig, mine: str, theirs: str) -> list[Parameter]:
    hidden, dim, at = config.hidden_size, config.head_dim, theirs + "self_attn."
    query, kv = config.num_heads * dim, config.num_kv_heads * dim
    return [
        _merged(mine + "qgkv", (hidden,), (at + "q_proj.weight", 2 * query), (at + "k_proj.weight", kv), (at + "v_proj.weight", kv)),
        _merged(mine + "q_norm", (), (at + "q_norm.weight", dim)),
        _merged(mine + "k_norm", (), (at + "k_norm.weight", dim)),
        _merged(mine + "out", (query,), (at + "o_proj.weight", hidden)),
    ]


def _merged(name: str, rest: tuple[int, ...], *sources: tuple[str, int], dtype: torch.dtype | None = None) -> Parameter:
    return Parameter(name, (sum(rows for _, rows in sources), *rest), sources, dtype)
