"""Where everything lies inside a series directory: writer and reader share these names, so they cannot drift apart.

docs/ARCHITECTURE.md shows the tree.
"""

from __future__ import annotations

from pathlib import Path

SPEC, PLAN, SERIES, LOCK = "spec.toml", "plan.json", "series.json", "lock.jsonl"
MANIFEST = "manifest.jsonl"
STAGE, CORRECTNESS, WARMUP, BLOCKS = "stage", "correctness", "warmup", "blocks"
GATE = "gate.json"
LEG, BLOCK, IDLE, GUARD, MEMORY = "leg.json", "block.json", "idle.json", "guard.json", "memory.jsonl.gz"
SUMMARY, REPORT, PLOTS, LOGS = "summary.json", "report.md", "plots", "logs"

DERIVED = frozenset({SUMMARY, REPORT, PLOTS, LOGS})
"""Top-level names that are no evidence: rebuilt at will, or kept for people.  The manifest knows nothing of them."""


def block_name(phase: str, repetition: int) -> str:
    return f"{phase}-{repetition}"


def leg_name(phase: str, repetition: int, arm: str) -> str:
    """The name of a leg in plan.json and leg.json, such as `performance-2-on`."""
    return f"{phase}-{repetition}-{arm}"


def block_folder(series: Path, phase: str, repetition: int, attempt: int) -> Path:
    """Repetitions and attempts count from 1."""
    return series / BLOCKS / block_name(phase, repetition) / f"attempt-{attempt}"


def leg_folder(series: Path, phase: str, repetition: int, attempt: int, arm: str) -> Path:
    return block_folder(series, phase, repetition, attempt) / arm


def warmup_folder(series: Path, arm: str) -> Path:
    return series / WARMUP / arm


def correctness_folder(series: Path, arm: str) -> Path:
    return series / CORRECTNESS / arm
