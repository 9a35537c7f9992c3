"""Greedy choice under vLLM's tie rule."""

from __future__ import annotations

import torch


def greedy_reference(logits: torch.Tensor) -> torch.Tensor:
    """The id of the largest logit per row, [S, vocab] -> [S] int64; among equals the lowest id.

    Logits are compared in the model's dtype: in bfloat16 ties are common, and vLLM resolves them so too.
    """
    return torch.argmax(logits, dim=-1)
