"""Two series of the same work on one machine, compared: what moved, and what may be said of it.  Pure; docs/METRICS.md gives the rules.

An arm whose identity did not change between the series is the control: it cannot have changed, so what it moved by is the machine's.
What every arm moved by is ambient; only a movement against the control can be an effect of what was changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy import stats

from harness.analysis.ratios import AXES, CONFIDENCE, POWER
from harness.analysis.summary import axis_values
from harness.analysis.tokens import TokensError, diff_tokens, is_ours
from harness.evidence.schema import Series

IDENTITY = ("driver", "client", "options", "environment", "who", "device", "resolved", "code_sha256", "role")
SAME_WORK = ("corpus_sha256", "requests", "prompt_tokens", "max_tokens", "min_tokens", "ignore_eos", "concurrency")

AMBIENT, STILL, CANDIDATE, ORACLE, UNEXPLAINED, REFUSED = (
    "ambient", "no movement seen", "candidate effect", "oracle effect", "unexplained", "refused")

Summary = Mapping[str, Any]
Values = Sequence[float | None]


@dataclass(frozen=True, kw_only=True)
class Move:
    """By which factor a value moved from the first series to the second, with the two-sided 95 % interval (Welch's t on logs), and the
    smallest movement that would have been seen four times in five.  None where a series has a single block, or a value is missing."""

    factor: float | None
    interval: tuple[float, float] | None
    detectable: float | None

    @property
    def moved(self) -> bool | None:
        """Whether the interval leaves out 1; None when that cannot be told."""
        return None if self.interval is None else not self.interval[0] <= 1 <= self.interval[1]


def move(before: Values, after: Values) -> Move:
    """The movement between two sets of blocks, by the geometric means of their values."""
    known = [[value for value in values if value is not None and value > 0] for values in (before, after)]
    if not all(known) or [len(values) for values in known] != [len(before), len(after)]:
        return Move(factor=None, interval=None, detectable=None)
    logs = [np.log(values) for values in known]
    center = float(logs[1].mean() - logs[0].mean())
    if min(map(len, logs)) < 2:
        return Move(factor=math.exp(center), interval=None, detectable=None)
    shares = [float(x.var(ddof=1)) / len(x) for x in logs]
    error = math.sqrt(sum(shares))
    degrees = sum(shares) ** 2 / sum(share**2 / (len(x) - 1) for share, x in zip(shares, logs, strict=True)) if error else 1.0
    two, power = (float(stats.t.ppf(q, degrees)) for q in ((1 + CONFIDENCE) / 2, POWER))
    return Move(factor=math.exp(center), interval=(math.exp(center - two * error), math.exp(center + two * error)),
                detectable=math.expm1((two + power) * error))


def compare_series(a: Series, b: Series, summaries: tuple[Summary, Summary]) -> dict[str, Any]:
    """What moved from series `a` to series `b`, as JSON; `summaries` are theirs.

    `refused` lists why nothing may be compared at all; `control` is the arm that did not change; `arms` tells each arm's changed fields and
    tokens; `axes` its movement, the movement against the control and what that is called.
    """
    out: dict[str, Any] = {"a": a.plan["name"], "b": b.plan["name"], "refused": _refusals(a, b, summaries), "notes": _notes(a, b),
                           "control": None, "primary": b.plan["verdict"]["primary"], "arms": {}, "axes": {}}
    names = [arm for arm in a.arms if arm in b.arms and a.legs(arm) and b.legs(arm)]
    if not names:
        out["refused"].append("no arm has accepted blocks in both series")
    if out["refused"]:
        return out
    out["arms"] = {name: _arm(a, b, name) for name in names}
    # an oracle first: our own arms are what changes
    unchanged = sorted((name for name in names if not out["arms"][name]["changed"]), key=lambda name: out["arms"][name]["ours"])
    if not unchanged:
        changed = "; ".join(f"{name} by {', '.join(out['arms'][name]['changed'])}" for name in names)
        out["refused"].append(f"no control: every arm changed between the series ({changed})")
        return out
    out["control"] = control = unchanged[0]
    for axis in AXES:
        values = {name: (axis_values(summaries[0]["arms"][name], axis), axis_values(summaries[1]["arms"][name], axis)) for name in names}
        if any(value is not None for both in values.values() for series in both for value in series):
            out["axes"][axis] = {name: _row(out["arms"], control, name, values) for name in names}
    return out


def _refusals(a: Series, b: Series, summaries: tuple[Summary, Summary]) -> list[str]:
    reasons = [f"workload.{field}: {a.plan['workload'][field]} against {b.plan['workload'][field]}; other work is not compared"
               for field in SAME_WORK if a.plan["workload"][field] != b.plan["workload"][field]]
    models = [(series.plan.get("model") or {}).get("sha256") for series in (a, b)]
    if models[0] != models[1]:
        reasons.append(f"model.sha256: {models[0]} against {models[1]}; another model is not compared")
    for field in ("host", "cpu", "gpus"):
        machines = [series.record["machine"].get(field) for series in (a, b)]
        if machines[0] != machines[1] or (field == "host" and machines[0] is None):
            reasons.append(f"machine.{field}: {machines[0]} against {machines[1]}; two machines have no common control")
    for series, summary in zip((a, b), summaries, strict=True):
        if summary["verdict"] in ("VOID", "ERROR"):
            reasons.append(f"{series.plan['name']} is {summary['verdict']}: {'; '.join(summary['reasons'])}")
        if (summary.get("contention") or {}).get("contended"):
            reasons.append(f"{series.plan['name']} is contended: its absolute values hold the load of others, and so would a movement")
    return reasons


def _notes(a: Series, b: Series) -> list[str]:
    boots = [series.record["machine"].get("boot_id") for series in (a, b)]
    return [] if boots[0] == boots[1] else ["the machine was booted between the series: clocks may differ by several per cent"]


def _identity(series: Series, name: str) -> dict[str, Any]:
    leg = series.legs(name)[0]
    planned = next(arm for arm in series.plan["arms"] if arm["name"] == name)
    known = {**planned, **(leg.result or {}), "code_sha256": leg.record["code_sha256"], "role": leg.record["role"]}
    return {field: known.get(field) for field in IDENTITY}


def _arm(a: Series, b: Series, name: str) -> dict[str, Any]:
    before, after = _identity(a, name), _identity(b, name)
    try:
        diff = diff_tokens(a.legs(name)[0].outputs, b.legs(name)[0].outputs)
        tokens = {"identical": diff.identical, "of": diff.of}
    except TokensError:
        tokens = {"identical": 0, "of": len(a.legs(name)[0].outputs)}
    return {"role": after["role"], "ours": is_ours(b.legs(name)[0]), "changed": [f for f in IDENTITY if before[f] != after[f]],
            "tokens": tokens}


def _row(arms: Mapping[str, Any], control: str, name: str, values: Mapping[str, tuple[Values, Values]]) -> dict[str, Any]:
    """One arm on one axis: its own movement, the movement against the control block by block, and what that is."""
    own, ambient = move(*values[name]), move(*values[control])
    relative = move(_over(values[name][0], values[control][0]), _over(values[name][1], values[control][1]))
    called, why = ("control", None) if name == control else _call(arms, control, name, ambient, relative)
    return {"move": asdict(own), "against_control": asdict(relative), "called": called, "why": why}


def _call(arms: Mapping[str, Any], control: str, name: str, ambient: Move, relative: Move) -> tuple[str, str | None]:
    if relative.moved is None:
        return REFUSED, "a value is missing, or a series has one block: no interval"
    if not relative.moved:
        return (AMBIENT, f"moved as {control} did, which did not change") if ambient.moved else (STILL, None)
    arm = arms[name]
    if not arm["changed"]:
        return UNEXPLAINED, f"moved against {control}, and neither of the two changed"
    if arm["ours"]:
        return CANDIDATE, f"moved against {control}; changed: {', '.join(arm['changed'])}"
    tokens = arms[control]["tokens"]
    if not arms[control]["ours"]:
        return REFUSED, f"another engine changed, and the control {control} is not ours"
    if ambient.moved is not False:
        return REFUSED, f"{name} changed, and our arm {control} moved as well"
    if tokens["identical"] != tokens["of"]:
        return REFUSED, f"{name} changed, and our arm {control} gave other tokens ({tokens['identical']}/{tokens['of']} identical)"
    return ORACLE, f"{name} changed ({', '.join(arm['changed'])}); our arm {control} is within noise and token-identical"


def _over(values: Values, control: Values) -> list[float | None]:
    if len(values) != len(control):
        return []
    return [x / y if x and y else None for x, y in zip(values, control, strict=True)]
