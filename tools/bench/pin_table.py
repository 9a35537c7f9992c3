"""From the raw records of `pin_configs run` to the table that says which configuration of the pin is the fastest."""

from __future__ import annotations

import gzip
import json
import statistics
import subprocess
from pathlib import Path
from typing import Any

from harness.analysis.metrics import leg_metrics
from legs.protocol import Trace, sha256, to_json
from tools.bench.pin_configs import NAMES, RAW_PREFIX

TABLE, PAGE = "pin_configs.json", "pin_configs.md"


def read_traces(rows: list[dict[str, Any]]) -> list[Trace]:
    """The client's traces as they were recorded."""
    return [Trace(**{**row, "stamps": tuple((t, n) for t, n in row["stamps"])}) for row in rows]


def pass_row(done: dict[str, Any]) -> dict[str, Any]:
    """One measured pass in tokens per second and milliseconds.  `steps` are the distinct moments at which ids arrived."""
    traces = read_traces(done["traces"])
    metrics = leg_metrics(traces)
    assert metrics.tpot is not None and metrics.itl is not None and metrics.itl.p95 is not None, "W has many ids a request"
    return {
        "total_tok_s": metrics.total_throughput, "mean_ttft_ms": metrics.ttft.mean * 1e3, "mean_tpot_ms": metrics.tpot.mean * 1e3,
        "itl_p50_ms": metrics.itl.median * 1e3, "itl_p95_ms": metrics.itl.p95 * 1e3,
        "steps": len({t for trace in traces for t, _ in trace.stamps}), "outputs_sha256": done["outputs_sha256"],
        "steps_told": None if done["iterations"] is None else done["iterations"]["count"],
    }


def summarise(record: dict[str, Any]) -> dict[str, Any]:
    """One configuration: its settings, starts and passes; an error where it did not run to its end."""
    rows = [pass_row(done) for done in record["passes"]]
    kept = {key: value for key, value in record.items() if key not in ("passes", "schema", "commit", "code_sha256")}
    return {**kept, "passes": rows, "median_tok_s": statistics.median(row["total_tok_s"] for row in rows) if rows else None}


def same_at_commit(commit: str | None, code_sha256: dict[str, str]) -> dict[str, bool | None]:
    """For each file that ran: is it the commit's, byte for byte?  None where git cannot tell (no repository, or not that commit)."""
    out: dict[str, bool | None] = {}
    for name, found in code_sha256.items():
        told = subprocess.run(["git", "show", f"{commit}:{name}"], capture_output=True, check=False)
        out[name] = sha256(told.stdout) == found if told.returncode == 0 else None
    return out


def derive(folder: Path) -> dict[str, Any]:
    """The table over every raw record in `folder`; `fastest` and `not_clearly_slower` as :func:`fastest` has them."""
    records = [json.loads(gzip.decompress(path.read_bytes())) for path in sorted(folder.glob(f"{RAW_PREFIX}*.json.gz"))]
    if not records:
        raise FileNotFoundError(f"{folder}: holds no {RAW_PREFIX}*.json.gz; run the configurations first")
    if len({(record["commit"], json.dumps(record["code_sha256"], sort_keys=True)) for record in records}) != 1:
        raise ValueError(f"{folder}: records of different code lie together; only those of one run may be compared")
    rows = sorted(map(summarise, records), key=lambda row: NAMES.index(row["name"]))
    best, level = fastest(rows)
    return {
        "schema": 1, "commit": records[0]["commit"], "code_sha256": records[0]["code_sha256"],
        "same_at_commit": same_at_commit(records[0]["commit"], records[0]["code_sha256"]), "configurations": rows,
        "not_run": [name for name in NAMES if name not in {row["name"] for row in rows}], "fastest": best, "not_clearly_slower": level,
    }


def fastest(rows: list[dict[str, Any]]) -> tuple[str | None, list[str]]:
    """The configuration with the highest median of its passes' total throughput, and those whose passes overlap its passes.

    None and no others when fewer than two were timed: there is nothing to compare.
    """
    timed = sorted((row for row in rows if row["median_tok_s"] is not None), key=lambda row: float(row["median_tok_s"]), reverse=True)
    if len(timed) < 2:
        return None, []
    worst = min(done["total_tok_s"] for done in timed[0]["passes"])
    return timed[0]["name"], [row["name"] for row in timed[1:] if max(done["total_tok_s"] for done in row["passes"]) >= worst]


def page(table: dict[str, Any]) -> str:
    """The table for people, as Markdown."""
    lines = [
        "# Configurations of the pinned vLLM on workload W", "",
        "128 requests of 1030 random prompt ids, 128 outputs each, 32 in flight, 2048 tokens a step, bf16, Qwen3-4B's shape with made-up",
        "weights. Each configuration is a fresh process: one warm-up pass of W, then the passes below, in one session on one machine.", "",
        "| configuration | ready, s | total tok/s per pass | mean TTFT, ms | mean TPOT, ms | ITL p50 / p95, ms | steps |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in table["configurations"]:
        if not row["passes"]:
            lines.append(f"| {row['name']} | failed: {row.get('error', 'no pass')} | | | | | |")
            continue

        def each(key: str, digits: int, passes: list[dict[str, Any]] = row["passes"]) -> str:
            return ", ".join(f"{done[key]:.{digits}f}" for done in passes)

        mark = " **fastest**" if row["name"] == table["fastest"] else ""
        lines.append(f"| {row['name']}{mark} | {row['ready_s']:.1f} | {each('total_tok_s', 0)} | {each('mean_ttft_ms', 1)} | "
                     f"{each('mean_tpot_ms', 3)} | {each('itl_p50_ms', 2)} / {each('itl_p95_ms', 2)} | {each('steps', 0)} |")
    if table["not_clearly_slower"]:
        lines += ["", f"Passes that overlap the fastest's: {', '.join(table['not_clearly_slower'])}."]
    if table["not_run"]:
        lines += ["", f"Not run: {', '.join(table['not_run'])}."]
    other = [name for name, same in table["same_at_commit"].items() if not same]
    lines += ["", f"The code that ran is that of commit {table['commit']}"
              + (f", except that these files are another version or could not be compared: {', '.join(other)}." if other else "."),
              "Derived from the raw stamps by `python -m tools.bench.pin_configs table`;",
              "pin_configs.json has what each configuration resolved to, its process tree and the hashes of the code that ran.", ""]
    return "\n".join(lines)


def write_table(folder: Path) -> int:
    """Write pin_configs.json and pin_configs.md beside the raw records and print the page; 0."""
    table = derive(folder)
    (folder / TABLE).write_bytes(to_json(table))
    (folder / PAGE).write_text(page(table), encoding="utf-8")
    print(page(table))
    return 0
