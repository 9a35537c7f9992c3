"""Scoring legs: jobs and scores as files, and what run_jobs makes of an arm's answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from legs.drivers.scoring import run_jobs
from legs.protocol import (
    SCORES,
    Corpus,
    LegRequest,
    ProtocolError,
    Scored,
    ScoreJob,
    anchor,
    read_jobs,
    read_scores,
    sha256,
    write_jobs,
    write_scores,
)

CORPUS = Corpus(name="c", source="s", vocab_size=100, prompts=((1, 2), (3, 4), (5, 6)), warmup=())
REQUEST = LegRequest(
    protocol=1, leg="score", phase="score", arm="pin", driver="vllm", corpus="c", corpus_sha256="0", requests=2, warmup_requests=0,
    max_tokens=2, min_tokens=2, ignore_eos=True, concurrency=1, client="step", options={},
)
OWN = ScoreJob(name="own", form="decode", batch=1)
GIVEN = ScoreJob(name="given", form="prefill", batch=2, ids=((7, 8), (9, 7)))
FOLLOWS = ScoreJob(name="follows", form="prefill", batch=1, follow="own")


class One:
    def __init__(self, ids: Sequence[int], value: float) -> None:
        self.ids, self.logprobs, self.top = ids, [value] * len(ids), [[(0, -0.1)]] * len(ids)


class Arm:
    """Decodes (10, 11) after any prompt; notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    def score_given(self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]], batch: int) -> list[One]:
        self.asked.append((tuple(prompts), tuple(map(tuple, continuations)), batch))
        return [One(ids, -2.0) for ids in continuations]

    def score_own(self, prompts: Sequence[Sequence[int]], batch: int) -> list[One]:
        self.asked.append((tuple(prompts), batch))
        return [One([10, 11], -1.0) for _ in prompts]


def test_jobs_are_done_in_order_over_the_requests_prompts(tmp_path: Path) -> None:
    write_jobs(tmp_path, [OWN, GIVEN, FOLLOWS])
    arm = Arm()
    files, counts = run_jobs(arm, tmp_path, REQUEST, CORPUS)
    prompts = CORPUS.prompts[:2]
    assert arm.asked == [(prompts, 1), (prompts, ((7, 8), (9, 7)), 2), (prompts, ((10, 11), (10, 11)), 1)]
    scores = read_scores(tmp_path)
    assert scores["given"][1] == Scored(anchor=anchor((3, 4), (9, 7)), ids=(9, 7), logprobs=(-2.0, -2.0), top=(((0, -0.1),),) * 2)
    assert [one.ids for one in scores["follows"]] == [(10, 11), (10, 11)]
    assert files == {SCORES: sha256((tmp_path / SCORES).read_bytes())}
    assert counts == {"requests": 2, "prompt_tokens": 4, "jobs": 3, "output_tokens": 12}


def test_a_job_may_be_of_the_first_requests_only(tmp_path: Path) -> None:
    write_jobs(tmp_path, [dataclasses.replace(OWN, requests=1), dataclasses.replace(FOLLOWS, requests=1), GIVEN])
    arm = Arm()
    _, counts = run_jobs(arm, tmp_path, REQUEST, CORPUS)
    first = CORPUS.prompts[:1]
    assert arm.asked == [(first, 1), (first, ((10, 11),), 1), (CORPUS.prompts[:2], ((7, 8), (9, 7)), 2)]
    assert counts["output_tokens"] == 2 + 2 + 4


@pytest.mark.parametrize(("jobs", "problem"), [
    ([OWN, dataclasses.replace(GIVEN, name="own")], "job 'own' has a name that an earlier job has"),
    ([dataclasses.replace(OWN, form="guess")], "form 'guess' is unknown"),
    ([dataclasses.replace(OWN, batch=0)], "batch 0 is not 1 or more"),
    ([dataclasses.replace(OWN, ids=((1,), (2,)))], "decode writes its own"),
    ([dataclasses.replace(GIVEN, ids=None)], "prefill scores `ids` or those of `follow`"),
    ([OWN, dataclasses.replace(GIVEN, follow="own")], "prefill scores `ids` or those of `follow`"),
    ([FOLLOWS, OWN], "follows 'own', which is no earlier job"),
    ([dataclasses.replace(GIVEN, ids=((7, 8),))], "has not 2 continuations"),
    ([dataclasses.replace(GIVEN, ids=((7, 8), ()))], "has not 2 continuations"),
    ([OWN, dataclasses.replace(FOLLOWS, requests=1)], "and 'own' are of different requests"),
    ([dataclasses.replace(OWN, requests=3)], "is of 3 requests, the leg has 2"),
    ([dataclasses.replace(OWN, requests=0)], "is of 0 requests, the leg has 2"),
    ([dataclasses.replace(GIVEN, requests=1)], "has not 1 continuations"),
])
def test_a_malformed_job_is_refused_by_name(tmp_path: Path, jobs: list[ScoreJob], problem: str) -> None:
    write_jobs(tmp_path, jobs)
    with pytest.raises(ProtocolError, match=problem):
        read_jobs(tmp_path, 2)


def test_an_arm_without_the_form_is_refused(tmp_path: Path) -> None:
    write_jobs(tmp_path, [OWN])
    with pytest.raises(ProtocolError, match="job 'own': this arm cannot score in form 'decode'"):
        run_jobs(object(), tmp_path, REQUEST, CORPUS)
    assert not (tmp_path / SCORES).exists()


def test_an_anchor_holds_every_id_and_where_the_prompt_ends() -> None:
    same = anchor((1, 2), (3, 4))
    assert same == anchor([1, 2], [3, 4])
    assert len({same, anchor((1, 2), (3, 5)), anchor((1, 9), (3, 4)), anchor((1, 2, 3), (4,)), anchor((1, 2), (4, 3))}) == 5


def test_scores_are_written_as_they_are_read_and_never_without_numbers(tmp_path: Path) -> None:
    one = Scored(anchor="a", ids=(1,), logprobs=(-0.1234567890123,), top=(((1, -0.1234567890123), (2, -3.0)),))
    write_scores(tmp_path, {"job": [one]})
    assert read_scores(tmp_path) == {"job": [one]}
    (tmp_path / SCORES).unlink()
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_scores(tmp_path, {"job": [dataclasses.replace(one, logprobs=(float("nan"),))]})
