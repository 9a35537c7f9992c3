"""Serving prompts through the engine with the logits of every sampled id kept, and the check against transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.api import LLM, SamplingParams
from engine.batch import Batch
from engine.scheduler import Step
from tests.engine.conftest import EOS, STEPS, Reference

PARAMS = SamplingParams(max_tokens=STEPS, min_tokens=STEPS, ignore_eos=True)


@dataclass
class Served:
    """What came out, by prompt index; `logits` as the model gave them, before any id was masked."""

    ids: dict[int, list[int]] = field(default_factory=dict)
    logits: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)


def record_logits(llm: LLM, served: Served) -> None:
    """Keep a copy of each row of logits, under the request it belongs to."""
    launch, sample = llm.runner.launch, llm.runner.sample
    asked: list[int] = []

    def launch_and_note(step: Step) -> Any:
        asked[:] = [int(row.request.id) for row in step.rows if row.samples]
        return launch(step)

    def sample_and_keep(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        for index, row in zip(asked, logits.clone(), strict=True):
            served.logits.setdefault(index, []).append(row)
        return sample(logits, batch)

    llm.runner.launch, llm.runner.sample = launch_and_note, sample_and_keep  # type: ignore[method-assign]


def serve(llm: LLM, prompts: Sequence[Sequence[int]], order: Sequence[int], every: int = 0, params: SamplingParams = PARAMS) -> Served:
    """Submit prompts in `order`, all at once or one each `every` steps, and run to the end."""
    served = Served()
    record_logits(llm, served)
    waiting, steps = list(order), 0
    while waiting or llm.has_unfinished():
        while waiting and (not every or steps % every == 0):
            index = waiting.pop(0)
            llm.add_request(str(index), prompts[index], params)
            if every:
                break
        for output in llm.step():
            served.ids.setdefault(int(output.request_id), []).extend(output.token_ids)
            if output.finish_reason is not None:
                served.finish[int(output.request_id)] = output.finish_reason
        steps += 1
    return served


def relative_l2(found: torch.Tensor, expected: torch.Tensor) -> float:
    """|found - expected| / |expected| over the entries that are finite in `expected`."""
    use = expected.isfinite()
    return float((found.float()[use] - expected[use]).norm() / expected[use].norm())


def check_parity(llm: LLM, reference: Reference, order: Sequence[int] | None = None, every: int = 0, tolerance: float = 1e-5) -> None:
    """Greedy ids equal to transformers', and each id's logits within `tolerance` (relative L2)."""
    order = range(len(reference.prompts)) if order is None else order
    served = serve(llm, reference.prompts, order, every)
    for index in order:
        assert served.ids[index] == reference.ids[index], f"prompt {index}: ids differ"
        assert served.finish[index] == "length"
        for step, (found, expected) in enumerate(zip(served.logits[index], reference.logits[index], strict=True)):
            error = relative_l2(found, expected)
            assert error < tolerance, f"prompt {index}, id {step}: logits differ by {error:.2e}"
    assert EOS not in {token for ids in served.ids.values() for token in ids}
