"""From a checkpoint folder to a model on its weights."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.kernels.devices import HOST
from engine.loader.load import Note, load, silent
from engine.models.config import ModelConfig
from engine.models.llama import Llama
from engine.models.qwen3 import Qwen3
from engine.models.qwen3_5 import Qwen3_5

MODELS: dict[str, type[Llama]] = {
    "LlamaForCausalLM": Llama, "Qwen3ForCausalLM": Qwen3, "Qwen3_5ForCausalLM": Qwen3_5, "Qwen3_5ForConditionalGeneration": Qwen3_5,
}


def build_model(
    folder: Path, config: ModelConfig, dtype: torch.dtype, length: int, way: str, device: str = HOST, note: Note = silent,
) -> Llama:
    """Load the checkpoint in `folder` onto `device` (see `load`) and make its architecture's model for positions below `length`."""
    kind = MODELS[config.architecture]
    weights = load(folder, kind.parameters(config), lambda name: kind.ignored(config, name), dtype, way, device, note)
    return kind(config, weights, length)
