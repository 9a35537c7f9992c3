"""Reading a series: what is whole is read, what is not is refused by file and field."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.evidence import layout
from harness.evidence.schema import (
    ARM_FIELDS,
    BLOCK_FIELDS,
    GATE_FIELDS,
    LEG_FIELDS,
    PLAN_FIELDS,
    SERIES_FIELDS,
    WORKLOAD_FIELDS,
    EvidenceError,
    load_series,
)
from harness.evidence.store import check_seal
from legs import protocol
from tests.harness.series_factory import alter_id, copy_series, edit_json, make_series


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_series(tmp_path_factory.mktemp("whole") / "series", performance=2, memory=1, statuses={"performance-2": ["void", "ok"]})


@pytest.fixture
def series(whole: Path, tmp_path: Path) -> Path:
    return copy_series(whole, tmp_path / "series")


LEG = layout.leg_folder(Path(), "performance", 1, 1, "on").as_posix()


def test_a_whole_series_is_read(whole: Path) -> None:
    check_seal(whole)
    series = load_series(whole)
    assert series.arms == ["on", "off", "pin"]
    assert [(block.repetition, block.number) for block in series.accepted("performance")] == [(1, 1), (2, 2)]
    assert [leg.name for leg in series.legs("pin")] == ["memory-1-pin", "performance-1-pin", "performance-2-pin"]
    leg = series.legs("on")[1]
    assert (len(leg.traces), len(leg.outputs), len(leg.outputs[0])) == (8, 8, 8)
    assert leg.memory == () and series.legs("on")[0].memory[0]["kind"] == "rss"
    assert leg.request is not None and leg.request.concurrency == 4
    lost = next(attempt for attempt in series.attempts if attempt.record["status"] == "void")
    assert (lost.phase, lost.repetition, lost.number) == ("performance", 2, 1)
    assert all(leg.traces == () for leg in lost.legs.values())
    assert [attempt.phase for attempt in series.attempts][:2] == ["correctness", "warmup"]


@pytest.mark.parametrize(
    ("file", "inner", "fields"),
    [
        (layout.PLAN, None, PLAN_FIELDS), (layout.PLAN, "workload", WORKLOAD_FIELDS), (layout.PLAN, "arms", ARM_FIELDS),
        (layout.SERIES, None, SERIES_FIELDS), (f"{layout.CORRECTNESS}/{layout.GATE}", None, GATE_FIELDS),
        (f"{LEG}/{layout.LEG}", None, LEG_FIELDS), ("blocks/performance-1/attempt-1/block.json", None, BLOCK_FIELDS),
    ],
)
def test_each_missing_or_mistyped_field_is_named_with_its_file(series: Path, file: str, inner: str | None, fields: dict[str, Any]) -> None:
    original = (series / file).read_bytes()

    def table(value: Any) -> Any:
        return value if inner is None else value["arms"][0] if inner == "arms" else value[inner]

    def check(change: Callable[[Any], None], field: str) -> None:
        (series / file).write_bytes(original)
        edit_json(series / file, change)
        with pytest.raises(EvidenceError) as caught:
            load_series(series)
        assert Path(file).name in str(caught.value) and f"`{field}`" in str(caught.value)

    for name, kind in fields.items():
        other: Any = {"of": "another kind"} if kind is list else ["of another kind"]
        check(partial(_drop, table, name), name)
        check(partial(_put, table, name, other), name)


def _drop(table: Callable[[Any], Any], name: str, record: Any) -> None:
    del table(record)[name]


def _put(table: Callable[[Any], Any], name: str, value: Any, record: Any) -> None:
    table(record)[name] = value


def set_(**values: Any) -> Callable[[Any], None]:
    return lambda record: record.update(values)


@pytest.mark.parametrize(
    ("file", "change", "names"),
    [
        (layout.PLAN, set_(schema=99), "plan.json: field `schema` is 99"),
        (layout.PLAN, set_(pairs=[["on", "nobody"]]), "plan.json: field `pairs`"),
        (layout.PLAN, set_(pairs=[]), "plan.json: field `pairs`"),
        (layout.PLAN, lambda plan: plan["arms"][0].update(name="../../away"), r"`arms\[0\].name`"),
        (layout.PLAN, lambda plan: plan["blocks"][0].update(phase="../.."), r"`blocks\[0\].phase`"),
        (layout.PLAN, lambda plan: plan["blocks"][1].update(order=["pin", "on", "off"]), "field `order`"),
        (layout.PLAN, lambda plan: plan["workload"].update(prompt_tokens=1), "field `prompt_tokens` is 128, expected 1 as planned"),
        (layout.PLAN, lambda plan: plan["workload"].update(output_tokens=1), "field `output tokens` is 64"),
        (layout.PLAN, lambda plan: plan["workload"].update(requests=9), "field `requests`"),
        (f"{LEG}/{layout.LEG}", set_(status="void"), f"{LEG}/leg.json: field `status` is 'void'"),
        (f"{LEG}/{layout.LEG}", set_(status="great"), "field `status` is 'great'"),
        (f"{LEG}/{layout.LEG}", set_(role="vllm"), "field `role` is 'vllm'"),
        (f"{LEG}/{layout.LEG}", set_(role=None), "field `role` is None"),
        (f"{LEG}/{layout.LEG}", set_(arm="off"), "field `arm, phase, attempt`"),
        (f"{LEG}/{layout.LEG}", set_(reasons=[1]), "field `reasons` is"),
        (f"{LEG}/{layout.LEG}", set_(repetition=2), "field `repetition` is 2"),
        (f"{LEG}/{protocol.RESULT}", set_(arm="off"), "result.json: cannot be read"),
        (f"{LEG}/{protocol.RESULT}", set_(client="async"), "field `client` is 'async'"),
        (f"{LEG}/{protocol.RESULT}", lambda result: result["files"].clear(), r"field `files\[requests.jsonl.gz\]`"),
        (f"{LEG}/{protocol.REQUEST}", set_(protocol=7), "request.json: cannot be read"),
        ("blocks/performance-1/attempt-1/block.json", set_(order=["off", "on", "pin"]), "field `order`"),
        ("blocks/performance-1/attempt-1/block.json", set_(attempt=2), "field `phase, attempt`"),
    ],
)
def test_what_contradicts_itself_is_refused(series: Path, file: str, change: Callable[[Any], None], names: str) -> None:
    edit_json(series / file, change)
    with pytest.raises(EvidenceError, match=names):
        load_series(series)


STREAMS = (protocol.TRACES, protocol.OUTPUTS, protocol.MARKS, protocol.RESULT, protocol.REQUEST, layout.LEG, layout.IDLE)


@pytest.mark.parametrize("file", STREAMS)
def test_a_missing_file_of_a_leg_that_counts_is_named(series: Path, file: str) -> None:
    (series / LEG / file).unlink()
    with pytest.raises(EvidenceError, match=LEG):
        load_series(series)


def test_a_memory_leg_needs_its_stream_whole(series: Path) -> None:
    stream = series / "blocks/memory-1/attempt-1/on" / layout.MEMORY
    stream.write_bytes(stream.read_bytes()[:-20])
    with pytest.raises(EvidenceError, match=r"memory-1/attempt-1/on/memory.jsonl.gz: cannot be read"):
        load_series(series)


def rewrite_traces(series: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    path = series / LEG / protocol.TRACES
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    change(rows)
    data = protocol.to_gzip("".join(json.dumps(row) + "\n" for row in rows).encode())
    path.write_bytes(data)
    edit_json(series / LEG / protocol.RESULT, lambda result: result["files"].update({protocol.TRACES: protocol.sha256(data)}))


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda rows: rows[2]["stamps"].__setitem__(1, rows[2]["stamps"][0]), "request 2.*strictly increasing"),
        (lambda rows: rows[2].update(submitted_ns=rows[2]["stamps"][0][0] + 1), "request 2.*strictly increasing"),
        (lambda rows: rows[3]["stamps"][0].__setitem__(1, 2), "request 3.*a stamp for each"),
        (lambda rows: rows[3]["stamps"][0].__setitem__(1, 0), "request 3.*at least one id"),
        (lambda rows: rows[4].update(end_ns=0), "request 4.*scheduled before submitted"),
        (lambda rows: rows[1].update(index=0), "request 1.*corpus order"),
        (lambda rows: rows.pop(), "`requests`"),
        (lambda rows: rows[0].update(prompt_tokens=17), "`prompt_tokens` is 129"),
    ],
)
def test_traces_that_cannot_be_are_refused(series: Path, change: Callable[[Any], None], names: str) -> None:
    rewrite_traces(series, change)
    with pytest.raises(EvidenceError, match=names):
        load_series(series)


def test_an_altered_id_stays_readable_when_its_hashes_follow(series: Path) -> None:
    alter_id(series / LEG, 3, 5, 12345)
    assert load_series(series).legs("on")[1].outputs[3][5] == 12345


def test_an_attempt_without_a_record_was_interrupted(series: Path) -> None:
    (series / "blocks/performance-2/attempt-1/block.json").unlink()
    attempt = next(a for a in load_series(series).attempts if (a.phase, a.repetition, a.number) == ("performance", 2, 1))
    assert attempt.record["status"] == "interrupted"


def test_a_folder_that_is_no_series_is_named(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match="nowhere"):
        load_series(tmp_path / "nowhere")
    with pytest.raises(EvidenceError, match=r"plan.json: is missing"):
        load_series(tmp_path)
