"""A leg of phase `score`: teacher forcing.  What the engine thinks of given ids, position by position; nothing is timed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from legs.protocol import SCORES, Corpus, LegRequest, ProtocolError, Scored, ScoreJob, anchor, read_jobs, write_scores

Ids = Sequence[int]


class Scores(Protocol):
    """What an engine gives back for one continuation."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    top: Sequence[Sequence[tuple[int, float]]]


class Scorer(Protocol):
    """An arm that can score."""

    def score_given(self, prompts: Sequence[Ids], continuations: Sequence[Ids], batch: int) -> Sequence[Scores]:
        """Score the given ids in prefill form, `batch` sequences in flight."""
        ...

    def score_own(self, prompts: Sequence[Ids], batch: int) -> Sequence[Scores]:
        """Decode greedily as the request's sampling says, `batch` requests in flight, and score the ids as they come."""
        ...


def run_jobs(arm: object, folder: Path, request: LegRequest, corpus: Corpus) -> tuple[dict[str, str], dict[str, int]]:
    """Carry out score.json.gz, write scores.json.gz; returns its `files` and `counts` for the result.

    Raises :class:`ProtocolError` for a job that is malformed, or that this arm has no way to do.
    """
    prompts = corpus.prompts[: request.requests]
    done: dict[str, list[Scored]] = {}
    for job in read_jobs(folder, request.requests):
        done[job.name] = _run(arm, job, prompts[: job.requests], done)
    files = {SCORES: write_scores(folder, done)}
    return files, {
        "requests": len(prompts), "prompt_tokens": sum(map(len, prompts)), "jobs": len(done),
        "output_tokens": sum(len(one.ids) for scores in done.values() for one in scores),
    }


def _run(arm: object, job: ScoreJob, prompts: Sequence[Ids], done: dict[str, list[Scored]]) -> list[Scored]:
    method = getattr(arm, "score_own" if job.form == "decode" else "score_given", None)
    if method is None:
        raise ProtocolError(f"job {job.name!r}: this arm cannot score in form {job.form!r}")
    if job.form == "decode":
        found = method(prompts, job.batch)
        wanted = [one.ids for one in found]
    else:
        wanted = [one.ids for one in done[job.follow]] if job.follow is not None else list(job.ids or ())
        found = method(prompts, wanted, job.batch)
    return [_checked(job, index, prompt, ids, one) for index, (prompt, ids, one) in enumerate(zip(prompts, wanted, found, strict=True))]


def _checked(job: ScoreJob, index: int, prompt: Ids, wanted: Ids, one: Scores) -> Scored:
    """As evidence holds it; raises :class:`ProtocolError` unless every id that was asked for has its score."""
    if list(one.ids) != list(wanted) or not len(one.ids) == len(one.logprobs) == len(one.top):
        raise ProtocolError(
            f"job {job.name!r}, request {index}: {len(one.logprobs)} scores for {len(wanted)} ids, or other ids were scored")
    return Scored(anchor=anchor(prompt, one.ids), ids=tuple(one.ids), logprobs=tuple(one.logprobs), top=tuple(map(tuple, one.top)))
