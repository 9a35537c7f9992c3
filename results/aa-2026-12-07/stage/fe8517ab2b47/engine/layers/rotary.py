"""The table of rotary angles, once per model."""

from __future__ import annotations

import math
from typing import Any

import torch


def rotary_table(rope: dict[str, Any], head_dim: int, length: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each [length, head_dim / 2]: computed in float32, rounded to `dtype`.

    `rope` is config.json's: theta, and for type llama3 the frequency-dependent scaling of Llama 3.1 (long wavelengths divided by
    `factor`, short ones kept, between them a blend), as in transformers' modeling_rope_utils.
    """
    frequencies = 1.0 / (rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope["rope_type"] == "llama3":
        frequencies = _scale_llama3(frequencies, rope)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _scale_llama3(frequencies: torch.Tensor, rope: dict[str, Any]) -> torch.Tensor:
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (blend + (1 - blend) / rope["factor"])
