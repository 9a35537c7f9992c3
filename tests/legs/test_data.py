"""The data that series are made of: corpora, references and specs agree with each other, by hash and by count."""

import gzip
import hashlib
import json
from pathlib import Path

import pytest

from harness.oracle import list_oracles
from harness.series.spec import load_spec
from legs.protocol import ProtocolError, corpus_bytes, draw_prompts, read_corpus, sha256
from tools.bench import make_corpus, make_smollm2

ROOT = Path(__file__).resolve().parents[2]
SPECS = sorted((ROOT / "legs" / "series").glob("*.toml"))
COUNTS = {
    "quick": (16, 2_048, 32, 4), "smollm2": (64, 8_192, 64, 16),
    "qwen3-4b": (128, 131_784, 128, 32), "qwen3.5-4b": (128, 131_784, 128, 32), "qwen3-4b-speed": (704, 724_809, 128, 32),
}


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_specs_ask_for_the_work_they_are_named_for(path: Path) -> None:
    spec = load_spec(path)
    work = spec.workload
    if spec.name in COUNTS:
        assert (work.requests, work.prompt_tokens, work.max_tokens, work.concurrency) == COUNTS[spec.name]
    corpus = read_corpus(ROOT / "legs" / "corpora" / f"{work.corpus}.json.gz", work.corpus_sha256)
    assert sum(map(len, corpus.prompts[: work.requests])) == work.prompt_tokens
    assert len(corpus.warmup) >= work.warmup_requests
    assert spec.options["enable_prefix_caching"] is False
    assert {arm.oracle for arm in spec.arms.values() if arm.oracle} <= {oracle.name for oracle in list_oracles(ROOT)}


def test_all_named_series_are_there() -> None:
    assert {path.stem for path in SPECS} >= COUNTS.keys()


@pytest.mark.parametrize("name", ["quick", "smollm2"])
def test_references_were_made_from_this_corpus_and_this_checkpoint(name: str) -> None:
    spec = load_spec(ROOT / "legs" / "series" / f"{name}.toml")
    assert spec.correctness is not None
    data = (ROOT / "legs" / "references" / f"{spec.correctness.reference}.json.gz").read_bytes()
    assert sha256(data) == spec.correctness.reference_sha256
    reference = json.loads(gzip.decompress(data))
    assert reference["corpus_sha256"] == spec.workload.corpus_sha256
    assert reference["checkpoint_sha256"] == spec.model.sha256 == make_smollm2.CHECKPOINT_SHA256
    assert (reference["max_tokens"], reference["min_tokens"]) == (spec.workload.max_tokens, spec.workload.min_tokens)
    assert len(reference["ids"]) == 16
    for ids in reference["ids"].values():
        assert len(ids) == spec.workload.max_tokens
        assert not set(ids) & set(reference["masked"]), "EOS is masked until min_tokens are reached"
    assert reference["smallest_margin"] == min(reference["margins"].values()) > 0


@pytest.mark.parametrize("name", ["qwen3-4b", "qwen3.5-4b"])
def test_uniform_corpora_can_be_made_again(name: str) -> None:
    path = ROOT / "legs" / "corpora" / f"{name}.json.gz"
    assert corpus_bytes(make_corpus.CORPORA[name](name)) == path.read_bytes()
    corpus = read_corpus(path)
    assert len(corpus.prompts) == 704
    assert {len(prompt) for prompt in corpus.prompts} == {1029, 1030}
    assert max(map(max, corpus.prompts)) < make_corpus.CORPORA[name](name)["prompts"]["below"] < corpus.vocab_size


def test_drawn_ids_are_what_any_language_would_draw() -> None:
    stream = hashlib.shake_256(b"a seed").digest(48)
    words = [int.from_bytes(stream[at: at + 8], "little") % 1000 for at in range(0, 48, 8)]
    assert draw_prompts("a seed", 1000, [2, 4]) == (tuple(words[:2]), tuple(words[2:]))


def test_a_frozen_corpus_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(make_corpus.CORPORA, "x", lambda name: make_corpus.uniform(name, 1000, 1000))
    first = make_corpus.make("x", tmp_path)
    assert make_corpus.make("x", tmp_path) == first
    monkeypatch.setitem(make_corpus.CORPORA, "x", lambda name: make_corpus.uniform(name, 1001, 1001))
    with pytest.raises(ProtocolError, match="not replaced"):
        make_corpus.make("x", tmp_path)
    assert sha256((tmp_path / "x.json.gz").read_bytes()) == first
