"""What crosses the border between harness and arm survives it, and what breaks the contract is named."""

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from legs import protocol
from legs.protocol import Corpus, LegRequest, Marks, ProtocolError, Trace

REQUEST = LegRequest(
    protocol=1, leg="performance-1-pin", phase="performance", arm="pin", driver="vllm", corpus="legs/corpora/x.json.gz",
    corpus_sha256="0" * 64,
    requests=2, warmup_requests=1, max_tokens=4, min_tokens=4, ignore_eos=True, concurrency=2, client="step", options={"dtype": "float32"},
)
CORPUS = Corpus(name="x", source="here", vocab_size=100, prompts=((1, 2), (3, 4)), warmup=((5, 6),))


def test_request_round_trip(tmp_path: Path) -> None:
    protocol.write_request(tmp_path, REQUEST)
    assert protocol.read_request(tmp_path) == REQUEST


@pytest.mark.parametrize(("change", "says"), [
    ({"protocol": 2}, "protocol 2"), ({"phase": "lunch"}, "lunch"), ({"client": "fax"}, "fax"),
    ({"extra": 1}, "extra"), ({"requests": "2"}, "requests"), ({"ignore_eos": 1}, "ignore_eos"), ({"arm": None}, "arm"),
])
def test_a_wrong_request_is_named(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    raw = dataclasses.asdict(REQUEST) | change
    if change.get("arm", "") is None:
        del raw["arm"]
    (tmp_path / protocol.REQUEST).write_bytes(protocol.to_json(raw))
    with pytest.raises(ProtocolError, match=says):
        protocol.read_request(tmp_path)


def test_traces_outputs_and_marks_round_trip(tmp_path: Path) -> None:
    traces = [Trace(index=0, prompt_tokens=2, scheduled_ns=1, submitted_ns=2, stamps=((3, 1), (5, 2)), end_ns=5, finish="length")]
    digest = protocol.write_traces(tmp_path, traces)
    assert protocol.read_traces(tmp_path) == traces
    assert digest == protocol.sha256((tmp_path / protocol.TRACES).read_bytes())
    protocol.write_outputs(tmp_path, [[1, 2, 3]])
    assert protocol.read_outputs(tmp_path) == [[1, 2, 3]]
    marks = Marks(tmp_path / protocol.MARKS)
    marks("ready", 7, tokens=3)
    with (tmp_path / protocol.MARKS).open("a") as sink:
        sink.write('{"mark": "cut sho')
    assert protocol.read_marks(tmp_path) == [{"mark": "ready", "t_ns": 7, "tokens": 3}]


def test_evidence_is_written_once_and_through_no_link(tmp_path: Path) -> None:
    protocol.write_atomic(tmp_path / "a", b"1")
    with pytest.raises(FileExistsError):
        protocol.write_atomic(tmp_path / "a", b"2")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        protocol.write_atomic(tmp_path / "link", b"3")
    assert (tmp_path / "a").read_bytes() == b"1"
    assert not (tmp_path / "elsewhere").exists()


def test_corpus_round_trip_has_one_set_of_bytes(tmp_path: Path) -> None:
    data = protocol.corpus_bytes(CORPUS)
    (tmp_path / "x.json.gz").write_bytes(data)
    assert protocol.read_corpus(tmp_path / "x.json.gz", protocol.sha256(data)) == CORPUS
    assert protocol.corpus_bytes(CORPUS) == data


def test_a_changed_corpus_is_refused_by_hash(tmp_path: Path) -> None:
    path = tmp_path / "x.json.gz"
    path.write_bytes(protocol.corpus_bytes(dataclasses.replace(CORPUS, source="there")))
    with pytest.raises(ProtocolError, match=r"x\.json\.gz: sha256 is"):
        protocol.read_corpus(path, protocol.sha256(protocol.corpus_bytes(CORPUS)))


@pytest.mark.parametrize(("change", "says"), [
    ({"prompts": ((1, 2), (3, 100))}, "prompt 1 is empty or has an id outside 0..99"),
    ({"prompts": ((1, 2), ())}, "prompt 1 is empty"),
    ({"prompts": ((-1, 2), (3, 4))}, "prompt 0 is empty or has an id outside"),
    ({"prompts": ((*range(16), 1), (*range(16), 2))}, "prompt 1 starts with the same 16 ids as prompt 0"),
    ({"warmup": ((1, 2),)}, "warm-up prompt 0 starts with the same 16 ids as prompt 0"),
])
def test_a_bad_corpus_is_named(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json.gz"
    path.write_bytes(protocol.corpus_bytes(dataclasses.replace(CORPUS, **change)))
    with pytest.raises(ProtocolError, match=says):
        protocol.read_corpus(path)


def test_a_corpus_with_a_missing_field_is_named(tmp_path: Path) -> None:
    raw = {name: value for name, value in dataclasses.asdict(CORPUS).items() if name != "source"}
    (tmp_path / "x.json.gz").write_bytes(gzip.compress(json.dumps(raw).encode()))
    with pytest.raises(ProtocolError, match="source"):
        protocol.read_corpus(tmp_path / "x.json.gz")


def test_drawn_prompts_say_all_that_draws_them(tmp_path: Path) -> None:
    path = tmp_path / "x.json.gz"
    recipe = {"seed": "s", "below": 90, "lengths": [3, 2]}
    path.write_bytes(protocol.corpus_bytes(dataclasses.asdict(CORPUS) | {"prompts": recipe}))
    assert protocol.read_corpus(path).prompts == protocol.draw_prompts("s", 90, [3, 2])
    path.write_bytes(protocol.corpus_bytes(dataclasses.asdict(CORPUS) | {"prompts": {"seed": "s", "lengths": [3]}}))
    with pytest.raises(ProtocolError, match=r"x\.json\.gz: drawn prompts have seed, below and lengths, not lengths, seed"):
        protocol.read_corpus(path)


def test_a_result_must_answer_its_request() -> None:
    result: dict[str, Any] = {name: kind() for name, kind in protocol.RESULT_FIELDS.items() if isinstance(kind, type)}
    result |= {"protocol": 1, "leg": REQUEST.leg, "arm": "pin"}
    protocol.check_result(result, REQUEST)
    with pytest.raises(ProtocolError, match="another"):
        protocol.check_result(result | {"leg": "another"}, REQUEST)
    with pytest.raises(ProtocolError, match="counters"):
        protocol.check_result(result | {"counters": None}, REQUEST)
