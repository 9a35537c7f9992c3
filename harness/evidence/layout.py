"""Where everything lies inside a series directory: writer and reader share these names, so they cannot drift apart.

docs/ARCHITECTURE.md shows the tree.  Repetitions and attempts count from 1.
"""

from __future__ import annotations

from pathlib import Path

SPEC, PLAN, SERIES, LOCK = "spec.toml", "plan.json", "series.json", "lock"
MANIFEST = "manifest.jsonl"
STAGE, CEILING, CORRECTNESS, WARMUP, BLOCKS = "stage", "ceiling", "correctness", "warmup", "blocks"
GATE = "gate.json"
LEG, BLOCK, IDLE, GUARD, MEMORY = "leg.json", "block.json", "idle.json", "guard.json", "memory.jsonl.gz"
PAGE_CACHE, TELEMETRY = "page_cache.json", "telemetry.jsonl.gz"
SUMMARY, REPORT, PLOTS, LOGS, UNPACKED = "summary.json", "report.md", "plots", "logs", "unpacked"

DERIVED = frozenset({SUMMARY, REPORT, PLOTS, LOGS, UNPACKED})
"""Top-level names that are no evidence: rebuilt at will, or kept for people.  The manifest knows nothing of them."""

NULL_ARM = "null"
"""The name, and the driver, of the client's ceiling leg."""

SINGLE = (CEILING, CORRECTNESS, WARMUP)
"""Phases of one block each."""

ATTEMPT = "attempt-"


def block_name(phase: str, repetition: int) -> str:
    return f"{phase}-{repetition}"


def leg_name(phase: str, repetition: int, arm: str) -> str:
    """The name of a leg in plan.json and leg.json, such as `performance-2-on`; legs of a phase of one block have no repetition."""
    return f"{phase}-{arm}" if phase in SINGLE else f"{phase}-{repetition}-{arm}"


def attempts_folder(series: Path, phase: str, repetition: int) -> Path:
    """The folder that holds all attempts of a block.  In a phase of one block the `repetition` is not looked at."""
    return series / phase if phase in SINGLE else series / BLOCKS / block_name(phase, repetition)


def block_folder(series: Path, phase: str, repetition: int, attempt: int) -> Path:
    """One attempt of a block."""
    return attempts_folder(series, phase, repetition) / f"{ATTEMPT}{attempt}"


def leg_folder(series: Path, phase: str, repetition: int, attempt: int, arm: str) -> Path:
    return block_folder(series, phase, repetition, attempt) / arm


def warmup_folder(series: Path, arm: str, attempt: int = 1) -> Path:
    return leg_folder(series, WARMUP, 1, attempt, arm)


def correctness_folder(series: Path, arm: str, attempt: int = 1) -> Path:
    return leg_folder(series, CORRECTNESS, 1, attempt, arm)


def attempts(series: Path, phase: str, repetition: int) -> list[int]:
    """The attempts that exist on disk, in order."""
    folder = attempts_folder(series, phase, repetition)
    if not folder.is_dir():
        return []
    return sorted(int(entry.name.removeprefix(ATTEMPT)) for entry in folder.iterdir() if entry.name.removeprefix(ATTEMPT).isdigit())
