"""An arm runs a copy named by its hash, and sees nothing else of the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.evidence import packed
from harness.series import arms
from harness.series.stage import StageError, code_sha256, repository_root, stage

CORPUS = "legs/corpora/toy.json.gz"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    data = (CORPUS, "legs/corpora/other.json.gz", "legs/series/a.toml")
    for name in ("legs/client.py", "engine/api.py", "engine/__pycache__/api.pyc", *data):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\n", encoding="utf-8")
    return root


def test_a_stage_is_named_by_its_hash_and_used_again(tree: Path, tmp_path: Path) -> None:
    folder, sha = stage(tree, "engine", tmp_path / "series", CORPUS)
    assert folder.name == sha[:12]
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()) == [
        "engine/api.py", "legs/client.py", CORPUS]
    assert stage(tree, "engine", tmp_path / "series", CORPUS) == (folder, sha)
    assert stage(tree, "vllm", tmp_path / "series", CORPUS)[1] != sha


def test_both_of_our_arms_have_one_hash_and_a_change_has_another(tree: Path) -> None:
    before = code_sha256(tree, "engine")
    assert code_sha256(tree, "engine") == before
    (tree / "engine" / "api.py").write_text("# changed\n", encoding="utf-8")
    assert code_sha256(tree, "engine") != before


def test_an_edited_stage_is_refused(tree: Path, tmp_path: Path) -> None:
    folder, _ = stage(tree, "engine", tmp_path / "series", CORPUS)
    (folder / "engine" / "api.py").write_text("# edited\n", encoding="utf-8")
    with pytest.raises(StageError, match="was staged"):
        stage(tree, "engine", tmp_path / "series", CORPUS)


def test_the_archive_alone_is_evidence_and_gives_the_copy_back(tree: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    folder, sha = stage(tree, "engine", one, CORPUS)
    os.utime(tree / "engine" / "api.py", (1, 1))
    (tree / "engine" / "api.py").chmod(0o755)
    stage(tree, "engine", two, CORPUS)
    assert packed.archive(one, sha).read_bytes() == packed.archive(two, sha).read_bytes()
    shutil.rmtree(folder)
    assert stage(tree, "engine", one, CORPUS) == (folder, sha)
    assert (folder / CORPUS).read_bytes() == (tree / CORPUS).read_bytes()
    assert [path.parent.name for path in one.rglob("*.tar.xz")] == ["stage"]


def cut(archive: Path) -> None:
    archive.write_bytes(archive.read_bytes()[:40])


def linked(archive: Path) -> None:
    with tarfile.open(archive, "w:xz") as out:
        entry = tarfile.TarInfo("engine/api.py")
        entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/hostname"
        out.addfile(entry)


@pytest.mark.parametrize(("spoil", "said"), [(cut, "cannot be unpacked"), (linked, r"engine/api\.py is no plain file")])
def test_an_archive_that_is_none_is_refused(tree: Path, tmp_path: Path, spoil: Callable[[Path], None], said: str) -> None:
    folder, sha = stage(tree, "engine", tmp_path / "series", CORPUS)
    shutil.rmtree(folder)
    spoil(packed.archive(tmp_path / "series", sha))
    with pytest.raises(StageError, match=said):
        stage(tree, "engine", tmp_path / "series", CORPUS)
    assert not folder.exists()


def test_a_symlink_is_refused(tree: Path, tmp_path: Path) -> None:
    (tree / "legs" / "link.py").symlink_to(tmp_path / "elsewhere.py")
    with pytest.raises(StageError, match=r"legs/link\.py"):
        stage(tree, "engine", tmp_path / "series", CORPUS)


def our_arm() -> dict[str, object]:
    return {"driver": "engine", "environment": {"OMP_NUM_THREADS": "2"}}


def test_our_arm_sees_the_stage_and_not_the_repository(tree: Path, tmp_path: Path) -> None:
    folder, _ = stage(tree, "engine", tmp_path / "series", CORPUS)
    (folder / "legs" / "drivers").mkdir()
    for package in ("legs", "legs/drivers"):
        (folder / package / "__init__.py").touch()
    program = "import sys, legs\nprint('\\n'.join([legs.__file__, *sys.path]))"
    (folder / "legs" / "drivers" / "engine.py").write_text(program, encoding="utf-8")
    command = arms.launch(our_arm(), folder, tmp_path, None, repository_root())
    ran = subprocess.run(command.argv, env=command.environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = ran.stdout.splitlines()
    assert Path(lines[0]).is_relative_to(folder)
    root = repository_root()
    inside = [line for line in lines[1:] if Path(line).is_relative_to(root) and not Path(line).is_relative_to(root / ".venv")]
    assert not inside, "the repository is importable in an arm"


def test_a_stray_toggle_in_the_shell_does_not_reach_an_arm(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VT_ASYNC_DEVICE_MIRROR", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    environment = arms.launch(our_arm(), tree, tmp_path, None, tree).environment
    assert "VT_ASYNC_DEVICE_MIRROR" not in environment
    assert environment["OMP_NUM_THREADS"] == "2"
    assert environment["PYTHONPATH"].split(os.pathsep) == [str(tree), *arms.package_folders()]
    known = {*arms.PASSED, *arms.FIXED, "OMP_NUM_THREADS", "PYTHONPATH", "PARITY_SITE", "PARITY_MODEL"}
    assert environment.keys() <= known


def test_the_shown_command_holds_no_path_of_this_machine(tree: Path, tmp_path: Path) -> None:
    shown = arms.launch(our_arm(), tree, tmp_path, None, tree).shown
    assert shown == ["self", "-S", "-P", "-m", "legs.drivers.engine"]
    assert sys.executable not in shown


def test_foreign_search_path_entries_are_found() -> None:
    assert arms.foreign_paths(["stage:.", "site:.", "prefix:lib", "base:lib/python311.zip"]) == []
    assert arms.foreign_paths(["stage:.", "/home/me/repository"]) == ["/home/me/repository"]
