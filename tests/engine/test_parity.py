"""The engine against transformers: same greedy ids, same logits, however the work is cut, ordered, overlapped and loaded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.api import LLM, SamplingParams
from engine.kernels import dispatch, linear
from tests.engine.checkpoints import ARCHITECTURES, VOCAB, make_checkpoint, prompt, reference_greedy
from tests.engine.conftest import Reference
from tests.engine.serving import check_parity, relative_l2, serve

FORWARD, BACKWARD, MIXED = (0, 1, 2, 3, 4, 5, 6), (6, 5, 4, 3, 2, 1, 0), (6, 0, 4, 2, 5, 1, 3)


def test_the_checkpoint_is_sensitive(reference: Reference) -> None:
    """A broken engine cannot hide: outputs are varied, and every one of 16 prompt ids matters."""
    ids = prompt(48, seed=1)
    output, _ = reference_greedy(reference.model, ids, 32)
    assert len(set(output)) >= 16
    unchanged = []
    for position in range(0, 48, 3):
        changed = list(ids)
        changed[position] = 3 + (changed[position] + 101) % (VOCAB - 3)
        if reference_greedy(reference.model, changed, 32)[0] == output:
            unchanged.append(position)
    assert not unchanged


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("seqs", "budget", "block_size", "order", "every"), [
    (8, 2048, 16, FORWARD, 0),
    (1, 2048, 16, FORWARD, 0),
    (3, 64, 16, BACKWARD, 0),
    (8, 16, 4, MIXED, 0),
    (8, 7, 16, BACKWARD, 3),
    (4, 33, 8, MIXED, 5),
    (2, 1, 16, (3, 1, 4), 2),
])
def test_ids_and_logits_equal_transformers(
    reference: Reference, depth: int, seqs: int, budget: int, block_size: int, order: tuple[int, ...], every: int
) -> None:
    llm = LLM(reference.folder, depth=depth, max_num_seqs=seqs, max_num_batched_tokens=budget, block_size=block_size)
    check_parity(llm, reference, order, every)
    assert llm.blocks.free == llm.blocks.usable


def test_staged_loading_gives_the_same_model(reference: Reference) -> None:
    check_parity(LLM(reference.folder, load="staged"), reference)


def test_scarce_blocks_only_delay(reference: Reference) -> None:
    check_parity(LLM(reference.folder, num_blocks=10, max_num_batched_tokens=48), reference)


@pytest.mark.parametrize(("architecture", "overrides"), [
    ("llama", {"tie_word_embeddings": False}),
    ("llama", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}}),
    ("qwen3", {"num_key_value_heads": 8, "num_hidden_layers": 1}),
    ("qwen3", {"tie_word_embeddings": False, "num_key_value_heads": 1, "head_dim": 24}),
])
def test_other_shapes(tmp_path: Path, architecture: str, overrides: dict[str, Any]) -> None:
    model = make_checkpoint(tmp_path, architecture, seed=3, shard="60KB", **overrides)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    prompts = [prompt(length, length) for length in (9, 90)]
    outputs = [reference_greedy(model, ids, 24, (2,)) for ids in prompts]
    check_parity(LLM(tmp_path, max_num_batched_tokens=40),
                 Reference(tmp_path, model, prompts, [ids for ids, _ in outputs], [logits for _, logits in outputs]))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bfloat16_logits_are_near_float32(tmp_path: Path, architecture: str) -> None:
    """Teacher-forced: transformers' float32 logits for the engine's own ids, with the same (bfloat16) weights.

    A calmer checkpoint than the others: what is bounded is rounding, so transformers' own bfloat16 stands beside it.
    """
    model = make_checkpoint(tmp_path, architecture, dtype=torch.bfloat16, gain=0.5, num_hidden_layers=2)
    rounded = copy.deepcopy(model).bfloat16()
    prompts = [prompt(length, length) for length in (7, 50)]
    llm = LLM(tmp_path, max_num_batched_tokens=32)
    assert llm.resolved["dtype"] == "bfloat16"
    served = serve(llm, prompts, (0, 1))
    for index, ids in enumerate(prompts):
        tokens = torch.tensor([ids + served.ids[index]])
        with torch.inference_mode():
            expected, theirs = (one(tokens).logits[0, len(ids) - 1 : -1].float() for one in (model, rounded))
        error = relative_l2(torch.stack(served.logits[index]), expected)
        assert error <= 1e-2 and error <= 1.25 * relative_l2(theirs, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_logits_give_the_lowest_id(dtype: torch.dtype) -> None:
    for vocab in (3000, 3072):
        logits = torch.zeros(4, vocab, dtype=dtype)
        logits[0, [2900, 1100, 7]] = 1.0
        logits[1, [2047, 2048]] = 2.0
        logits[3, 130:140] = 3.0
        assert dispatch.greedy(logits).tolist() == [7, 2047, 0, 130]


def test_logits_are_compared_as_bfloat16_has_them() -> None:
    """1.001 and 1.002 are one number in bfloat16: the lower id wins although the other logit was larger before rounding."""
    logits = torch.tensor([[0.0, 1.001, 1.002]])
    assert dispatch.greedy(logits).tolist() == [2] and dispatch.greedy(logits.bfloat16()).tolist() == [1]


@pytest.mark.parametrize("rows", [1, 3, 4, 8, 16, 32, 33, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_forms_agree(rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 40, generator=generator).to(dtype), torch.randn(24, 40, generator=generator).to(dtype)
    found = linear.linear_cpu(x, weight)
    assert found.is_contiguous() and found.dtype == dtype
    torch.testing.assert_close(found, linear.linear_reference(x, weight))


def eos_checkpoint(folder: Path) -> tuple[Any, list[int], int]:
    """A checkpoint whose end-of-sequence id is the one greedy decoding of the prompt produces first at its eighth output."""
    ids = prompt(20, seed=4)
    output, _ = reference_greedy(make_checkpoint(folder, "llama"), ids, 40)
    eos = next(token for index, token in enumerate(output) if index >= 7 and token not in output[:index])
    return make_checkpoint(folder, "llama", eos_token_id=eos), ids, eos


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("min_tokens", "ignore_eos"), [(0, False), (25, False), (40, True), (0, True), (25, True)])
def test_eos_and_min_tokens_as_transformers_has_them(tmp_path: Path, depth: int, min_tokens: int, ignore_eos: bool) -> None:
    model, ids, eos = eos_checkpoint(tmp_path)
    masked = reference_greedy(model, ids, min_tokens, (eos,))[0] if min_tokens else []
    expected = masked + reference_greedy(model, ids + masked, 40 - min_tokens)[0] if min_tokens < 40 else masked
    if not ignore_eos and eos in expected:
        expected = expected[: expected.index(eos) + 1]
    other = prompt(31, seed=9)
    llm = LLM(tmp_path, depth=depth)
    params = SamplingParams(max_tokens=40, min_tokens=min_tokens, ignore_eos=ignore_eos)
    first, second = llm.generate([ids, other], [params, SamplingParams(max_tokens=30, ignore_eos=True)])
    assert first.token_ids == expected
    assert first.finish_reason == ("length" if len(expected) == 40 else "stop")
    assert second.token_ids == reference_greedy(model, other, 30)[0]
    assert min_tokens or ignore_eos or len(expected) < 40
    assert llm.blocks.free == llm.blocks.usable


@pytest.mark.parametrize(("short_by", "stops"), [(0, True), (1, False)])
def test_eos_may_come_right_after_min_tokens(tmp_path: Path, short_by: int, stops: bool) -> None:
    """Where it is the model's choice after exactly min_tokens ids it ends the request; one id earlier it is masked."""
    model, ids, eos = eos_checkpoint(tmp_path)
    output = reference_greedy(model, ids, 40)[0]
    place = output.index(eos)
    params = SamplingParams(max_tokens=place + 1, min_tokens=place + short_by)
    [found] = LLM(tmp_path).generate([ids], params)
    assert found.token_ids[:place] == output[:place]
    assert (found.token_ids[-1] == eos, found.finish_reason) == (stops, "stop" if stops else "length")


def test_stop_token_ids_stop_and_generation_config_names_the_eos(tmp_path: Path) -> None:
    model, ids, eos = eos_checkpoint(tmp_path)
    llm = LLM(tmp_path)
    output, _ = reference_greedy(model, ids, 40)
    stop = output[3]
    [found] = llm.generate([ids], SamplingParams(max_tokens=40, ignore_eos=True, stop_token_ids=(stop,)))
    assert found.token_ids == output[: output.index(stop) + 1] and found.finish_reason == "stop"
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert LLM(tmp_path).model_config.eos_ids == (5, 7) and llm.model_config.eos_ids == (eos,)
