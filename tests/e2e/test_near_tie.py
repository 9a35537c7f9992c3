"""`parity near-tie` from the command line to its sealed record, on a toy series whose stand-in oracle has one id that could be a tie."""

from __future__ import annotations

import gzip
import json
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from harness import cli
from harness.analysis.gates import NOT_JUDGED
from harness.evidence import packed, store
from harness.evidence.near_ties import find_record
from harness.evidence.schema import load_series
from harness.oracle import STAMP
from harness.report.scoreboard import render_scoreboard
from harness.series import leg, runner
from legs.protocol import read_jobs, read_scores, sha256, to_json
from tests.e2e import toy
from tests.harness.machine.idle_records import idle_record
from tests.harness.series_factory import reseal

REQUESTS, IDS = 8, 8

ORACLE = """
schema = 1
name = "toy"
title = "a stand-in"
[identity]
engine = "stand-in"
distribution = "toy"
version = "0"
torch = "none"
record_sha256 = "0"
[left_out]
[machine]
python = "{python}"
machine = "{machine}"
cpu_flags = []
accelerator = "none"
[obtain]
way = "site"
lock = "toy.pins"
megabytes = 0
[environment]
[production]
enforce_eager = false
"""

SCORING = '''
GAP, JITTER = 2e-5, 1e-5


def own(index):
    """The oracle's answer: ours but for request 2, which parts at position 1."""
    ids = [(index + k) % 50 for k in range(MAX)]
    if index == 2:
        ids[1] = 49
    return ids


class Given:
    def __init__(self, index, ids, noise):
        self.ids, self.logprobs, self.top = list(ids), [], []
        for t, token in enumerate(self.ids):
            row = {own(index)[t]: -0.5}
            if index == 2 and t == 1:
                row[3] = -0.5 - GAP
            row |= {v: -3.0 - v for v in range(60, 80 - len(row))}
            row = {v: value - noise for v, value in row.items()}
            self.logprobs.append(row.get(token, -20.0))
            self.top.append(sorted(row.items(), key=lambda pair: -pair[1]))


class Scoring(Arm):
    def submit(self, index, prompt):
        self.open[index] = own(index)[: self.request.max_tokens]

    def score_given(self, prompts, continuations, batch):
        return [Given(index, ids, 0.0) for index, ids in enumerate(continuations)]

    def score_own(self, prompts, batch):
        return [Given(index, own(index), JITTER) for index in range(len(prompts))]


def build(request, model, marks):
    marks("load_start")
    marks("loaded")
    return Scoring(request)


MAX = 8
'''


