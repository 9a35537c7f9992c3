"""The store refuses everything that is not exactly what was recorded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.evidence.layout import MANIFEST
from harness.evidence.store import BrokenSeal, check_seal, create_series, read_manifest, record, record_tree, seal


@pytest.fixture
def series(tmp_path: Path) -> Path:
    """Three recorded files, sealed."""
    series = tmp_path / "series"
    create_series(series)
    (series / "spec.toml").write_text("name = 'x'\n")
    record(series, "spec.toml")
    (series / "blocks" / "memory-1").mkdir(parents=True)
    (series / "blocks" / "memory-1" / "b.json").write_text("{}")
    (series / "blocks" / "memory-1" / "a.json").write_text("[]")
    record_tree(series, "blocks")
    seal(series)
    return series


def test_a_whole_series_is_accepted_and_its_order_kept(series: Path) -> None:
    check_seal(series)
    assert list(read_manifest(series).files) == ["spec.toml", "blocks/memory-1/a.json", "blocks/memory-1/b.json"]


def test_derived_files_and_logs_may_come_and_go(series: Path) -> None:
    (series / "summary.json").write_text("{}")
    (series / "report.md").write_text("x")
    (series / "plots").mkdir()
    (series / "plots" / "ttft.svg").write_text("<svg/>")
    (series / "logs").mkdir()
    (series / "logs" / "arm.txt").write_text("hello")
    check_seal(series)


@pytest.mark.parametrize(
    ("damage", "names"),
    [
        (lambda s: (s / "spec.toml").write_text("name = 'y'\n"), "spec.toml: changed"),
        (lambda s: (s / "spec.toml").unlink(), "spec.toml: is missing"),
        (lambda s: (s / "blocks" / "extra.json").write_text("{}"), "blocks/extra.json: is not in the manifest"),
        (lambda s: (s / "blocks" / "summary.json").write_text("{}"), "blocks/summary.json: is not in the manifest"),
        (lambda s: (s / "link").symlink_to("spec.toml"), "link: is a symbolic link"),
        (lambda s: ((s / "blocks").rename(s.parent / "away"), (s / "blocks").symlink_to(s.parent / "away")), "symbolic link"),
    ],
)
def test_damage_is_named(series: Path, damage: Callable[[Path], object], names: str) -> None:
    damage(series)
    with pytest.raises(BrokenSeal, match=names):
        check_seal(series)


def rewrite(series: Path, change: Callable[[Any], list[Any]]) -> None:
    lines = [json.loads(line) for line in (series / MANIFEST).read_text().splitlines()]
    (series / MANIFEST).write_text("".join(json.dumps(line) + "\n" for line in change(lines)))


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda lines: [{**lines[0], "sha256": "0" * 64}, *lines[1:]], r"line 1 \(spec.toml\) breaks the chain"),
        (lambda lines: [lines[1], lines[0], *lines[2:]], "line 1 .* breaks the chain"),
        (lambda lines: [*lines[:1], *lines[2:]], "breaks the chain"),
        (lambda lines: [*lines[:2], lines[3]], "does not close"),
        (lambda lines: lines[:3], "not sealed"),
        (lambda lines: [*lines, lines[-1]], "after the seal"),
        (lambda lines: [{**lines[0], "path": "../away"}, *lines[1:]], "not a plain path"),
        (lambda lines: [{**lines[0], "path": "/etc/passwd"}, *lines[1:]], "not a plain path"),
        (lambda lines: [{"path": "spec.toml"}, *lines[1:]], "line 1 is not a manifest line"),
        (lambda lines: [[], *lines[1:]], "line 1 is not a manifest line"),
    ],
)
def test_a_tampered_manifest_is_refused(series: Path, change: Callable[[Any], list[Any]], names: str) -> None:
    rewrite(series, change)
    with pytest.raises(BrokenSeal, match=names):
        check_seal(series)


def test_a_manifest_cut_by_a_crash_is_refused(series: Path) -> None:
    text = (series / MANIFEST).read_text()
    (series / MANIFEST).write_text(text[:-20])
    with pytest.raises(BrokenSeal, match="cut short"):
        check_seal(series)


def test_an_open_series_passes_for_resuming_only_and_goes_on(tmp_path: Path) -> None:
    series = tmp_path / "s"
    create_series(series)
    (series / "plan.json").write_text("{}")
    record(series, "plan.json")
    check_seal(series, require_sealed=False)
    with pytest.raises(BrokenSeal, match="not sealed"):
        check_seal(series)
    (series / "series.json").write_text("{}")
    with pytest.raises(BrokenSeal, match=r"series.json: is not in the manifest"):
        check_seal(series, require_sealed=False)
    with pytest.raises(BrokenSeal, match=r"series.json: is not in the manifest"):
        seal(series)
    record(series, ["series.json"])
    seal(series)
    check_seal(series)


def test_nothing_is_added_after_the_seal_nor_twice(series: Path, tmp_path: Path) -> None:
    (series / "late.json").write_text("{}")
    with pytest.raises(BrokenSeal, match="sealed"):
        record(series, "late.json")
    (series / "late.json").unlink()
    with pytest.raises(BrokenSeal, match="sealed already"):
        seal(series)
    other = tmp_path / "other"
    create_series(other)
    (other / "a").write_text("")
    record(other, "a")
    with pytest.raises(BrokenSeal, match="recorded already"):
        record(other, "a")


@pytest.mark.parametrize("name", ["summary.json", "plots/a.svg", "logs/x", "manifest.jsonl", "../x", "/x", "a//b", "./a", "", "missing"])
def test_only_plain_evidence_names_are_recorded(tmp_path: Path, name: str) -> None:
    series = tmp_path / "s"
    create_series(series)
    with pytest.raises(BrokenSeal):
        record(series, name)
    assert not (series / MANIFEST).exists()


def test_a_link_in_a_recorded_tree_is_refused(tmp_path: Path) -> None:
    series = tmp_path / "s"
    create_series(series)
    (series / "stage").mkdir()
    (series / "stage" / "link").symlink_to("/etc/hostname")
    with pytest.raises(BrokenSeal, match="stage/link: is a symbolic link"):
        record_tree(series, "stage")


def test_create_refuses_what_exists(tmp_path: Path) -> None:
    create_series(tmp_path / "a" / "b")
    with pytest.raises(FileExistsError, match="b'"):
        create_series(tmp_path / "a" / "b")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(FileExistsError, match=r"symbolic link.*link'"):
        create_series(tmp_path / "link" / "c")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError, match="dangling'"):
        create_series(tmp_path / "dangling")
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="not a directory"):
        create_series(tmp_path / "file" / "d")


def test_a_link_is_never_recorded_nor_what_lies_behind_one(tmp_path: Path) -> None:
    series = tmp_path / "s"
    create_series(series)
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / "file").write_text("outside")
    (series / "link").symlink_to(tmp_path / "away" / "file")
    (series / "folder").symlink_to(tmp_path / "away")
    for name in ("link", "folder/file"):
        with pytest.raises(BrokenSeal, match="a symbolic link lies on its path"):
            record(series, name)
    with pytest.raises(BrokenSeal, match="not a folder"):
        record_tree(series, "folder")
