"""What a leg must satisfy before a number counts: each check refuses the leg it is there to refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.series import checks, gate
from legs.protocol import (
    MARK_NAMES,
    OUTPUTS,
    PROTOCOL,
    RESULT,
    TRACES,
    LegRequest,
    Marks,
    ProtocolError,
    Trace,
    to_json,
    write_atomic,
    write_outputs,
    write_traces,
)

REQUEST = LegRequest(
    protocol=PROTOCOL, leg="performance-1-on", phase="performance", arm="on", driver="engine", corpus="legs/corpora/toy.json.gz",
    corpus_sha256="11", requests=2, warmup_requests=0, max_tokens=3, min_tokens=3, ignore_eos=True, concurrency=2, client="step",
    options={"dtype": "float32"},
)
PROMPT_TOKENS = 9


def trace(index: int) -> Trace:
    return Trace(index=index, prompt_tokens=4 + index, scheduled_ns=100, submitted_ns=101,
                 stamps=((200, 1), (300, 1), (400, 1)), end_ns=400, finish="length")


def leg(
    folder: Path, traces: list[Trace] | None = None, outputs: list[list[int]] | None = None, marks: tuple[str, ...] = MARK_NAMES,
    **changes: Any,
) -> dict[str, Any]:
    """A finished leg's folder, well formed but for the changes; returns its result as read back."""
    write = Marks(folder / "marks.jsonl")
    for t, name in enumerate(marks):
        write(name, t)
    files = {
        TRACES: write_traces(folder, traces or [trace(0), trace(1)]),
        OUTPUTS: write_outputs(folder, outputs or [[5, 6, 7], [5, 6, 8]]),
    }
    result = {
        "protocol": PROTOCOL, "leg": REQUEST.leg, "arm": "on", "client": "step", "who": {}, "device": {}, "resolved": {"dtype": "float32"},
        "counters": {"prefix_cache_hits": 0, "preemptions": 0}, "counts": {"requests": 2, "prompt_tokens": 9, "output_tokens": 6},
        "files": files, "sys_path": ["stage:."], "pids": [1], **changes,
    }
    write_atomic(folder / RESULT, to_json(result))
    return checks.read_result(folder, REQUEST)


def reasons(folder: Path, **changes: Any) -> str:
    result = leg(folder, **changes)
    return "\n".join(checks.broken_contract(folder, REQUEST, result, REQUEST.options, PROMPT_TOKENS))


def test_a_good_leg_has_no_reasons(tmp_path: Path) -> None:
    assert reasons(tmp_path) == ""


@pytest.mark.parametrize(("changes", "said"), [
    ({"resolved": {"dtype": "bfloat16"}}, "option dtype: declared 'float32', resolved 'bfloat16'"),
    ({"resolved": {}}, "option dtype: declared 'float32', resolved None"),
    ({"sys_path": ["stage:.", "/repository"]}, "from outside its stage"),
    ({"counts": {"requests": 2, "prompt_tokens": 10, "output_tokens": 6}}, "prompt_tokens: result.json counted 10, the plan says 9"),
    ({"counts": {"requests": 2, "prompt_tokens": 9, "output_tokens": 12}}, "output_tokens: result.json counted 12, the plan says 6"),
    ({"traces": [trace(0), replace(trace(1), prompt_tokens=4)]}, "prompt_tokens: the client counted 8, the plan says 9"),
    ({"outputs": [[5, 6, 7], [5, 6]]}, "request 1: 2 output ids, 3 were asked for"),
    ({"outputs": [[5, 6, 7]]}, "outputs of 1 requests, 2 were asked for"),
    ({"traces": [trace(0), replace(trace(1), finish="stop")]}, "request 1: finished by 'stop'"),
    ({"traces": [trace(0), replace(trace(1), stamps=((200, 1), (200, 1), (400, 1)))]}, "request 1: its times are not strictly increasing"),
    ({"traces": [trace(0), replace(trace(1), submitted_ns=250)]}, "request 1: its times are not strictly increasing"),
    ({"marks": MARK_NAMES[:-1]}, "marks missing: drained"),
    ({"marks": (*MARK_NAMES[1:], MARK_NAMES[0])}, "marks are out of order: load_start before imported"),
])
def test_a_broken_contract_is_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    assert said in reasons(tmp_path, **changes)


