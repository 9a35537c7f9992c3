"""Faults belong to calibrations: a spec that has one without being one is refused, and no other command runs one that is."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import cli
from harness.analysis.calibration import SERIES
from harness.series.spec import load_spec
from harness.series.stage import repository_root
from harness.strict import SpecError
from tests.harness.series.spec_factory import write_spec

CALIBRATION = ('title = "A toy series"', 'title = "A toy series"\ncalibration = true')


def fault(text: str) -> tuple[str, str]:
    return 'load = "staged"', f'load = "staged"\ninject = {text}'


@pytest.mark.parametrize("value", ["{ busy = 0.03 }", "{ stall = 2 }", "{ token = 1 }", "{ copies = 2 }", "{ leak_mib = 256 }",
                                   "{ kill = 4 }"])
def test_a_fault_needs_a_calibration(tmp_path: Path, value: str) -> None:
    spec = load_spec(write_spec(tmp_path, CALIBRATION, fault(value)))
    assert spec.calibration
    assert list(spec.arms["off"].options["inject"]) == [value.split()[1]]
    with pytest.raises(SpecError, match=r"field `arms.off.options.inject` is .*: faults are put into the arms of a calibration only"):
        load_spec(write_spec(tmp_path, fault(value)))


def test_a_fault_shared_by_all_arms_is_refused_too(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"arms.on.options.inject.*calibration only"):
        load_spec(write_spec(tmp_path, ('threads = 2', 'threads = 2\ninject = { busy = 0.03 }')))


@pytest.mark.parametrize(("value", "said"), [
    ("3", "a table of one fault"), ("{}", "a table of one fault"), ("{ busy = 0.1, kill = 1 }", "a table of one fault"),
    ("{ speed = 2 }", "a table of one fault"), ("{ busy = 0.6 }", "busy` is 0.6: a value of type float from 0.001 to 0.5"),
    ("{ busy = 0 }", "busy` is 0: a value of type float"), ("{ stall = 0 }", "stall` is 0: a value of type int from 1"),
    ("{ stall = 1.5 }", "of type int"), ("{ kill = true }", "kill` is True"), ("{ copies = 3 }", "copies` is 3"),
])
def test_a_wrong_fault_is_named(tmp_path: Path, value: str, said: str) -> None:
    with pytest.raises(SpecError) as refused:
        load_spec(write_spec(tmp_path, CALIBRATION, fault(value)))
    assert said in str(refused.value) and "toy.toml: field `arms.off.options.inject" in str(refused.value)


def test_a_fault_of_another_engine_is_no_option(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"arms.pin.options"):
        load_spec(write_spec(tmp_path, CALIBRATION, ('oracle = "vllm-toy"', 'oracle = "vllm-toy"\noptions = { inject = { kill = 1 } }')))


@pytest.mark.parametrize("command", ["run-series", "ab"])
def test_only_calibrate_runs_a_calibration(tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    spec = repository_root() / "legs" / "calibration" / "token.toml"
    assert cli._run([command, str(spec), "--out", str(tmp_path / "out")]) == 64
    assert "token.toml: field `calibration` is True: `parity calibrate` runs the series of a calibration" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_calibration_of_this_repository_is_whole() -> None:
    folder = repository_root() / "legs" / "calibration"
    specs = {path.stem: load_spec(path) for path in folder.glob("*.toml")}
    assert specs.keys() == set(SERIES) and all(spec.calibration for spec in specs.values())
    assert all(spec.options["depth"] == 1 and spec.correctness is not None for spec in specs.values())
    assert sorted(arm.options["inject"]["busy"] for arm in specs["times"].arms.values() if arm.options) == [0.01, 0.03, 0.10]
    assert specs["leak"].arms["leak"].options["inject"] == {"leak_mib": 256}
