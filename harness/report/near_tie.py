"""A near-tie judgement as lines for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.analysis.near_tie import IDENTICAL


def lines(record: Mapping[str, Any]) -> list[str]:
    """Self-agreement of the oracle first, then the band and where it came from, then our exact share and each divergence."""
    oracle = record["oracle"]
    found = [f"oracle {oracle['distribution']} {oracle['version']} ({oracle['role']}), {record['dtype']}", "", "Oracle against itself"]
    found += [f"  {row['a']} against {row['b']}: {row['identical']}/{row['of']} outputs identical" for row in record["self_agreement"]]
    found += [f"  worst gap on its own ids: {_nats(record['oracle_worst_gap'])} nats", "", "Band"]
    found += [
        f"  {row['what']}: {record['percentile']}th percentile {_nats(row['percentile'])}, worst {_nats(row['worst'])} nats "
        f"({row['values']} log-probabilities at {row['positions']} positions)"
        for row in record["jitter"]
    ]
    found.append(f"  {record['factor']} times the largest percentile: {_nats(record['band'])} nats")
    if record["band"] == 0:
        found.append("  the oracle does not jitter here: nothing but identical ids passes")
    for arm in record["arms"]:
        found += ["", f"Ours ({', '.join(arm['legs'])}) against {arm['against']}",
                  f"  {arm['identical']}/{arm['of']} identical, {arm['near_ties']} near-ties, {arm['wrong']} wrong; "
                  f"worst gap of all our ids {_nats(arm['worst_gap'])} nats"]
        found += [
            f"  request {row['request']}, position {row['position']}: {row['ours']} for {row['oracle']}, gap {_nats(row['gap'])}, "
            f"worst {_nats(row['worst_gap'])} at {row['worst_position']}: {row['label']}"
            for row in arm["requests"] if row["label"] != IDENTICAL
        ]
    return found


def _nats(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"
