"""The seven series of a calibration, synthetic and sealed, with faults that show as a real one's would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.analysis.calibration import COMPANY, SERIES
from harness.evidence.store import is_sealed
from tests.harness.series_factory import Outputs, make_series

BASE_US = 1000
BUSY = {"slow1": 0.01, "slow3": 0.03, "slow10": 0.10}
FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tail": ("tail", {"stall": 3}), "leak": ("leak", {"leak_mib": 256}), "token": ("wrong", {"token": 5}),
    "count": ("double", {"copies": 2}), "killed": ("killed", {"kill": 8}),
}
"""The faulty arm of each other series, and its fault."""
SAID = {
    "count": "performance-1-double: output_tokens: result.json counted 128, the plan says 64",
    "killed": "performance-1-killed: the arm exited with -9 (exit): it wrote nothing",
    "foreign": f"performance-1-a: foreign cpu: 48.0% of all cores over 5 s, 0 s into the measured window (at most 3.0%): pid 9 ({COMPANY}: "
               "python -m harness.leg.company ...) 48.0%, unattributed 0.0%",
}


def make_one(name: str, path: Path, **changes: Any) -> Path:
    """One series of a calibration by name; `changes` are to its recipe."""
    if name == "times":
        arms = ["a", *BUSY, "b"]
        recipe: dict[str, Any] = {
            "performance": 10, "step_us": {arm: round(BASE_US / (1 - BUSY.get(arm, 0))) for arm in arms},
            "pairs": (("b", "a"), *((arm, "a") for arm in BUSY)), "injected": dict(BUSY),
            "options": {arm: {"inject": {"busy": share}} for arm, share in BUSY.items()},
        }
    else:
        faulty, fault = FAULTS.get(name, ("b", {}))
        arms = [faulty, "a"] if fault else ["a", "b"]
        recipe = {
            "performance": 0 if name == "leak" else 4, "step_us": dict.fromkeys(arms, BASE_US), "pairs": ((arms[0], arms[1]),),
            "options": {faulty: {"inject": fault}} if fault else {},
            "pss_mib": {"a": 900, "b": 900, faulty: 900 + (256 if name == "leak" else 0)},
            "primary": "peak_pss" if name == "leak" else "total_throughput",
        }
        if name == "tail":
            recipe |= {"requests": 16, "max_tokens": 64, "stalls": {"tail": 3}, "injected": {"tail": 0.016}}
        if name == "token":
            recipe["tokens"] = _wrong
        if name in SAID:
            recipe |= {"performance": 1, "statuses": {"performance-1": ["void" if name == "foreign" else "failed"] * 3}}
    return make_series(path, **{"arms": tuple((arm, "ours") for arm in arms), "memory": 2 if name == "leak" else 0, "noise": 0.002,
                                "name": f"calibration-{name}", "reasons": SAID.get(name), **recipe, **changes})


def _wrong(arm: str, phase: str, repetition: int, outputs: Outputs) -> Outputs:
    if arm == "wrong" and phase == "performance":
        outputs[0][5] ^= 1
    return outputs


def make_calibration(folder: Path, **changes: dict[str, Any]) -> Path:
    """All of them below `folder`; `changes` by series."""
    for name in SERIES:
        if not ((folder / name).exists() and is_sealed(folder / name)):
            make_one(name, folder / name, **changes.get(name, {}))
    return folder
