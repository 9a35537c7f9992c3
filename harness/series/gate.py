"""The correctness gate: before any timing, our arms' greedy ids must equal the stored reference's and each other's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SCHEMA = 1


def decide(
    reference: Mapping[int, Sequence[int]], outputs: Mapping[str, Sequence[Sequence[int]]], reference_sha256: str
) -> dict[str, Any]:
    """The content of gate.json.

    `reference` maps prompt index to ids, `outputs` maps arm to its ids in prompt order.  A case is one prompt in one arm; a prompt the
    arm left out is counted as skipped, and a gate with a skipped case is not ok: what did not run did not pass.
    """
    cases = passed = skipped = 0
    failures = []
    for arm, found in outputs.items():
        for index, expected in sorted(reference.items()):
            cases += 1
            if index >= len(found):
                skipped += 1
                continue
            position = first_divergence(expected, found[index])
            if position is None:
                passed += 1
                continue
            failures.append({
                "arm": arm, "request": index, "position": position,
                "expected": expected[position] if position < len(expected) else None,
                "got": found[index][position] if position < len(found[index]) else None,
            })
    ours = [list(map(list, found)) for found in outputs.values()]
    identical = all(found == ours[0] for found in ours)
    return {
        "schema": SCHEMA, "ok": bool(cases) and passed == cases and identical, "cases": cases, "passed": passed, "skipped": skipped,
        "failures": failures, "on_off_identical": identical, "reference_sha256": reference_sha256,
    }


def first_divergence(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first position at which two id sequences differ (a shorter one differs at its end), None when they are equal."""
    for position, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return position
    return None if len(a) == len(b) else min(len(a), len(b))


def sentence(gate: Mapping[str, Any]) -> str:
    """One line for people: the counts, and the first failure by arm, request and position."""
    text = f"correctness gate: {gate['passed']}/{gate['cases']} cases, {gate['skipped']} skipped"
    if not gate["on_off_identical"]:
        text += "; our arms differ from each other"
    if gate["failures"]:
        first = gate["failures"][0]
        text += (f"; arm {first['arm']}, request {first['request']}, position {first['position']}: "
                 f"expected {first['expected']}, got {first['got']}")
    return text
