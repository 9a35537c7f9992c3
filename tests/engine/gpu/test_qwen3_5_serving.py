"""Qwen3.5 on the card: the same ids as transformers and as the host, however steps overlap, are launched and are cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.api import LLM, SamplingParams
from tests.engine.checkpoints import prompt, reference_greedy
from tests.engine.conftest import STEPS, Reference
from tests.engine.gpu.test_card_serving import check_counters, generate, modes
from tests.engine.qwen3_5_checkpoint import make_qwen3_5
from tests.engine.serving import PARAMS

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("qwen3_5")
    model = make_qwen3_5(folder)
    prompts = [prompt(length, seed=length) for length in (1, 2, 33, 70, 140, 5)]
    outputs = [reference_greedy(model, ids, STEPS, (2,)) for ids in prompts]
    return Reference(folder, model, prompts, [ids for ids, _ in outputs], [logits for _, logits in outputs])


@modes
@pytest.mark.parametrize(("seqs", "budget"), [(8, 2048), (3, 64), (2, 33), (2, 1)])
def test_ids_equal_transformers(text: Reference, depth: int, eager: bool, seqs: int, budget: int) -> None:
    """Twice over, so that slots change hands, and from states that are no numbers at first."""
    llm = LLM(text.folder, device="cuda", depth=depth, enforce_eager=eager, max_num_seqs=seqs, max_num_batched_tokens=budget)
    for state in llm.runner.caches.states:
        state.conv.fill_(float("nan"))
        state.recurrent.fill_(float("nan"))
    for order in (range(6), (0, 5, 3, 1, 4, 2)):
        found = generate(llm, [text.prompts[i] for i in order], [PARAMS] * 6)
        assert found == [(text.ids[i], "length") for i in order]
    check_counters(llm)


@modes
def test_a_bfloat16_run_repeats_itself(tmp_path: Path, depth: int, eager: bool) -> None:
    """No atomics, fixed orders: the same trace gives the same ids, graph or not, one step ahead or not."""
    make_qwen3_5(tmp_path, dtype=torch.bfloat16)
    ids = prompt(300, seed=4)
    params = [SamplingParams(max_tokens=40, min_tokens=40, ignore_eos=True)]
    runs = [
        generate(LLM(tmp_path, device="cuda", depth=way, enforce_eager=mode, max_num_batched_tokens=budget, max_num_seqs=4), [ids], params)
        for way, mode, budget in ((depth, eager, 128), (depth, eager, 128), (1, True, 128))]
    assert runs[0] == runs[1] == runs[2]
