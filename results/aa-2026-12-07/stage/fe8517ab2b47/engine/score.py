"""Teacher forcing: what the model thinks of given ids, by the same packing, cache and forward as serving, only with more rows read out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from engine.batch import Batch, SlotBatch, pack, pack_slots
from engine.request import Request, SamplingParams
from engine.runner import CardRunner, Runner
from engine.scheduler import Row, Scheduler, Step

LOGIT_ROWS = 64
"""Rows whose logits are held at once: 64 times a vocabulary of 250,000 in float32 is 64 MB."""


class TokenScores(NamedTuple):
    """Of one sequence's given ids: the logarithm of each id's probability, and at each position the likeliest (id, logarithm)s."""

    ids: list[int]
    logprobs: list[float]
    top: list[list[tuple[int, float]]]


@torch.inference_mode()
def score_sequence(runner: Runner | CardRunner, scheduler: Scheduler, prompt: Sequence[int], ids: Sequence[int], top: int) -> TokenScores:
    """Score `ids` after `prompt` on an idle engine; the caller has checked that both fit.  The last id is scored, never fed."""
    request = Request("score", [*prompt, *ids[:-1]], SamplingParams(max_tokens=1))
    request.slot, request.blocks = scheduler.slots.take(), scheduler.blocks.take(scheduler.blocks.needed(len(request.prompt)))
    scores = TokenScores(list(ids), [], [])
    try:
        for first, hidden in _hidden(runner, request, scheduler.max_num_batched_tokens, len(prompt) - 1):
            for at in range(0, len(hidden), LOGIT_ROWS):
                logprobs = torch.log_softmax(runner.model.logits(hidden[at : at + LOGIT_ROWS]).float(), dim=-1)
                begin = first + at - (len(prompt) - 1)
                given = torch.tensor(ids[begin : begin + len(logprobs)], device=logprobs.device)
                values, tokens = logprobs.topk(top, dim=-1)
                scores.logprobs.extend(logprobs.gather(1, given[:, None])[:, 0].tolist())
                scores.top.extend(
                    list(zip(row, held, strict=True)) for row, held in zip(tokens.tolist(), values.tolist(), strict=True))
    finally:
        scheduler.slots.give_back(request.slot)
        scheduler.blocks.give_back(request.blocks)
    return scores


def _hidden(runner: Runner | CardRunner, request: Request, budget: int, wanted: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(position of the first row, hidden states [rows, hidden]) of all positions from `wanted` on, the prompt cut as serving cuts it."""
    total = len(request.prompt)
    for start in range(0, total, budget):
        length = min(budget, total - start)
        first = max(wanted - start, 0)
        step = Step((Row(request, start, length, samples=False, suppress=False),), (request,) if start == 0 else ())
        rows = range(min(first, length), length)
        batch: Batch | SlotBatch
        batch = _card_batch(runner, step, rows) if isinstance(runner, CardRunner) else _host_batch(runner, step, rows)
        hidden = runner.model.forward(batch, runner.caches)
        if rows:
            yield start + first, hidden


def _host_batch(runner: Runner, step: Step, rows: range) -> Batch:
    for request in step.admitted:
        runner.admit(request)
    return dataclasses.replace(
        pack(step, runner.caches.block_tables, runner.block_size, runner.dtype), sample_rows=torch.tensor(rows, dtype=torch.int64))


def _card_batch(runner: CardRunner, step: Step, rows: range) -> SlotBatch:
    fields = pack_slots(step, runner.block_size, runner.tile_rows, runner.state.shape[1])
    return runner.lay_out(step, fields._replace(sample_rows=np.asarray(rows, np.int32)))[0]
