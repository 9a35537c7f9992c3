"""Llama (Touvron et al. 2023; Llama 3, Meta 2024): pre-norm decoder, grouped-query attention, rotary positions, SwiGLU, no biases.

    x = x + W_o attention(rope(W_q n), rope(W_k n), W_v n)      n = rmsnorm(x)
    x = x + W_down (silu(W_gate m) * W_up m)                    m = rmsnorm(x)

Each add is done together with the norm that follows it, so a layer hands on (delta, x) with delta not yet added.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.batch import Batch, SlotBatch
from engine.kernels import dispatch as ops
from engine.kernels.cpu.layers import Layers, LayerWeights
from engine.layers.attention import Caches, paged_attention
from engine.layers.rotary import rotary_table
from engine.loader.load import Parameter
from engine.models.config import ModelConfig


class Llama:
    """Computes hidden states and logits; `weights` are those `parameters` lists, positions go below `length`."""

    def __init__(self, config: ModelConfig, weights: dict[str, torch.Tensor], length: int) -> None:
        self.config = config
        self.weights = weights
        self.embed = weights["embed"]
        self.head = weights["embed" if config.tied else "head"]
        self.scale = config.head_dim**-0.5
        self.cos, self.sin = (
            table.to(self.embed.device) for table in rotary_table(config.rope, config.head_dim, length, self.embed.dtype))
        self.layers = Layers(
            [self.layer_weights(i) for i in range(config.num_layers)], config.num_heads, config.num_kv_heads, config.head_dim,
            config.norm_eps, self.scale)

    @classmethod
    def parameters(cls, config: ModelConfig) -> list[Parameter]:
        """What the checkpoint must hold, and how q, k, v and gate, up are merged by rows."""
        hidden, inner = config.hidden_size, config.intermediate_size
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        found = [_single("embed", "model.embed_tokens.weight", config.vocab_size, hidden), _single("norm", "model.norm.weight", hidden)]
        if not config.tied:
            found.append(_single("head", "lm_head.weight", config.vocab_size, hidden))
        for i in range(config.num_layers):
            mine, theirs = f"{i}.", f"model.layers.{i}."
            attention, mlp = theirs + "self_attn.", theirs + "mlp."
            found += [
                _single(mine + "attention_norm", theirs + "input_layernorm.weight", hidden),
                Parameter(mine + "qkv", (query + 2 * kv, hidden), (
                    (attention + "q_proj.weight", query), (attention + "k_proj.weight", kv), (attention + "v_proj.weight", kv))),
                _single(mine + "out", attention + "o_proj.weight", hidden, query),
                _single(mine + "mlp_norm", theirs + "post_attention_layernorm.weight", hidden),
                Parameter(mine + "gate_up", (2 * inner, hidden), ((mlp + "gate_proj.weight", inner), (mlp + "up_proj.weight", inner))),
                _single(mine + "down", mlp + "down_proj.weight", hidden, inner),
                *cls.extra_parameters(config, mine, attention),
            ]
        return found

    @classmethod
    def extra_parameters(cls, config: ModelConfig, mine: str, attention: str) -> list[Parameter]:
        return []

    @staticmethod
    def ignored(config: ModelConfig, name: str) -> bool:
        """Tensors that old or tied checkpoints carry and the model does not need."""
        return name.endswith("rotary_emb.inv_freq") or (config.tied and name == "lm_head.weight")

    def forward(self, batch: Batch | SlotBatch, caches: Caches) -> torch.Tensor:
        """Normed hidden states [S, hidden] of the batch's sampled rows; keys and values of all T tokens go into the cache."""
        eps = self.config.norm_eps
        cos, sin = self.cos.index_select(0, batch.positions), self.sin.index_select(0, batch.positions)
        x = F.embedding(batch.token_ids, self.embed)
        if isinstance(batch, Batch) and ops.serves_layers(self.layers, x):
            self.layers.forward(
                x, cos, sin, caches.keys_values, caches.block_tables, batch.slots, batch.positions, batch.cache_rows)
            return ops.rms_norm(x[batch.sample_rows], self.weights["norm"], eps)
        normed = ops.rms_norm(x, self.weights["0.attention_norm"], eps)
        rows = slice(None) if batch.sample_rows is None else batch.sample_rows
        for i in range(self.config.num_layers):
            delta = self.attention(i, normed, cos, sin, batch, caches)
            if batch.cuts_last_layer and i + 1 == self.config.num_layers:
                delta, x, rows = delta[rows], x[rows], slice(None)
            normed, x = ops.add_rms_norm(delta, x, self.weights[f"{i}.mlp_norm"], eps)
            delta = self.mlp(i, normed)
            if i + 1 < self.config.num_layers:
                normed, x = ops.add_rms_norm(delta, x, self.weights[f"{i + 1}.attention_norm"], eps)
        return ops.add_rms_norm(delta[rows], x[rows], self.weights["norm"], eps)[0]

    def attention(
        self, i: int, normed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: Batch | SlotBatch, caches: Caches
    ) -> torch.Tensor:
        """normed [T, hidden] -> W_o attention [T, hidden]."""
        heads, kv_heads, dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        qkv = ops.linear(normed, self.weights[f"{i}.qkv"]).view(-1, heads + 2 * kv_heads, dim)
        cache = caches.keys_values[i]
        ops.place_tokens(qkv, heads, self.head_norms(i), self.config.norm_eps, cos, sin, cache, batch.cache_rows)
        out = paged_attention(qkv[:, :heads], cache, caches.block_tables, batch, self.scale)
        return ops.linear(out, self.weights[f"{i}.out"])

    def head_norms(self, i: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Norm weights [D] of layer i's query and key heads, applied before the rotation; Llama has none."""
        return None

    def layer_weights(self, i: int) -> LayerWeights:
        """Layer i's weights as the host's library takes them."""
        norms = self.head_norms(i) or (None, None)
        names = ("qkv", "out", "mlp_norm", "gate_up", "down")
        return LayerWeights(self.weights[f"{i}.attention_norm"], *norms, *(self.weights[f"{i}.{name}"] for name in names))

    def mlp(self, i: int, normed: torch.Tensor) -> torch.Tensor:
        return ops.swiglu(normed, self.weights[f"{i}.gate_up"], self.weights[f"{i}.down"])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, hidden] -> [S, vocab] in the model's dtype."""
        return ops.linear(hidden, self.head)


def _single(name: str, source: str, rows: int, *rest: int) -> Parameter:
    return Parameter(name, (rows, *rest), ((source, rows),))
