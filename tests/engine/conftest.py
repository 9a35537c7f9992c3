"""One checkpoint per architecture for the whole run, with transformers' greedy ids and logits for a set of prompts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.checkpoints import ARCHITECTURES, make_checkpoint, prompt, reference_greedy

LENGTHS = (1, 5, 16, 17, 33, 64, 100)
STEPS = 24
EOS = 2


@dataclass(frozen=True)
class Reference:
    """A checkpoint folder, transformers' model of it, prompts, and for each its greedy ids and logits [STEPS, vocab]; EOS is masked."""

    folder: Path
    model: Any
    prompts: list[list[int]]
    ids: list[list[int]]
    logits: list[torch.Tensor]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    made = {}
    for architecture in ARCHITECTURES:
        folder = tmp_path_factory.mktemp(architecture)
        model = make_checkpoint(folder, architecture)
        prompts = [prompt(length, seed=length) for length in LENGTHS]
        outputs = [reference_greedy(model, ids, STEPS, (EOS,)) for ids in prompts]
        made[architecture] = Reference(folder, model, prompts, [ids for ids, _ in outputs], [logits for _, logits in outputs])
    return made


@pytest.fixture(params=ARCHITECTURES)
def reference(request: pytest.FixtureRequest, references: dict[str, Reference]) -> Reference:
    return references[request.param]
