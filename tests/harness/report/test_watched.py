"""What the watcher saw of performance legs, from their leg.json to the page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.leg.telemetry import Watcher
from harness.leg.telemetry_summary import summarise_telemetry
from harness.machine.idle_rule import IdleLimits
from harness.report.build import build_report
from harness.report.markdown import render
from harness.report.text import NBSP
from tests.harness.machine.fake_nvml import FakeNvml
from tests.harness.machine.fake_probe import RUNNER, FakeProbe
from tests.harness.series_factory import edit_json, make_series, reseal


def seen(steal: float = 0.0, foreign: float = 0.0, own_cpu_s: float = 0.2, nvml: FakeNvml | None = None) -> dict[str, Any]:
    """The telemetry of a leg of 20 s, measured from its fifth second on; `steal` and `foreign` in cores of two."""
    probe = FakeProbe(nvml)
    probe.add(150, lambda _: 1.5, parent=RUNNER)
    probe.add(60, lambda _: foreign)
    probe.steal = lambda _: steal
    watcher = Watcher({RUNNER}, probe)
    for _ in range(40):
        probe.sleep(0.5)
        watcher.look()
    rows = [*watcher.finish()[:-1], {"kind": "end", "cpu_s": own_cpu_s, "wall_s": 20.0}]
    marks = [{"mark": "first_submit", "t_ns": 1005 * 10**9}, {"mark": "last_token", "t_ns": 1019 * 10**9}]
    return summarise_telemetry(rows, marks, asdict(IdleLimits()))[0]


def page(folder: Path, telemetry: Callable[[str], Any]) -> str:
    series = make_series(folder / "series", performance=1)
    for leg in series.glob("blocks/performance-*/attempt-*/*/leg.json"):
        edit_json(leg, lambda record: record.update(telemetry=telemetry(record["arm"])))
    reseal(series)
    text = render(build_report(series)).replace(NBSP, " ")
    return text.split("## Machine during the performance legs")[1].split("\n## ")[0]


def test_the_worst_leg_stands_in_one_line_and_every_leg_in_a_table(tmp_path: Path) -> None:
    section = page(tmp_path, lambda arm: seen(steal=0.04, own_cpu_s=0.3) if arm == "pin" else seen(foreign=0.02))
    assert "took at most 2.00 % of all cores (2.00 % over the worst 5 s)" in section
    assert "foreign processes 1.00 % (1.00 %)" in section and "used at most 1.50 % of one core" in section
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in section.splitlines() if line.startswith("| performance-1-")}
    assert list(rows) == ["performance-1-on", "performance-1-off", "performance-1-pin"]
    assert rows["performance-1-pin"].endswith("| 1.50 % | 20 | 1.0 |") and "GPU" not in section


def test_clocks_and_events_of_each_card(tmp_path: Path) -> None:
    card = {"utilization": 97, "clock": 1980, "used": 20 << 30, "compute": [150], "reasons": 0b100}
    section = page(tmp_path, lambda _: seen(nvml=FakeNvml({**card, "reasons": 0}, card)))
    assert "| performance-1-on | 0 Fake H200 | 1,980 | 1980 to 1980 | never | 20,480 | none |" in section
    assert "| performance-1-on | 1 Fake H200 | n/a | n/a | 1980 to 1980 | 20,480 | software power cap |" in section


def test_what_was_not_seen_is_never_zero(tmp_path: Path) -> None:
    """A leg without telemetry, one whose CPU time could not be read, and one of a record from before the window was judged."""
    unread = {**seen(), "cpu": None}
    old = {**seen(), "cpu": {"foreign": 0.0, "steal": 0.0, "foreign_window_max": 0.0}}
    section = page(tmp_path, lambda arm: {"on": None, "off": unread, "pin": old}[arm])
    assert "took at most n/a of all cores (n/a over" in section and "used at most n/a of one core" in section
    for arm, own in (("on", "n/a | n/a | n/a"), ("off", "1.00 % | 20 | 1.0"), ("pin", "1.00 % | 20 | 1.0")):
        assert f"| performance-1-{arm} | n/a | n/a | n/a | n/a | {own} |" in section