class Made(NamedTuple):
    root: Path
    series: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A toy checkout with an oracle, and its finished series: two arms of ours, one of the oracle, one block."""
    folder = tmp_path_factory.mktemp("near-tie")
    root = folder / "root"
    spec = toy.checkout(root)
    text = (root / "legs" / "drivers" / "engine.py").read_text(encoding="utf-8")
    head, main, tail = text.partition('\nif __name__ == "__main__":')
    (root / "legs" / "drivers" / "vllm.py").write_text(head + SCORING + main + tail, encoding="utf-8")
    (root / "legs" / "oracles" / "toy.toml").write_text(ORACLE.format(
        python=".".join(platform.python_version_tuple()[:2]), machine=platform.machine()), encoding="utf-8")
    (root / ".oracles" / "toy").mkdir(parents=True)
    (root / "legs" / "oracles" / "toy.pins").write_text("nothing==0\n", encoding="utf-8")
    (root / ".oracles" / "toy" / STAMP).write_text(sha256(b"nothing==0\n"), encoding="utf-8")
    written = spec.read_text(encoding="utf-8").replace("tokens = 4", f"tokens = {IDS}").replace("performance = 2", "performance = 1")
    written = written.replace("[limits]", '[arms.pin]\ndriver = "vllm"\noracle = "toy"\n[limits]').partition("[correctness]")[0]
    spec.write_text(written, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(toy.LOCK_VARIABLE, str(folder / "lock"))
        patch.setattr(cli, "repository_root", lambda: root)
        for module in (leg, runner):
            patch.setattr(module, "check_idle", lambda *_: idle_record())
        patch.setattr(leg, "summarise_telemetry", lambda rows, marks, limits: ({}, [], []))
        cli._run(["run-series", str(spec), "--out", str(folder / "out")])
    store.check_seal(folder / "out")
    return Made(root, folder / "out")


@pytest.fixture
def series(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the series, the command line looking at its checkout."""
    monkeypatch.setenv(toy.LOCK_VARIABLE, str(tmp_path / "lock"))
    monkeypatch.setattr(cli, "repository_root", lambda: made.root)
    shutil.copytree(made.series, tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture
def oracle(made: Made) -> Any:
    """Change a line of the stand-in oracle; it is put back afterwards."""
    path = made.root / "legs" / "drivers" / "vllm.py"
    text = path.read_text(encoding="utf-8")

    def change(old: str, new: str) -> None:
        assert old in text
        path.write_text(text.replace(old, new), encoding="utf-8")

    yield change
    path.write_text(text, encoding="utf-8")


def record_of(series: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((series.with_name("out-near-tie") / "near_tie.json").read_bytes())
    return found


def test_a_tie_is_told_with_its_band_and_passes(series: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(path.relative_to(series) for path in series.rglob("*"))
    assert cli._run(["near-tie", str(series)]) == 0
    said = capsys.readouterr().out
    assert f"pin against decode-2: {REQUESTS}/{REQUESTS} outputs identical" in said.replace("performance-1-", "")
    assert "request 2, position 1: 3 for 49, gap 2e-05, worst 2e-05 at 1: near-tie" in said
    assert "7/8 identical, 1 near-ties, 0 wrong" in said
    found = record_of(series)
    assert found["band"] == pytest.approx(3e-5), "decode lies 1e-5 from prefill, batches do not differ"
    assert {row["what"]: row["percentile"] for row in found["jitter"]} == {
        "prefill against decode, batch 1": pytest.approx(1e-5), "prefill against decode, batch 2": pytest.approx(1e-5),
        "batch 1 against 2, prefill": 0.0, "batch 1 against 2, decode": 0.0,
    }
    assert found["arms"][0]["legs"] == ["performance-1-on", "performance-1-off"], "equal outputs are judged once"
    store.check_seal(series.with_name("out-near-tie"))
    assert sorted(path.relative_to(series) for path in series.rglob("*")) == before, "the sealed series is not touched"
    kept = [path for path in series.with_name("out-near-tie").rglob("*") if path.is_file() and path.parent.name != "logs"]
    assert kept and not any(str(series.parent).encode() in path.read_bytes() for path in kept), "no path of this machine is in evidence"


def test_a_gap_beyond_the_band_is_wrong_and_fails(series: Path, oracle: Any, capsys: pytest.CaptureFixture[str]) -> None:
    oracle("GAP, JITTER = 2e-5", "GAP, JITTER = 4e-5")
    assert cli._run(["near-tie", str(series)]) == 1
    assert "7/8 identical, 0 near-ties, 1 wrong" in capsys.readouterr().out
    reason = ("near-tie: 1 of 8 outputs of performance-1-on, performance-1-off are wrong by the oracle's own band (3e-05 nats), first "
              "request 2, position 1: 3 for 49, gap 4e-05, worst gap 4e-05 at position 1")
    assert cli._run(["summarize", str(series)]) == 3, "what is wrong voids the series"
    assert reason in capsys.readouterr().out
    page = (series / "report.md").read_text(encoding="utf-8")
    assert page.startswith("**VOID**") and reason in page and "| wrong |" in page
    assert cli._run(["verify", str(series)]) == 0


def test_an_oracle_without_jitter_lets_only_identity_pass(series: Path, oracle: Any, capsys: pytest.CaptureFixture[str]) -> None:
    oracle("JITTER = 2e-5, 1e-5", "JITTER = 2e-5, 0.0")
    assert cli._run(["near-tie", str(series)]) == 1
    assert "nothing but identical ids passes" in capsys.readouterr().out


def test_a_record_is_read_again_and_not_run_again(series: Path, oracle: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert find_record(series, load_series(series)) is None
    assert cli._run(["near-tie", str(series)]) == 0
    first = capsys.readouterr().out
    oracle("def score_given", "def score_no_more")
    assert cli._run(["near-tie", str(series)]) == 0
    assert capsys.readouterr().out == first
    head = store.read_manifest(series.with_name("out-near-tie")).head
    assert find_record(series, load_series(series)) == {**record_of(series), "head": head}


def test_a_record_that_says_otherwise_than_its_scores_is_refused(series: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli._run(["near-tie", str(series)])
    folder = series.with_name("out-near-tie")
    (folder / "near_tie.json").write_bytes(to_json(record_of(series) | {"band": 1.0}))
    assert cli._run(["near-tie", str(series)]) == 4
    assert "near_tie.json: changed since it was recorded" in capsys.readouterr().err
    reseal(folder)
    assert cli._run(["near-tie", str(series)]) == 4
    assert "near_tie.json: is not what its evidence gives" in capsys.readouterr().err


def test_a_record_of_another_series_is_refused(series: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli._run(["near-tie", str(series)])
    folder = series.with_name("out-near-tie")
    origin = json.loads((folder / "origin.json").read_bytes())
    origin["series"]["head"] = "0" * 64
    (folder / "origin.json").write_bytes(to_json(origin))
    reseal(folder)
    capsys.readouterr()
    assert cli._run(["near-tie", str(series)]) == 4
    assert "was made for a series whose manifest ends in 000000000000" in capsys.readouterr().err


@pytest.mark.parametrize(("old", "new", "said"), [
    ("def score_own", "def score_no_more", "job 'decode-1': this arm cannot score in form 'decode'"),
    ("self.logprobs.append(row.get(token, -20.0))", "t or self.logprobs.append(-1.0)", "scores for 8 ids"),
    ("return [Given(index, ids, 0.0)", "return [Given(index, own(index), 0.0)", "or other ids were scored"),
    ('"commit": None', '"commit": None, "version": "1"', "another than the series': version was '0', is '1'"),
    ("    return Scoring(request)", "    os._exit(3)", "the scoring leg left no result"),
    ('"attention_backend": None', '"attention_backend": None, "dtype": "bfloat16"', "dtype: declared 'float32', resolved 'bfloat16'"),
    ("MAX = 8", "MAX = 8\nimport sys\nsys.path.append('/nowhere')", "import from outside its stage: nowhere"),
    ("MAX = 8", "MAX = 8\nfrom legs.drivers import scoring\nkeep = scoring.write_scores\nscoring.write_scores = lambda *a: keep(*a)[::-1]",
     "scores.json.gz: its hash is not the one in result.json"),
    ("row = {own(index)[t]: -0.5}", "row = {own(index)[t]: -4.5, 59: -0.5}", "the oracle does not stand by its own ids"),
], ids=["cannot", "too few", "other ids", "other build", "dies", "other options", "other path", "hash", "disowns"])
def test_a_scoring_that_cannot_be_judged_is_an_error_and_leaves_no_seal(
    series: Path, oracle: Any, capsys: pytest.CaptureFixture[str], old: str, new: str, said: str
) -> None:
    oracle(old, new)
    assert cli._run(["near-tie", str(series)]) == 4
    assert said in capsys.readouterr().err
    assert cli._run(["near-tie", str(series)]) == 4
    assert "a scoring that did not end" in capsys.readouterr().err


def test_scores_are_kept_whole(series: Path) -> None:
    cli._run(["near-tie", str(series)])
    scores = read_scores(series.with_name("out-near-tie") / "score")
    assert list(scores) == ["decode-1", "decode-2", "prefill-1", "prefill-2", "own", "ours-1"]
    follows = {job.name: job.follow for job in read_jobs(series.with_name("out-near-tie") / "score", REQUESTS)}
    assert (follows["own"], follows["prefill-1"]) == ("decode-2", "decode-1"), "its own ids of the series' batch size, as ours are"
    assert all(len(at) == 20 for of in scores.values() for one in of for at in one.top)


def test_a_held_lock_refuses(series: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen(["flock", "--no-fork", str(tmp_path / "lock"), "sleep", "60"]) as holder:
        while subprocess.run(["flock", "-n", str(tmp_path / "lock"), "true"], check=False).returncode == 0:
            pass
        assert cli._run(["near-tie", str(series), "--lock-timeout", "0"]) == 5
        holder.kill()
    assert "lock" in capsys.readouterr().err
    assert not series.with_name("out-near-tie").exists()


def summary_of(series: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((series / "summary.json").read_bytes())
    return found


def test_a_plan_without_a_reference_waits_for_its_record_and_is_judged_by_it(series: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert summary_of(series)["pairs"][0]["withheld"] == [f"no verdict: {NOT_JUDGED}"] and "`parity near-tie DIR`" in NOT_JUDGED
    assert summary_of(series)["near_tie"] is None
    assert "Not judged: no near-tie record" in (series / "report.md").read_text(encoding="utf-8")
    assert cli._run(["near-tie", str(series)]) == 0
    assert "out: summary.json, report.md and plots made anew with it" in capsys.readouterr().err
    after = summary_of(series)
    assert after["pairs"][0]["withheld"] == []
    assert after["near_tie"]["head"] == store.read_manifest(series.with_name("out-near-tie")).head
    assert [row["request"] for row in after["near_tie"]["arms"][0]["requests"]] == [2], "identical ones are counted, not listed"
    page = (series / "report.md").read_text(encoding="utf-8").replace("\u00a0", " ")
    section = page.partition("## Near-ties")[2].partition("\n## ")[0]
    for text in ("| performance-1-on and 1 more | 8 | 7 | 1 | 0 | 2e-05 |", "Its band is 3e-05 nats: 3 times the largest 99.9th percentile",
                 "exact share 7/8 (47 % to 100 %), the oracle's own 8/8 (63 % to 100 %)", "| performance-1-pin / decode-1 | 8/8 |",
                 "| prefill against decode, batch 2 | 1e-05 | 1e-05 | 1280 | 64 |",
                 "| performance-1-on and 1 more | 2 | 1 | 3 | 49 | 2e-05 | 2e-05 | 1 | near-tie |"):
        assert text in section
    assert cli._run(["verify", str(series)]) == 0
    assert "ok   out-near-tie: " in capsys.readouterr().out


def test_verify_says_when_a_record_came_or_went_after_the_summary(series: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {name: (series / name).read_bytes() for name in ("summary.json", "report.md")}
    cli._run(["near-tie", str(series)])
    folder = series.with_name("out-near-tie")
    for name, data in before.items():
        (series / name).write_bytes(data)
    capsys.readouterr()
    assert cli._run(["verify", str(series)]) == 1
    head = store.read_manifest(folder).head[:12]
    assert (f"DIFF summary.json: near_tie: was made without a near-tie record, and {head} lies beside the series; make the summary anew "
            "with it: `parity report DIR`") in capsys.readouterr().out
    cli._run(["report", str(series)])
    assert cli._run(["verify", str(series)]) == 0
    folder.rename(folder.with_name("hidden"))
    capsys.readouterr()
    assert cli._run(["verify", str(series)]) == 1
    assert f"was made with the near-tie record {head}, which does not lie beside the series; put it back" in capsys.readouterr().out


def unseal(folder: Path) -> None:
    path = folder / "manifest.jsonl"
    path.write_text("".join(path.read_text(encoding="utf-8").splitlines(keepends=True)[:-1]), encoding="utf-8")


def link(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to("elsewhere")


def other_corpus(folder: Path) -> None:
    """The scores' own prompts, in a file that is not the series' corpus."""
    (archive,) = (folder / "stage").iterdir()
    with packed.opened(folder) as staged:
        corpus = next(staged.glob("legs/corpora/*"))
        corpus.write_bytes(gzip.compress(gzip.decompress(corpus.read_bytes()), 1))
        packed.pack(staged, [path.relative_to(staged) for path in sorted(staged.rglob("*")) if path.is_file()], archive)
    reseal(folder)


@pytest.mark.parametrize(("spoil", "said"), [
    (unseal, "a scoring that did not end"),
    (lambda folder: (folder / "score" / "scores.json.gz").write_bytes(b""), "score/scores.json.gz: changed since it was recorded"),
    (lambda folder: ((folder / "origin.json").write_bytes(b"{}"), reseal(folder)), "cannot be read as a near-tie record"),
    (other_corpus, "the corpus changed"), (link, "is no folder"),
], ids=["unsealed", "changed", "no record", "other corpus", "a link"])
def test_a_record_that_does_not_hold_is_refused_and_never_passed_over(
    series: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], object], said: str
) -> None:
    cli._run(["near-tie", str(series)])
    spoil(series.with_name("out-near-tie"))
    for command in ("summarize", "report", "verify"):
        capsys.readouterr()
        assert cli._run([command, str(series)]) == 4
        told = capsys.readouterr().err
        assert "ERROR: out-near-tie: " in told and said in told


def test_a_record_elsewhere_is_no_record_of_the_series(series: Path, tmp_path: Path) -> None:
    assert cli._run(["near-tie", str(series), "--out", str(tmp_path / "another")]) == 0
    assert summary_of(series)["near_tie"] is None and cli._run(["verify", str(series)]) == 0


def test_the_scoreboard_lists_a_series_with_its_record_once(series: Path) -> None:
    cli._run(["near-tie", str(series)])
    assert render_scoreboard(series.parent).count("[out](") == 1