@pytest.mark.parametrize(("counters", "said"), [
    ({"prefix_cache_hits": 0, "preemptions": 0}, None),
    ({"prefix_cache_hits": 16, "preemptions": 0}, "prefix_cache_hits is 16"),
    ({"prefix_cache_hits": 0, "preemptions": 1}, "preemptions is 1"),
    ({"prefix_cache_hits": None, "preemptions": 0}, "prefix_cache_hits is unreadable"),
    ({"prefix_cache_hits": 0}, "preemptions is unreadable"),
])
def test_contamination_voids_and_the_unreadable_is_no_zero(counters: dict[str, Any], said: str | None) -> None:
    found = checks.contaminated({"counters": counters})
    assert found == [] if said is None else said in "\n".join(found)


@pytest.mark.parametrize(("harm", "said"), [
    (lambda folder: (folder / RESULT).unlink(), "the leg did not happen"),
    (lambda folder: (folder / RESULT).write_text("{"), "is not JSON"),
    (lambda folder: (folder / OUTPUTS).write_bytes(b"x"), "outputs.json.gz: its hash is not the one"),
    (lambda folder: edit(folder / RESULT, arm="off"), "answers 'performance-1-on' of arm 'off'"),
    (lambda folder: edit(folder / RESULT, counters=None), "field 'counters' is None"),
])
def test_a_result_that_cannot_be_trusted_is_refused(tmp_path: Path, harm: Callable[[Path], None], said: str) -> None:
    leg(tmp_path)
    harm(tmp_path)
    with pytest.raises(ProtocolError, match=said.replace(".", r"\.")):
        checks.read_result(tmp_path, REQUEST)


def edit(path: Path, **changes: Any) -> None:
    path.write_bytes(to_json({**json.loads(path.read_bytes()), **changes}))


def test_the_gate_passes_only_on_every_id_of_every_case() -> None:
    reference = {0: [1, 2, 3], 1: [4, 5, 6]}
    same = [[1, 2, 3], [4, 5, 6]]
    good = gate.decide(reference, {"on": same, "off": same}, "aa")
    assert (good["ok"], good["cases"], good["passed"], good["skipped"], good["failures"]) == (True, 4, 4, 0, [])
    wrong = gate.decide(reference, {"on": same, "off": [[1, 2, 3], [4, 9, 6]]}, "aa")
    assert not wrong["ok"]
    assert not wrong["on_off_identical"]
    assert wrong["failures"] == [{"arm": "off", "request": 1, "position": 1, "expected": 5, "got": 9}]
    assert "arm off, request 1, position 1: expected 5, got 9" in gate.sentence(wrong)


def test_a_skipped_case_or_an_empty_gate_did_not_pass() -> None:
    assert not gate.decide({0: [1], 1: [2]}, {"on": [[1]]}, "aa")["ok"]
    assert gate.decide({0: [1], 1: [2]}, {"on": [[1]]}, "aa")["skipped"] == 1
    assert not gate.decide({}, {"on": []}, "aa")["ok"]
    assert not gate.decide({0: [1, 2]}, {"on": [[1]]}, "aa")["ok"], "a short output is a divergence"


def clocks(*medians: float | None) -> dict[str, Any]:
    cards = [{"index": i, "name": "H", "sm_clock_mhz": None if median is None else {"median": median}} for i, median in enumerate(medians)]
    return {"gpus": cards}


@pytest.mark.parametrize(
    ("telemetry", "said"),
    [
        ({"on": clocks(1980), "pin": clocks(1961)}, []),
        ({"on": clocks(1980), "pin": clocks(1960)}, ["gpu 0 (H): SM clock 1980 MHz in on, 1960 in pin"]),
        ({"on": clocks(1980), "off": clocks(1980), "pin": clocks(2010)}, ["gpu 0 (H): SM clock 2010 MHz in pin, 1980 in on"]),
        ({"on": clocks(1980, 1000), "pin": clocks(1980, 1200)}, ["gpu 1 (H): SM clock 1200 MHz in pin, 1000 in on"]),
        ({"on": clocks(1980, None), "pin": clocks(None, 1200)}, []),
        ({"on": {"gpus": None}, "pin": None}, []),
    ],
)
def test_arms_run_at_one_clock(telemetry: dict[str, Any], said: list[str]) -> None:
    assert [reason.split(" (medians")[0] for reason in checks.clock_offsets(telemetry)] == said
