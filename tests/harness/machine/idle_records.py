"""Snapshots of the idle gate, made by the gate itself looking at a made-up machine; and a series that holds nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.evidence import store
from harness.machine.idle import check_idle
from harness.machine.idle_rule import IdleLimits
from tests.harness.machine.fake_nvml import FakeNvml
from tests.harness.machine.fake_probe import RUNNER, FakeProbe

ANYTHING = IdleLimits(
    wait_min_s=0, wait_max_s=0, foreign_cpu_max=1, steal_max=1, gpu_util_max=100, vram_residue_max=1 << 60, vram_max=1 << 60,
    waived=("processes", "clock_event"),
)
"""Limits under which any machine passes whose values can be read."""


def idle_record(*cards: dict[str, Any], limits: IdleLimits = ANYTHING) -> dict[str, Any]:
    """idle.json of a machine of two idle cores and these cards, each given as changes to an idle one; without any, of one without a GPU."""
    return check_idle(limits, {RUNNER}, None, None, FakeProbe(FakeNvml(*cards) if cards else None))


def snapshots_series(folder: Path, *legs: dict[str, Any] | None, util_max: float = 2) -> Path:
    """A series of performance legs whose gate saw these cards in order, None being a machine without one."""
    store.create_series(folder)
    for number, card in enumerate(legs, 1):
        leg = folder / "blocks" / f"performance-{number}" / "attempt-1" / "on"
        leg.mkdir(parents=True)
        record = idle_record(*(() if card is None else (card,)), limits=IdleLimits(wait_max_s=2, gpu_util_max=util_max))
        (leg / "idle.json").write_text(json.dumps(record))
        store.record(folder, (leg / "idle.json").relative_to(folder).as_posix())
    return folder
