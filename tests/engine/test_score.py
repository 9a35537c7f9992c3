"""Teacher forcing against transformers: the scores of given ids, whoever wrote them, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.api import LLM, RequestError, SamplingParams
from legs.drivers.engine import EngineArm
from legs.drivers.scoring import run_jobs
from legs.protocol import Corpus, LegRequest, ScoreJob, read_scores, write_jobs
from tests.engine.checkpoints import VOCAB, prompt
from tests.engine.conftest import Reference
from tests.engine.test_faults import FAULTS

TOLERANCE = 2e-4
OPTIONS: dict[str, Any] = {"max_num_batched_tokens": 32, "max_num_seqs": 2}


def expected(model: Any, before: list[int], ids: list[int]) -> torch.Tensor:
    """Log-probabilities [len(ids), vocab] by one full forward of transformers' model."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*before, *ids]]), use_cache=False).logits[0, len(before) - 1 : -1]
    return torch.log_softmax(logits.float(), -1)


def error(llm: LLM, reference: Reference) -> float:
    """The largest difference from transformers over sequences of all lengths: greedy ids, and ids that nobody would choose."""
    sequences = [*zip(reference.prompts, reference.ids, strict=True), (reference.prompts[3], prompt(20, seed=99))]
    worst = 0.0
    for (before, ids), scores in zip(sequences, llm.score(sequences, top=5), strict=True):
        wanted = expected(reference.model, before, ids)
        rows = torch.arange(len(ids))
        assert scores.ids == ids and len(scores.logprobs) == len(scores.top) == len(ids)
        worst = max(worst, float((torch.tensor(scores.logprobs) - wanted[rows, torch.tensor(ids)]).abs().max()))
        for at, row in zip(scores.top, wanted, strict=True):
            assert [value for _, value in at] == sorted((value for _, value in at), reverse=True)
            worst = max(worst, *(abs(value - float(row[token])) for token, value in at))
            worst = max(worst, float((torch.tensor([value for _, value in at]) - row.topk(5).values).abs().max()))
    return worst


@pytest.mark.parametrize("rows", [3, 64])
def test_scores_are_those_of_transformers(monkeypatch: pytest.MonkeyPatch, reference: Reference, rows: int) -> None:
    """Prompts shorter and longer than a chunk, continuations that begin in one chunk and end in another, logits a few rows at a time."""
    monkeypatch.setattr("engine.score.LOGIT_ROWS", rows)
    assert error(LLM(reference.folder, **OPTIONS), reference) < TOLERANCE


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.__name__ in ("mask_off_by_one", "residual_dropped")],
                         ids=lambda fault: fault.__name__)
def test_a_fault_in_the_forward_shows(monkeypatch: pytest.MonkeyPatch, reference: Reference, fault: Any) -> None:
    fault(monkeypatch)
    assert error(LLM(reference.folder, **OPTIONS), reference) > 0.05


def test_scoring_leaves_nothing_behind(reference: Reference) -> None:
    llm = LLM(reference.folder, **OPTIONS)
    free = llm.blocks.free
    llm.score([(reference.prompts[4], reference.ids[4])] * 3)
    assert llm.blocks.free == free
    outputs = llm.generate(reference.prompts[:3], SamplingParams(max_tokens=24, min_tokens=24))
    assert [output.token_ids for output in outputs] == reference.ids[:3]


def test_what_cannot_be_scored_is_refused(reference: Reference) -> None:
    llm = LLM(reference.folder, max_model_len=64, **OPTIONS)
    for sequence, problem in (
        (([], [1]), "need ids"), (([1], []), "need ids"), (([1], [VOCAB]), "need ids"), (([1] * 60, [1] * 5), "exceed the 64"),
    ):
        with pytest.raises(RequestError, match=f"sequence 0: .*{problem}"):
            llm.score([sequence])
    with pytest.raises(RequestError, match="top is 0"):
        llm.score([([1], [1])], top=0)
    llm.add_request("open", [5, 6, 7])
    with pytest.raises(RequestError, match="unfinished"):
        llm.score([([1], [1])])


def test_the_engine_s_arm_scores_given_ids_one_by_one_and_refuses_the_rest(reference: Reference, tmp_path: Path) -> None:
    arm = EngineArm(LLM(reference.folder, **OPTIONS), SamplingParams(max_tokens=24))
    corpus = Corpus(name="c", source="s", vocab_size=VOCAB, prompts=tuple(map(tuple, reference.prompts)), warmup=())
    request = LegRequest(
        protocol=1, leg="score", phase="score", arm="on", driver="engine", corpus="c", corpus_sha256="0", requests=2, warmup_requests=0,
        max_tokens=24, min_tokens=24, ignore_eos=True, concurrency=1, client="step", options={},
    )
    job = ScoreJob(name="given", form="prefill", batch=1, ids=tuple(map(tuple, reference.ids[:2])))
    write_jobs(tmp_path, [job])
    run_jobs(arm, tmp_path, request, corpus)
    for before, ids, scores in zip(reference.prompts, reference.ids, read_scores(tmp_path)["given"], strict=False):
        wanted = expected(reference.model, before, ids).gather(1, torch.tensor(ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(scores.logprobs), wanted, atol=TOLERANCE)
        assert [len(at) for at in scores.top] == [20] * len(ids)
    for other, problem in ((dataclasses.replace(job, batch=2), "one sequence at a time"),
                           (ScoreJob(name="own", form="decode", batch=1), "cannot score in form 'decode'")):
        (tmp_path / "score.json.gz").unlink()
        write_jobs(tmp_path, [other])
        with pytest.raises(ValueError, match=problem):
            run_jobs(arm, tmp_path, request, corpus)
