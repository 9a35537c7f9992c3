"""Bad requests and options: a clear refusal, and the engine goes on serving the others with the right ids."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.api import LLM, ConfigError, RequestError, SamplingParams
from tests.engine.conftest import Reference
from tests.engine.serving import PARAMS


@pytest.mark.parametrize(("prompt", "params", "message"), [
    ([], {}, "prompt is empty"),
    ([5] * 490, {"max_tokens": 23}, "490 prompt tokens and max_tokens 23 exceed max_model_len 512"),
    ([5, 512], {}, r"prompt id 512 is no integer in 0\.\.511"),
    ([5, -1], {}, "prompt id -1"),
    ([5, 1.5], {}, r"prompt id 1\.5"),
    ([5, True], {}, "prompt id True"),
    ([5, "a"], {}, "prompt id 'a'"),
    ([5] * 300, {"max_tokens": 100}, "needs 25 KV blocks of 16 tokens, the engine has 19; raise num_blocks"),
    ([5], {"stop_token_ids": (600,)}, "stop_token_ids"),
])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_bad_request_is_refused_and_the_others_are_served(
    references: dict[str, Reference], depth: int, prompt: list[Any], params: dict[str, Any], message: str
) -> None:
    reference = references["llama"]
    llm = LLM(reference.folder, depth=depth, num_blocks=20)
    llm.add_request("before", reference.prompts[3], PARAMS)
    for _ in range(3):
        llm.step()
    with pytest.raises(RequestError, match=message) as refusal:
        llm.add_request("bad", prompt, SamplingParams(**params))
    assert "request bad" in str(refusal.value)
    llm.add_request("after", reference.prompts[5], PARAMS)
    ids: dict[str, list[int]] = {"before": [], "after": []}
    while llm.has_unfinished():
        for request_id, new, _ in llm.step():
            ids[request_id] += new
    # The first ids of "before" came out of the three steps above and were dropped there.
    assert ids["after"] == reference.ids[5] and ids["before"] == reference.ids[3][-len(ids["before"]):]
    assert len(ids["before"]) >= 21 and llm.blocks.free == 19


@pytest.mark.parametrize(("params", "message"), [
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"max_tokens": 2.5}, r"max_tokens is 2\.5"),
    ({"max_tokens": True}, "max_tokens is True"),
    ({"min_tokens": 17}, r"min_tokens is 17; it must lie in 0\.\.max_tokens \(16\)"),
    ({"min_tokens": -1}, "min_tokens is -1"),
    ({"temperature": 0.7}, r"temperature is 0\.7; only 0"),
    ({"ignore_eos": 1}, "ignore_eos is 1"),
    ({"stop_token_ids": (-3,)}, "stop_token_ids"),
])
def test_bad_sampling_params(params: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**params)


def test_an_id_in_use_is_refused_and_free_again_after_the_finish(references: dict[str, Reference]) -> None:
    llm = LLM(references["llama"].folder)
    llm.add_request("one", [5, 6], SamplingParams(max_tokens=2))
    with pytest.raises(RequestError, match="request one: a request of this id"):
        llm.add_request("one", [5, 6])
    while llm.has_unfinished():
        llm.step()
    llm.add_request("one", [5, 6])


@pytest.mark.parametrize(("options", "message"), [
    ({"depth": 3}, "depth is 3; built are 1, 2"),
    ({"depth": 0}, "depth is 0"),
    ({"device": "tpu"}, "device is 'tpu'; built are cpu"),
    ({"enforce_eager": False}, "enforce_eager is False; device cpu has no graphs"),
    ({"enforce_eager": 1}, "enforce_eager is 1; it must be true or false"),
    ({"dtype": "float16"}, "dtype is 'float16'; built are float32, bfloat16"),
    ({"load": "mapped"}, "load is 'mapped'; built are direct, staged"),
    ({"max_num_seqs": 0}, "max_num_seqs is 0"),
    ({"max_num_batched_tokens": "many"}, "max_num_batched_tokens is 'many'"),
    ({"max_model_len": 513}, "max_model_len is 513; the checkpoint has 512 positions"),
    ({"num_blocks": 1}, "num_blocks is 1"),
    ({"gpu_memory": 1}, "option 'gpu_memory' is unknown; known are dtype"),
])
def test_bad_options(references: dict[str, Reference], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(references["llama"].folder, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a card")
def test_a_card_that_is_not_there_is_refused(references: dict[str, Reference]) -> None:
    with pytest.raises(ConfigError, match=r"device is 'cuda'; torch .* finds no such device here"):
        LLM(references["llama"].folder, device="cuda")


def test_resolved_says_what_is_used(references: dict[str, Reference]) -> None:
    resolved = LLM(references["llama"].folder).resolved
    assert resolved["dtype"] == "float32" and resolved["depth"] == 1 and resolved["load"] == "direct"
    assert resolved["max_model_len"] == 512 and resolved["num_blocks"] == 1 + 32 * 32
    llm = LLM(references["llama"].folder, dtype="bfloat16", depth=2, max_model_len=64, max_num_seqs=2)
    assert llm.resolved["num_blocks"] == llm.blocks.num_blocks == llm.runner.caches.keys_values.shape[1] == 9
    assert llm.resolved["dtype"] == "bfloat16" == str(llm.runner.caches.keys_values.dtype).removeprefix("torch.")


def test_a_request_may_fill_the_model_s_length_exactly(references: dict[str, Reference]) -> None:
    [output] = LLM(references["llama"].folder).generate([[5] * 500], SamplingParams(max_tokens=12, ignore_eos=True))
    assert len(output.token_ids) == 12 and output.finish_reason == "length"


def test_generate_wants_one_params_or_one_each(references: dict[str, Reference]) -> None:
    llm = LLM(references["llama"].folder)
    with pytest.raises(RequestError, match="3 prompts with 2 sampling parameters"):
        llm.generate([[5], [6], [7]], [SamplingParams(), SamplingParams()])
    assert not llm.has_unfinished()
    outputs = llm.generate([[5], [6]], [SamplingParams(max_tokens=length, ignore_eos=True) for length in (3, 5)])
    assert [len(output.token_ids) for output in outputs] == [3, 5]


def test_counters(references: dict[str, Reference]) -> None:
    llm = LLM(references["llama"].folder, max_num_batched_tokens=8)
    llm.generate([[5] * 20], SamplingParams(max_tokens=4, min_tokens=2, ignore_eos=True))
    assert llm.counters() == {
        "steps": 6, "mixed_steps": 3, "preemptions": 0, "prefix_cache_queries": 0, "prefix_cache_hits": 0,
        "sampler_calls": {"greedy": 2, "greedy_masked": 2}, "graph_replays": 0,
    }
