"""The committed scoreboard is what the committed evidence gives; a hand-edited digit fails."""

from __future__ import annotations

from harness.report.scoreboard import render_scoreboard
from harness.series.stage import repository_root


def test_the_page_is_generated() -> None:
    root = repository_root()
    assert (root / "docs" / "BENCHMARKS.md").read_text(encoding="utf-8") == render_scoreboard(root / "results")
