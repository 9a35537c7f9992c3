"""Records about sealed series: only ever added, each naming what it supersedes, and shown by the scoreboard."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from harness.evidence import records as module
from harness.evidence.records import RECORDS, add_record, check_grown, committed_records, read_records, standing
from harness.evidence.schema import EvidenceError
from harness.evidence.store import BrokenSeal
from harness.report.scoreboard import render_scoreboard
from tests.harness.series_factory import edit_json, make_series, reseal


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    results = tmp_path_factory.mktemp("two") / "results"
    for name in ("first", "second"):
        make_series(results / name, name=name)
    return results


@pytest.fixture
def results(two: Path) -> Path:
    (two / RECORDS).unlink(missing_ok=True)
    return two


def lines(results: Path) -> list[str]:
    return (results / RECORDS).read_text().splitlines()


def test_records_are_added_and_the_newest_stands(results: Path) -> None:
    assert read_records(results) == [] and standing([]) == {}
    add_record(results, "correction", "first", "the title named another model")
    add_record(results, "void", "second", "the card was throttled")
    add_record(results, "void", "first", "the corpus was wrong", supersedes=1)
    found = read_records(results)
    assert [(r.number, r.kind, r.series, r.supersedes) for r in found] == [
        (1, "correction", "first", None), (2, "void", "second", None), (3, "void", "first", 1)]
    assert {name: record.number for name, record in standing(found).items()} == {"first": 3, "second": 2}


@pytest.mark.parametrize(("arguments", "said"), [
    (("neutral", "first", "so"), "field `kind` is 'neutral': one of void, correction"),
    (("void", "first", "  "), "field `reason` is '  ': say why"),
    (("void", "first", "so", 1), "field `supersedes` is 1: no record stands for first; leave it out"),
    (("void", "../results/first", "so"), "field `series` is '../results/first'"),
])
def test_a_record_that_says_too_little_is_refused(results: Path, arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(EvidenceError) as refused:
        add_record(results, *arguments)  # type: ignore[arg-type]
    assert said in str(refused.value) and not (results / RECORDS).exists()


def test_a_second_record_names_the_first(results: Path) -> None:
    add_record(results, "void", "first", "so")
    for wrong in (None, 2):
        with pytest.raises(EvidenceError, match=f"field `supersedes` is {wrong}: record 1 stands for first; name it"):
            add_record(results, "correction", "first", "not so", supersedes=wrong)


def test_only_a_series_that_is_there_can_be_spoken_of(results: Path, tmp_path: Path) -> None:
    with pytest.raises(BrokenSeal, match="there is no such series"):
        add_record(results, "void", "third", "so")


@pytest.mark.parametrize("change", [
    lambda lines: [lines[0].replace("wrong", "right"), *lines[1:]],
    lambda lines: lines[1:],
    lambda lines: [lines[0], lines[2]],
    lambda lines: [lines[1], lines[0], lines[2]],
    lambda lines: [lines[0], "{}", lines[2]],
])
def test_an_edited_or_removed_line_breaks_the_chain(results: Path, change: object) -> None:
    add_record(results, "void", "first", "the corpus was wrong")
    add_record(results, "void", "second", "so")
    add_record(results, "correction", "first", "it was not", supersedes=1)
    (results / RECORDS).write_text("\n".join(change(lines(results))) + "\n")  # type: ignore[operator]
    with pytest.raises(EvidenceError, match=rf"{RECORDS}: line \d "):
        read_records(results)
    with pytest.raises(EvidenceError, match=RECORDS):
        add_record(results, "void", "second", "so", supersedes=2)


def test_a_chain_made_anew_must_still_make_sense(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forger who recomputes the chain still cannot supersede what does not stand."""
    record = add_record(results, "void", "first", "so")
    entry = {**json.loads(lines(results)[0]), "supersedes": 7}
    del entry["chain"]
    (results / RECORDS).write_text(json.dumps({**entry, "chain": module._chain("", type(record)(**entry))}) + "\n")
    with pytest.raises(EvidenceError, match="field `supersedes` is 7"):
        read_records(results)
    (results / RECORDS).write_text(json.dumps(entry))
    with pytest.raises(EvidenceError, match="cut short"):
        read_records(results)


def test_the_file_only_grows() -> None:
    check_grown("a\nb\n", "a\nb\nc\n")
    check_grown("", "a\n")
    for now, said in (("a\n", "line 2 was removed"), ("a\nx\nc\n", "line 2 was changed"), ("c\na\nb\n", "line 1 was changed")):
        with pytest.raises(EvidenceError, match=said):
            check_grown("a\nb\n", now)


def test_an_earlier_state_is_read_from_git(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=t", "-c", "user.email=t@t")
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True)

    (tmp_path / "results").mkdir()
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "none")
    (tmp_path / "results" / RECORDS).write_text("a\n")
    git("add", "results")
    git("commit", "-q", "-m", "one")
    assert committed_records(tmp_path, "HEAD") == "a\n" and committed_records(tmp_path, "HEAD~1") == ""
    for unknown in ("no-such-commit", "--all"):
        with pytest.raises(EvidenceError, match="git knows no such commit"):
            committed_records(tmp_path, unknown)


def test_the_scoreboard_shows_what_stands(results: Path) -> None:
    plain = render_scoreboard(results)
    ratios = [line for line in plain.splitlines() if "on [ours] / pin [pin]" in line]
    assert len(ratios) == 2 and "record" not in plain
    add_record(results, "void", "first", "the corpus was wrong")
    add_record(results, "correction", "second", "the title names another model")
    rows = [line for line in render_scoreboard(results).splitlines() if "../results/" in line]
    first, second = sorted(rows)
    assert "**VOID** by record 1: the corpus was wrong | n/a |" in first and "tok/s" not in first and "1.2" not in first
    assert "PASS (FASTER); corrected by record 2: the title names another model" in second
    add_record(results, "correction", "first", "the corpus was right", supersedes=1)
    assert "VOID" not in render_scoreboard(results)


def test_a_record_of_another_seal_or_a_lost_series_stops_the_scoreboard(tmp_path: Path) -> None:
    results = tmp_path / "results"
    series = make_series(results / "only")
    add_record(results, "void", "only", "so")
    edit_json(series / "series.json", lambda record: record["repository"].update(dirty=True))
    reseal(series)
    with pytest.raises(EvidenceError, match="record 1: field `manifest_head`"):
        render_scoreboard(results)
    series.rename(results / "other")
    with pytest.raises(EvidenceError, match="speaks of only, which is not in results/"):
        render_scoreboard(results)
