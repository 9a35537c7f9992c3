"""The engine on the card: the same ids as on the host, however steps overlap, are launched, are cut and are padded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.api import LLM, RequestError, SamplingParams
from engine.loader.load import load
from engine.models.build import MODELS
from engine.models.config import read_config
from tests.engine.checkpoints import make_checkpoint, prompt
from tests.engine.conftest import EOS, STEPS, Reference
from tests.engine.serving import PARAMS

pytest.importorskip("triton")
MOST = 33
modes = pytest.mark.parametrize(("depth", "eager"), [(1, True), (1, False), (2, True), (2, False)], ids=str)


def generate(llm: LLM, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[tuple[list[int], str | None]]:
    return [(output.token_ids, output.finish_reason) for output in llm.generate(prompts, params)]


def check_counters(llm: LLM) -> None:
    """Every step without prompt tokens was a replayed graph, unless graphs are off."""
    counters = llm.counters()
    decodes = counters["steps"] - counters["mixed_steps"]
    assert decodes > 0 and counters["graph_replays"] == (0 if llm.resolved["enforce_eager"] else decodes)


@modes
@pytest.mark.parametrize(("seqs", "budget", "block_size"), [(8, 2048, 16), (3, 64, 16), (8, 16, 4), (5, 33, 8), (2, 1, 16)])
def test_ids_equal_transformers(reference: Reference, depth: int, eager: bool, seqs: int, budget: int, block_size: int) -> None:
    llm = LLM(reference.folder, device="cuda", depth=depth, enforce_eager=eager, max_num_seqs=seqs, max_num_batched_tokens=budget,
              block_size=block_size)
    found = generate(llm, reference.prompts, [PARAMS] * len(reference.prompts))
    assert found == [(ids, "length") for ids in reference.ids]
    assert llm.blocks.free == llm.blocks.usable
    check_counters(llm)


@pytest.fixture(scope="module")
def staggered(references: dict[str, Reference]) -> tuple[Path, list[list[int]], list[SamplingParams], list[tuple[list[int], str | None]]]:
    """Prompts and outputs of many lengths, some with suppressed ids for a part, and what the host's engine makes of them."""
    folder = references["qwen3"].folder
    prompts = [prompt(1 + 7 * i % 40, seed=i) for i in range(MOST)]
    params = [SamplingParams(max_tokens=2 + 5 * i % 23, min_tokens=i % 3, ignore_eos=i % 2 == 0) for i in range(MOST)]
    return folder, prompts, params, generate(LLM(folder), prompts, params)


@modes
def test_every_batch_size_across_the_padded_ones(staggered: Any, depth: int, eager: bool) -> None:
    folder, prompts, params, expected = staggered
    llm = LLM(folder, device="cuda", depth=depth, enforce_eager=eager, max_num_seqs=MOST, max_num_batched_tokens=256)
    assert llm.runner.graphs.sizes == (1, 2, 4, 8, 16, 24, 32, 40)
    for count in range(1, MOST + 1):
        assert generate(llm, prompts[:count], params[:count]) == expected[:count], f"{count} requests"
    check_counters(llm)


@modes
def test_arrivals_while_others_run(staggered: Any, depth: int, eager: bool) -> None:
    """A request every other step into five slots: slots change hands while steps are in flight."""
    folder, prompts, params, expected = staggered
    llm = LLM(folder, device="cuda", depth=depth, enforce_eager=eager, max_num_seqs=5, max_num_batched_tokens=24)
    found: dict[str, list[int]] = {}
    steps = following = 0
    while following < MOST or llm.has_unfinished():
        if steps % 2 == 0 and following < MOST:
            llm.add_request(str(following), prompts[following], params[following])
            following += 1
        for request_id, ids, _ in llm.step():
            found.setdefault(request_id, []).extend(ids)
        steps += 1
    assert [found[str(i)] for i in range(MOST)] == [ids for ids, _ in expected]


@modes
def test_stop_ids_and_min_tokens(references: dict[str, Reference], depth: int, eager: bool) -> None:
    """A stop in the middle (at depth 2 one id too many is on its way), and the same id suppressed until min_tokens."""
    reference = references["llama"]
    ids = reference.ids[5]
    stop = ids[10]
    llm = LLM(reference.folder, device="cuda", depth=depth, enforce_eager=eager)
    host = LLM(reference.folder)
    params = [SamplingParams(max_tokens=STEPS, min_tokens=least, ignore_eos=True, stop_token_ids=(stop, EOS)) for least in (0, 12, STEPS)]
    prompts = [reference.prompts[5]] * 3
    found = generate(llm, prompts, params)
    assert found == generate(host, prompts, params)
    assert found[0][1] == "stop" and stop not in found[2][0]
    assert generate(llm, reference.prompts, [PARAMS] * 7) == [(one, "length") for one in reference.ids]


def test_more_stop_ids_than_a_slot_keeps_are_refused(references: dict[str, Reference]) -> None:
    llm = LLM(references["llama"].folder, device="cuda", enforce_eager=True)
    with pytest.raises(RequestError, match="request a: 101 end-of-sequence and stop ids; this device keeps 60"):
        llm.add_request("a", [5, 6], SamplingParams(stop_token_ids=tuple(range(100, 200))))


def test_options_resolve_for_a_card(references: dict[str, Reference]) -> None:
    resolved = LLM(references["llama"].folder, device="cuda").resolved
    assert (resolved["device"], resolved["depth"], resolved["enforce_eager"]) == ("cuda", 2, False)
    assert resolved["attention_backend"] == "triton" and (resolved["block_size"], resolved["num_blocks"]) == (32, 1 + 32 * 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [1000, 16 << 20])
def test_weights_on_the_card_are_the_host_s_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, window: int
) -> None:
    """Windows smaller than a tensor are used again and again; the file's dtype is converted on the card."""
    monkeypatch.setattr("engine.loader.direct.WINDOW", window)
    make_checkpoint(tmp_path, "qwen3", shard="100KB")
    config = read_config(tmp_path)
    parameters = MODELS[config.architecture].parameters(config)
    host, direct, staged = (
        load(tmp_path, parameters, lambda _: False, dtype, way, device)
        for way, device in (("direct", "cpu"), ("direct", "cuda"), ("staged", "cuda")))
    torch.cuda.synchronize()
    for name, weight in host.items():
        assert direct[name].is_cuda and torch.equal(direct[name].cpu(), weight) and torch.equal(staged[name].cpu(), weight), name


@modes
def test_a_bfloat16_run_repeats_itself(tmp_path: Path, depth: int, eager: bool) -> None:
    """No atomics, fixed orders: the same trace gives the same ids, and graph or not makes no bit of difference."""
    make_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16)
    prompts = [prompt(10 + 9 * i, seed=i) for i in range(9)]
    params = [SamplingParams(max_tokens=30, min_tokens=30, ignore_eos=True)] * 9
    found = []
    for mode in (eager, eager, not eager):
        llm = LLM(tmp_path, device="cuda", depth=depth, enforce_eager=mode, max_num_batched_tokens=128, max_num_seqs=8)
        found.append(generate(llm, prompts, params))
    assert found[0] == found[1] == found[2]
