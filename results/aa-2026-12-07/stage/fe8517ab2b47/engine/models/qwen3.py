"""Qwen3, dense (Qwen Team 2025): Llama with an RMSNorm over each query and key head before the rotation."""

from __future__ import annotations

import torch

from engine.loader.load import Parameter
from engine.models.config import ModelConfig
from engine.models.llama import Llama


class Qwen3(Llama):
    """As :class:`Llama`, with per-head norms of width head_dim."""

    @classmethod
    def extra_parameters(cls, config: ModelConfig, mine: str, attention: str) -> list[Parameter]:
        shape = (config.head_dim,)
        return [Parameter(mine + f"{one}_norm", shape, ((attention + f"{one}_norm.weight", config.head_dim),)) for one in ("q", "k")]

    def head_norms(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.weights[f"{i}.q_norm"], self.weights[f"{i}.k_norm"]
