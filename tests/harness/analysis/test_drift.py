"""Two series compared: what is the machine's, what may be an effect, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from harness.analysis.drift import move
from harness.cli import _run
from harness.evidence.schema import load_series
from harness.report.build import compare_dirs
from harness.report.drift import drift_exit, drift_lines
from harness.verdict import Exit
from tests.harness.series_factory import PINNED, edit_json, make_series, reseal

STEPS = {"on": 1000_0, "off": 1100_0, "pin": 1200_0}
NEW_CODE = {"ours": "99" * 32}
NEW_PIN = {**PINNED, "version": "0.0.1"}
BUSY = {leg: [{"utilization": 12}] for phase, n in (("memory", 1), ("performance", 4)) for k in range(n) for arm in STEPS
        for leg in [f"{phase}-{k + 1}-{arm}"]}
BASE: dict[str, Any] = {"noise": 0.0003, "performance": 4, "memory": 1, "step_us": STEPS}


def slower(**by: float) -> dict[str, int]:
    return {arm: round(step * (1 + by.get(arm, by.get("all", 0.0)))) for arm, step in STEPS.items()}


def compared(path: Path, before: dict[str, Any] | None = None, **after: Any) -> dict[str, Any]:
    a = make_series(path / "a", **{**BASE, "name": "before", **(before or {})})
    b = make_series(path / "b", **{**BASE, "name": "after", "seed": 2, **after})
    return compare_dirs(a, b)


def called(found: dict[str, Any], axis: str = "total_throughput") -> dict[str, str]:
    return {name: row["called"] for name, row in found["axes"][axis].items()}


def test_welch_by_hand() -> None:
    found = move([1.0, math.e], [math.e, math.e**3])
    assert found.factor == pytest.approx(math.exp(1.5))
    error, degrees = math.sqrt(0.25 + 1.0), (0.25 + 1.0) ** 2 / (0.25**2 + 1.0**2)
    assert found.interval == pytest.approx(tuple(math.exp(1.5 + k * stats.t.ppf(0.975, degrees) * error) for k in (-1, 1)))
    assert found.detectable == pytest.approx(math.expm1((stats.t.ppf(0.975, degrees) + stats.t.ppf(0.8, degrees)) * error))
    assert move([1.0, 1.0], [1.02, 1.02]).moved is True and move([1.0, 1.0], [1.0, 1.0]).moved is False


@pytest.mark.parametrize("values", [([1.0], [1.0, 1.1]), ([1.0, None], [1.0, 1.0]), ([1.0, 0.0], [1.0, 1.0]), ([], [1.0])])
def test_a_movement_without_an_interval_is_none(values: Any) -> None:
    assert move(*values).moved is None


def test_nothing_changed_and_nothing_moved(tmp_path: Path) -> None:
    found = compared(tmp_path)
    assert found["control"] == "pin" and called(found) == {"on": "no movement seen", "off": "no movement seen", "pin": "control"}
    assert drift_exit(found) is Exit.PASS


def test_uniform_movement_is_ambient_even_for_changed_code(tmp_path: Path) -> None:
    found = compared(tmp_path, step_us=slower(all=0.01), code=NEW_CODE)
    assert called(found) == {"on": "ambient", "off": "ambient", "pin": "control"} and drift_exit(found) is Exit.PASS
    assert found["axes"]["total_throughput"]["on"]["move"]["factor"] == pytest.approx(1 / 1.01, rel=0.001)
    assert called(found, "peak_pss")["on"] == "refused", "one block has no interval"


def test_ours_alone_is_a_candidate_effect(tmp_path: Path) -> None:
    found = compared(tmp_path, step_us=slower(on=0.01, off=0.01), code=NEW_CODE)
    assert called(found) == {"on": "candidate effect", "off": "candidate effect", "pin": "control"} and drift_exit(found) is Exit.FAIL
    assert found["axes"]["tpot_mean"]["on"]["against_control"]["factor"] == pytest.approx(1.01, rel=0.001)
    assert "changed: code_sha256" in found["axes"]["total_throughput"]["on"]["why"]


def test_an_arm_that_did_not_change_has_no_effect(tmp_path: Path) -> None:
    found = compared(tmp_path, step_us=slower(on=0.01))
    assert called(found) == {"on": "unexplained", "off": "no movement seen", "pin": "control"} and drift_exit(found) is Exit.FAIL


def test_a_changed_oracle_is_held_to_our_unchanged_arm(tmp_path: Path) -> None:
    found = compared(tmp_path, step_us=slower(pin=0.02), pinned=NEW_PIN)
    assert found["control"] == "on" and called(found) == {"on": "control", "off": "no movement seen", "pin": "oracle effect"}


def test_it_is_refused_when_ours_moved_too(tmp_path: Path) -> None:
    found = compared(tmp_path, step_us=slower(on=0.01, off=0.01, pin=0.03), pinned=NEW_PIN)
    assert called(found)["pin"] == "refused" and drift_exit(found) is Exit.INCONCLUSIVE
    assert found["axes"]["total_throughput"]["pin"]["why"] == "pin changed, and our arm on moved as well"


def test_it_is_refused_when_ours_gave_other_tokens(tmp_path: Path) -> None:
    found = compared(tmp_path, step_us=slower(pin=0.02), pinned=NEW_PIN,
                     tokens=lambda arm, phase, r, ids: [[i + (arm != "pin") for i in row] for row in ids])
    assert called(found)["pin"] == "refused" and "gave other tokens (0/8 identical)" in found["axes"]["total_throughput"]["pin"]["why"]


def test_without_a_control_nothing_is_said(tmp_path: Path) -> None:
    found = compared(tmp_path, pinned=NEW_PIN, code=NEW_CODE)
    assert found["control"] is None and found["axes"] == {} and drift_exit(found) is Exit.INCONCLUSIVE
    assert found["refused"] == ["no control: every arm changed between the series (on by code_sha256; off by code_sha256; pin by who)"]


@pytest.mark.parametrize(("after", "said"), [
    ({"requests": 6}, "workload.requests: 8 against 6"),
    ({"concurrency": 2}, "workload.concurrency: 4 against 2"),
    ({"statuses": {"performance-2": ["void"] * 3}}, "after is VOID: performance-2"),
    ({"statuses": {"performance-2": ["failed"] * 3}}, "after is ERROR: performance-2"),
    ({"cards": BUSY}, "after is contended"),
    ({"arms": (("x", "ours"), ("y", "pin")), "pairs": (("x", "y"),), "step_us": {"x": 1, "y": 1}, "pss_mib": {"x": 1, "y": 1}},
     "no arm has accepted blocks in both series"),
])
def test_what_cannot_be_compared_is_refused(tmp_path: Path, after: dict[str, Any], said: str) -> None:
    found = compared(tmp_path, **after)
    assert any(reason.startswith(said) for reason in found["refused"]) and found["axes"] == {}
    assert drift_exit(found) is Exit.INCONCLUSIVE


@pytest.mark.parametrize(("change", "said"), [
    (lambda record: record["machine"].update(host="cd" * 32), "machine.host"),
    (lambda record: record["machine"].update(host=None), "machine.host"),
    (lambda record: record["machine"].update(gpus=[]), "machine.gpus"),
])
def test_two_machines_are_not_compared(tmp_path: Path, change: Any, said: str) -> None:
    a, b = (make_series(tmp_path / name, **BASE) for name in "ab")
    edit_json(b / "series.json", change)
    reseal(b)
    assert compare_dirs(a, b)["refused"][0].startswith(said)
    assert load_series(b).record["machine"] != load_series(a).record["machine"]


def test_a_host_that_is_not_known_is_not_the_same_host(tmp_path: Path) -> None:
    a, b = (make_series(tmp_path / name, **BASE) for name in "ab")
    for series in (a, b):
        edit_json(series / "series.json", lambda record: record["machine"].update(host=None))
        reseal(series)
    assert compare_dirs(a, b)["refused"] == ["machine.host: None against None; two machines have no common control"]


def test_an_oracle_is_not_judged_by_another_oracle(tmp_path: Path) -> None:
    """Our arm and one of two oracles changed: the control is the other oracle, which says nothing of our tokens."""
    arms: dict[str, Any] = {"arms": (("on", "ours"), ("old", "pin"), ("pin", "pin")), "pairs": (("on", "pin"),),
                            "pss_mib": {"on": 1, "old": 1, "pin": 1}}
    steps = {"on": 10000, "old": 11000, "pin": 12000}
    found = compared(tmp_path, before={**arms, "step_us": steps}, **arms, step_us={**steps, "old": 11500},
                     code={**NEW_CODE, "old": "77" * 32})
    assert found["control"] == "pin" and called(found) == {"on": "no movement seen", "old": "refused", "pin": "control"}
    assert found["axes"]["total_throughput"]["old"]["why"] == "another engine changed, and the control pin is not ours"


def test_a_boot_between_is_noted(tmp_path: Path) -> None:
    a, b = (make_series(tmp_path / name, **BASE) for name in "ab")
    edit_json(b / "series.json", lambda record: record["machine"].update(boot_id="b2"))
    reseal(b)
    assert "booted between" in compare_dirs(a, b)["notes"][0]


def test_the_command_prints_control_movement_and_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = compared(tmp_path, step_us=slower(on=0.01, off=0.01), code=NEW_CODE)
    assert _run(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    out = capsys.readouterr().out
    assert out.splitlines() == drift_lines(found)
    assert sum(line.startswith(("total", "output", "request")) for line in out.splitlines()) == 1, "three equal ratios are one"
    assert "pin [pin]: unchanged, the control; 8/8 outputs as before" in out and "candidate effect; moved against pin" in out
    assert _run(["compare", str(tmp_path / "a"), str(tmp_path / "a")]) == 0
