"""The scheduler against step compositions recorded from vLLM 0.26.0's own scheduler, and its own rules."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.kv_cache import BlockPool
from engine.loop import Loop
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler, Step

RECORDED = json.loads((Path(__file__).parent / "data" / "vllm-0.26.0-schedules.json").read_text())


class Recorder:
    """A runner that computes nothing and notes what it was given, as [prefill chunks, number of decodes]."""

    def __init__(self, answer: int = 7) -> None:
        self.steps: list[list[Any]] = []
        self.answer = answer

    def launch(self, step: Step) -> int:
        chunks = [[int(row.request.id), row.length] for row in step.rows if row.is_prefill]
        self.steps.append([chunks, len(step.rows) - len(chunks)])
        return sum(row.samples for row in step.rows)

    def collect(self, launched: int) -> list[int]:
        return [self.answer] * launched


def drive(case: dict[str, Any], num_blocks: int = 200_000) -> list[list[Any]]:
    """The case's closed loop: a successor is seen `lag` rounds after the round that follows its predecessor's finish."""
    scheduler = Scheduler(case["budget"], case["in_flight"], BlockPool(num_blocks, 16))
    recorder = Recorder()
    loop = Loop(scheduler, recorder, depth=2 if case["asynchronous"] else 1)
    total, lag, following, round_ = len(case["prompts"]), case["lag"], 0, 0
    pending = [(0, i) for i in range(min(case["in_flight"], total))]
    following = len(pending)
    while pending or loop.has_unfinished:
        while pending and pending[0][0] <= round_:
            index = pending.pop(0)[1]
            length = case["outputs"][index]
            params = SamplingParams(max_tokens=length, min_tokens=length, ignore_eos=True)
            scheduler.add(Request(str(index), [1] * case["prompts"][index], params))
        for output in loop.step():
            if output.finish_reason is not None and following < total:
                pending.append((round_ + 1 + lag, following))
                following += 1
        round_ += 1
    return recorder.steps


def label(case: dict[str, Any]) -> str:
    return f"{case['name']}-{'async' if case['asynchronous'] else 'sync'}-lag{case['lag']}"


@pytest.mark.parametrize("case", RECORDED["cases"], ids=label)
def test_compositions_equal_vllm_step_by_step(case: dict[str, Any]) -> None:
    assert drive(case) == case["steps"]


def test_the_recording_is_the_whole_one() -> None:
    assert RECORDED["vllm"] == "0.26.0"
    kinds = {(case["name"], case["asynchronous"], case["lag"]) for case in RECORDED["cases"]}
    assert len(kinds) == 15 and {(a, lag) for _, a, lag in kinds} == {(True, 1), (True, 0), (False, 0)}
    assert len(RECORDED["cases"]) == 15 and sum(len(case["steps"]) for case in RECORDED["cases"]) > 2500


@pytest.mark.parametrize("depth", [1, 2])
def test_blocks_are_reserved_whole_so_a_request_waits_and_nothing_is_preempted(depth: int) -> None:
    blocks = BlockPool(num_blocks=1 + 6, block_size=16)
    scheduler = Scheduler(1000, 8, blocks)
    loop = Loop(scheduler, Recorder(), depth)
    for name in "012":
        scheduler.add(Request(name, [1] * 32, SamplingParams(max_tokens=16, ignore_eos=True)))
    loop.step()
    assert [request.id for request in scheduler.running] == ["0", "1"] and blocks.free == 0
    held = [block for request in scheduler.running for block in request.blocks]
    assert sorted(held) == [1, 2, 3, 4, 5, 6]
    finished = []
    while loop.has_unfinished:
        finished += [output.request_id for output in loop.step() if output.finish_reason]
    assert finished == ["0", "1", "2"] and blocks.free == 6


def test_a_request_that_stops_early_at_depth_two_drops_the_one_id_too_many() -> None:
    blocks = BlockPool(num_blocks=100, block_size=16)
    scheduler = Scheduler(1000, 2, blocks)
    loop = Loop(scheduler, Recorder(answer=5), depth=2)
    request = Request("0", [1] * 4, SamplingParams(max_tokens=8, min_tokens=3), eos_ids=(5,))
    scheduler.add(request)
    while loop.has_unfinished:
        loop.step()
    assert request.outputs == [5, 5, 5] and request.finish == "stop" and blocks.free == blocks.usable
    assert loop.steps == 4


def test_slots_never_move_and_are_reused() -> None:
    scheduler = Scheduler(64, 2, BlockPool(100, 16))
    loop = Loop(scheduler, Recorder(), depth=2)
    requests = [Request(str(i), [1] * 5, SamplingParams(max_tokens=2 + 3 * (i % 2), ignore_eos=True)) for i in range(6)]
    for request in requests:
        scheduler.add(request)
    seen: dict[str, set[int]] = {}
    while loop.has_unfinished:
        loop.step()
        for request in scheduler.running:
            seen.setdefault(request.id, set()).add(request.slot)
    assert all(len(slots) == 1 for slots in seen.values()) and set().union(*seen.values()) == {0, 1}


def test_scheduling_imports_no_torch() -> None:
    code = "import sys, engine.loop, engine.scheduler, engine.kv_cache, engine.request; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
