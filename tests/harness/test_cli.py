"""Exit codes and the token comparison through the command line, on sealed synthetic series.

REFUSED, INTERRUPTED, VOID and ERROR of a run itself are tested with the runner (tests/e2e/test_runner.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.cli import _run
from tests.harness.series_factory import alter_id, copy_series, make_series, reseal

LEG = Path("blocks") / "performance-2" / "attempt-1" / "on"


@pytest.mark.parametrize(("changes", "code", "word"), [
    ({}, 0, "PASS (FASTER)"),
    ({"step_us": {"on": 1300, "off": 820, "pin": 1000}}, 1, "FAIL"),
    ({"performance": 1}, 2, "INCONCLUSIVE"),
    ({"arms": (("on", "ours"), ("off", "ours"), ("pin", "eager"))}, 2, "no verdict: eager"),
    ({"statuses": {"performance-2": ["void"] * 3}}, 3, "VOID"),
    ({"statuses": {"performance-2": ["failed"] * 3}}, 4, "ERROR"),
    ({"sealed": False}, 4, "not sealed"),
])
def test_each_verdict_has_its_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], code: int, word: str
) -> None:
    series = make_series(tmp_path / "series", **changes)
    assert _run(["summarize", str(series)]) == code
    captured = capsys.readouterr()
    assert word in captured.out + captured.err


def test_usage_and_refusal_have_theirs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["summarize"]) == 64
    assert _run(["no-such-command"]) == 64
    assert _run(["oracle", "show", "no-such-oracle"]) == 64
    assert "no-such-oracle" in capsys.readouterr().err


def test_a_summary_for_machines_is_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    series = make_series(tmp_path / "series")
    assert _run(["summarize", str(series), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "PASS"


def test_one_altered_id_is_named_by_request_and_position(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    series = make_series(tmp_path / "series")
    assert _run(["tokens", "diff", str(series)]) == 0
    copy = copy_series(series, tmp_path / "copy")
    alter_id(copy / LEG, request=5, position=3, value=31337)
    capsys.readouterr()
    assert _run(["summarize", str(copy)]) == 4
    assert "performance-2/attempt-1/on" in capsys.readouterr().err, "the unsealed edit is a broken seal"
    reseal(copy)
    assert _run(["tokens", "diff", str(copy)]) == 1
    assert "request 5, position 3: 504 against 31337" in capsys.readouterr().out
    assert _run(["tokens", "diff", str(series), str(copy)]) == 1
    assert _run(["summarize", str(copy)]) == 2
    assert "no verdict: wrong tokens" in capsys.readouterr().out
