"""Levers on a step's time: what was expected of each, and what one process measured, old and new step in ABBA order.

    python -m tools.bench.levers docs/LEVERS.md STEP_TIME.json ...    # derive the page from records of tools.bench.step_time, in order

A lever is a switch of the engine as it is ("new") that can be set back ("old").  Decode levers are whole decode steps of 32 rows as
graphs, captured under each setting; mixed levers are the step of 2,048 tokens launched kernel by kernel.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.api import LLM


@dataclass(frozen=True)
class Lever:
    """`place` is module:attribute (or module:class.attribute) that holds `new` and is set to `old`; tunings are given as tuples."""

    name: str
    kind: str
    prediction: str
    place: str
    old: Any
    new: Any
    decision: str


NOT_YET = "Off: no card has measured it yet."
DECODE_TUNING = "engine.kernels.attention_decode_triton:HALF_PRECISION"
LEVERS = (
    Lever("Decode attention: 7 stages of 32 tokens instead of 6", "decode",
          "+0.03 ms: 39.7 against 38.7 us a layer when the kernel ran alone", DECODE_TUNING, (32, 2, 6), (32, 2, 7), "Dropped: slower."),
    Lever("Decode attention: 4 stages of 32 tokens instead of 6", "decode",
          "-0.05 ms: 37.3 against 38.7 us a layer when the kernel ran alone", DECODE_TUNING, (32, 2, 6), (32, 2, 4),
          "Six stay.  It hangs on the next lever: four are faster without it, slower with it; six with dependent launch and 16 warps in "
          "RMSNorm gave the shortest step of all, and that combination passed the tests that need a card (run 5)."),
    Lever("Programmatic dependent launch of our own kernels", "decode",
          "-0.05 ms: 181 kernels, 0.29 us each in a chain of them (facts.json, dependent_launch)",
          "engine.kernels.dependent:ON", False, True, "On: worth more than one in a hundred with six stages, nothing with four."),
    Lever("RMSNorm with 16 warps a row instead of 8", "decode", "-0.03 ms: one load of 16 bytes a thread, 73 kernels",
          "engine.kernels.norm_triton:WARPS", 8, 16, "On: no difference that counts, and what the tests ran with."),
    Lever("RMSNorm with 16 warps a row instead of 8", "mixed", "none: bound by memory at 2,048 rows",
          "engine.kernels.norm_triton:WARPS", 8, 16, "As predicted."),
    Lever("Decode attention beside prefill attention, on a stream of its own", "mixed",
          "-1.0 ms: 1.6 ms bound by memory beside 2.8 ms that is not", "engine.kernels.streams:ON", False, True,
          "Kept, well short of the prediction; where the rest stays is not known."),
    Lever("Prefill attention: 32 keys a tile and 4 warps instead of 64 and 8", "mixed",
          "-0.19 ms: 76.4 against 81.8 us a layer when the kernel ran alone",
          "engine.kernels.attention_prefill_triton:HALF_PRECISION", (64, 8, 3), (32, 4, 3), "Kept: more than predicted."),
    Lever("Linears of few rows in a kernel of our own: each weight read once, sums over K split", "decode",
          "-0.3 ms: with the early start below, which cuBLAS takes no part in", "engine.kernels.linear_triton:MOST_ROWS", 0, 32, NOT_YET),
    Lever("Dependent kernels start when their predecessor has started, not when it ends", "decode",
          "-0.3 ms: 1 to 1.5 us at eight boundaries of 36 layers, with our own linears",
          "engine.kernels.dependent:EARLY", False, True, NOT_YET),
    Lever("Linears ask for their first weights before they wait", "decode", "-0.1 ms: memory gets under way beside the kernel before",
          "engine.kernels.linear_triton:PLAIN", (128, 64, 4, 5, 264, 0), (128, 64, 4, 5, 264, 4), NOT_YET),
    Lever("Last layer's feed-forward for sampled rows only", "mixed",
          "-0.5 ms: 0.31 TFLOP at 650 TFLOP/s and one SiLU-mul", "engine.batch:SlotBatch.cuts_last_layer", False, True, "Kept."),
)
PAIRS = {"decode": 100, "mixed": 30}
"""ABBA rounds: two old and two new steps each."""


@contextmanager
def setting(lever: Lever, value: Any) -> Iterator[None]:
    """The lever at `value` inside the block."""
    from importlib import import_module

    module, _, path = lever.place.partition(":")
    *parents, name = path.split(".")
    holder: Any = import_module(module)
    for parent in parents:
        holder = getattr(holder, parent)
    before = getattr(holder, name)
    setattr(holder, name, type(before)(*value) if isinstance(value, tuple) else value)
    try:
        yield
    finally:
        setattr(holder, name, before)


def abba(old: Callable[[], Any], new: Callable[[], Any], rounds: int) -> dict[str, Any]:
    """Median milliseconds of each over `rounds` of old, new, new, old, and the median over rounds of new / old."""
    import torch

    for act in (old, new) * 3:
        act()
    torch.cuda.synchronize()
    times: list[tuple[Callable[[], Any], torch.cuda.Event, torch.cuda.Event]] = []
    for _ in range(rounds):
        for act in (old, new, new, old):
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
            act()
            events[1].record()
            times.append((act, *events))
    torch.cuda.synchronize()
    spent = [start.elapsed_time(end) for _, start, end in times]
    ratios = [(spent[i + 1] + spent[i + 2]) / (spent[i] + spent[i + 3]) for i in range(0, len(spent), 4)]
    each = {name: [ms for (act, _, _), ms in zip(times, spent, strict=True) if act is one] for name, one in (("old", old), ("new", new))}
    return {"old_ms": statistics.median(each["old"]), "new_ms": statistics.median(each["new"]), "ratio": statistics.median(ratios),
            "ratio_quartiles": statistics.quantiles(ratios), "steps_each": 2 * rounds}


def measure(llm: LLM) -> list[dict[str, Any]]:
    """Every lever on `llm`, whose weights, cache and state are used as they are."""
    import torch

    from engine.graphs import DecodeGraphs
    from engine.runner import CardRunner
    from tools.bench import step_time

    runner = llm.runner
    assert isinstance(runner, CardRunner)
    out = []
    for lever in LEVERS:
        if lever.kind == "decode":
            step_time.fill(step_time.fresh(llm), 32)
            step_time.rewind(llm, step_time.CONTEXT - 2 * PAIRS["decode"])
            acts = []
            for value in (lever.old, lever.new):
                graphs = DecodeGraphs(32, eager=False)
                graphs.sizes = (32,)
                with setting(lever, value), torch.inference_mode():
                    graphs.prepare(runner._decode)
                acts.append(partial(graphs.run, 32, runner._decode))
            found = abba(acts[0], acts[1], PAIRS["decode"])
        else:
            step = step_time.mixed(llm)
            found = abba(partial(_launch, llm, step, lever, lever.old), partial(_launch, llm, step, lever, lever.new), PAIRS["mixed"])
        out.append({"name": lever.name, "kind": lever.kind, "prediction": lever.prediction, **found})
    return out


def _launch(llm: LLM, step: Any, lever: Lever, value: Any) -> None:
    with setting(lever, value):
        llm.runner.launch(step)


def page(records: dict[str, dict[str, Any]]) -> str:
    """docs/LEVERS.md from records of step_time by file name; what a record does not hold is left out."""
    lines = [
        "# Levers", "",
        "What was tried to make a step shorter, what was expected, and what one process on one card measured. Each lever: the step with it",
        "off and on, in ABBA order, event medians; on / off is the median over rounds, with its quartiles. All other settings are those of",
        "the commit that ran, so levers that touch each other read differently from one run to the next. Runs follow each other in time.",
        "None of this compares with vLLM: that takes both arms in one series.", "",
        "Derived by `python -m tools.bench.levers` from the records named.", "",
        "## Decisions", "", "| lever | step | decision |", "|---|---|---|",
    ]
    lines += [f"| {lever.name} | {lever.kind} | {lever.decision} |" for lever in LEVERS]
    for source, record in records.items():
        versions, sections = record["versions"], record["sections"]
        commit = f"commit {record['commit']}" if record["commit"] else f"code {record['code_sha256'][:12]}"
        lines += ["", f"## `{source}`", "", f"{record['device']}, torch {versions['torch']}, Triton {versions['triton']}; {commit}."]
        for name, part in (("levers", _levers), ("tunings_decode", _tunings), ("decode", _steps), ("w_depth2", _workload)):
            if sections.get(name, {}).get("value") is not None:
                lines += part(record)
    return "\n".join([*lines, ""])


def _levers(record: dict[str, Any]) -> list[str]:
    lines = ["", "| lever | step | prediction | off, ms | on, ms | on / off | steps each |", "|---|---|---|---|---|---|---|"]
    for row in record["sections"]["levers"]["value"]:
        low, _, high = row["ratio_quartiles"]
        lines.append(f"| {row['name']} | {row['kind']} | {row['prediction']} | {row['old_ms']:.3f} | {row['new_ms']:.3f} | "
                     f"{row['ratio']:.4f} ({low:.4f} to {high:.4f}) | {row['steps_each']} |")
    return lines


def _tunings(record: dict[str, Any]) -> list[str]:
    """The best settings of each attention kernel alone, by block size."""
    lines = ["", "Attention alone, microseconds a layer: the best (tile, warps, stages) at each block size, and the others tried.", "",
             "| kernel | block size | best | us | others tried, us |", "|---|---|---|---|---|"]
    for kernel in ("decode", "prefill"):
        rows = [row for row in record["sections"][f"tunings_{kernel}"]["value"] if "us" in row and not row.get("head_major")]
        for size in sorted({row.get("block_size", 16) for row in rows}):
            ranked = sorted((row for row in rows if row.get("block_size", 16) == size), key=lambda row: float(row["us"]))
            rest = "; ".join(f"{tuple(row['tuning'])} {row['us']:.1f}" for row in ranked[1:])
            lines.append(f"| {kernel} | {size} | {tuple(ranked[0]['tuning'])} | {ranked[0]['us']:.1f} | {rest} |")
    return lines


def _steps(record: dict[str, Any]) -> list[str]:
    """The split by kernel, in microseconds, of the decode steps and, where it was run, the mixed one."""
    steps = [(f"decode, {row['rows']} rows", row) for row in record["sections"]["decode"]["value"]]
    decodes = len(steps)
    if mixed := record["sections"].get("mixed", {}).get("value"):
        steps.append((f"mixed, {mixed['tokens']} tokens", mixed))
    longest = steps[-1][1]["us_by_kind"]
    kinds = sorted({kind for _, row in steps for kind in row["us_by_kind"]}, key=lambda kind: (-longest.get(kind, 0), kind))
    floors = {row["rows"]: row["median_ms"] for row in record["sections"]["floors"]["value"]["linears"]}
    read = statistics.median(record["sections"]["floors"]["value"]["bandwidth"]["read_bytes_per_s"])
    lines = ["",
             "Microseconds a step (profiler); the whole step from events. Decode contexts average "
             f"{steps[0][1].get('context', 'unrecorded')} tokens.",
             "Floors of the same process: cuBLAS alone on all linears and the head, in a graph; keys and values at",
             f"{read / 1e12:.2f} TB/s, its read rate.", "",
             "| | " + " | ".join(name for name, _ in steps) + " |", "|---|" + "---|" * len(steps)]
    lines += [f"| {kind} | " + " | ".join(f"{row['us_by_kind'].get(kind, 0):.0f}" for _, row in steps) + " |" for kind in kinds]
    lines.append("| **whole step, ms** | " + " | ".join(f"{row['median_ms']:.3f}" for _, row in steps) + " |")
    cublas = [floors[row["rows"]]["all_and_head"] for _, row in steps[:decodes]]
    cublas += [floors[2048]["all"]] if mixed else []
    lines.append("| floor: cuBLAS, ms | " + " | ".join(f"{ms:.3f}" for ms in cublas) + " |")
    token = 36 * 2 * 8 * 128 * 2
    if all("context" in row for _, row in steps[:decodes]):
        lines.append("| floor: reading keys and values, ms | "
                     + " | ".join(f"{row['rows'] * row['context'] * token / read * 1e3:.3f}" for _, row in steps[:decodes])
                     + (" | |" if mixed else " |"))
    return lines


def _workload(record: dict[str, Any]) -> list[str]:
    """W's passes."""
    lines = ["", "W: 128 requests of about 1,030 prompt tokens, 128 outputs each, 32 in flight, 2,048 tokens a step, bf16, Qwen3-4B's",
             "shape with random weights, through the engine's loop and the harness's client; one warm-up pass before.", "",
             "| mode | total tok/s | mean TTFT, ms | mean TPOT, ms | ITL p50 / p95, ms | steps, mixed, replayed |",
             "|---|---|---|---|---|---|"]
    for name, section in record["sections"].items():
        if not name.startswith("w_"):
            continue
        for row in section["value"]["passes"]:
            lines.append(
                f"| {name.removeprefix('w_')} | {row['total_tok_s']:.0f} | {row['mean_ttft_ms']:.1f} | {row['mean_tpot_ms']:.3f} | "
                f"{row['itl_p50_ms']:.2f} / {row['itl_p95_ms']:.2f} | {row['steps']}, {row['mixed_steps']}, {row['graph_replays']} |")
    return lines


def main(arguments: list[str]) -> int:
    """The command line."""
    if len(arguments) < 2:
        print("usage: python -m tools.bench.levers PAGE.md STEP_TIME.json ...", file=sys.stderr)
        return 64
    records = {source: json.loads(Path(source).read_bytes()) for source in arguments[1:]}
    Path(arguments[0]).write_text(page(records), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
