"""The host's own kernels, each against PyTorch's form of the same, as levers on whole steps of the engine.

    python -m tools.bench.cpu_kernels measure OUT.json [--rounds N] [--threads N] [--commit HASH]
    python -m tools.bench.cpu_kernels page docs/CPU.md OUT.json ...

Steps of SmolLM2 in float32: one of 2,048 prompt tokens (16 requests of 128), and decodes of 16 and 4 rows behind 128 tokens each.  A step
is launched again and again: it writes the same keys and values each time.  Old and new go in ABBA order, so a machine that others use
moves both; the record says how busy it was.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from engine.api import LLM, SamplingParams
from engine.kernels import dispatch, norm, place
from engine.kernels.cpu import binding
from engine.runner import Runner
from engine.scheduler import Step
from legs.drivers.engine import code_sha256, cpu_name
from legs.protocol import read_corpus, to_json
from tools.bench.checkpoint import MODELS
from tools.bench.levers import Lever, setting
from tools.bench.make_smollm2 import NAME

FEW = 64
"""Rows up to which W is read once; beyond, it is split for AMX or packed (linear.cpp)."""
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_num_batched_tokens": 2048, "max_model_len": 512, "depth": 1}
PROMPTS, DECODES, FEWER = "2,048 prompt tokens", "16 decodes", "4 decodes"


def never(*_: Any) -> bool:
    return False


def many_only(rows: int) -> bool:
    return rows > FEW


def few_only(rows: int) -> bool:
    return rows <= FEW


def swiglu_in_parts(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = dispatch.linear(x, gate_up).chunk(2, dim=-1)
    return dispatch.linear(F.silu(gate).mul_(up), down)


ROWS, PAGES, PLACE = "engine.kernels.cpu.binding:serves_rows", "engine.kernels.dispatch:reads_pages", "engine.kernels.dispatch:place_tokens"
NORM, GATED = "engine.kernels.dispatch:add_rms_norm", "engine.kernels.dispatch:swiglu"
AMX = "Products of many rows on AMX, float32 as three bfloat16 parts"
PANELS = "Products of many rows in packed panels, two vectors of tokens to each weight"
ONCE = "Products of few rows: each weight read once, tokens as lanes"
READ = "Attention reads the paged cache where it lies, decodes and chunks in one call"
ADDED, PLACED = "RMSNorm with its add in one pass", "Rotation and cache write in one pass"
WALKED = "engine.kernels.dispatch:serves_layers"
WHOLE = "All layers in one call, over memory that is kept"
OPENED = "SwiGLU's gates opened as the product is stored"
LEVERS = (
    Lever(AMX, PROMPTS, "0.4: 5 of 6 products at 16 times AVX-512's rate, and what is read and written", ROWS, few_only,
          binding.serves_rows, "Kept, well short of the prediction: memory is suspected, which products alone do not wait for."),
    Lever(PANELS, PROMPTS, "1.0: both within a tenth of what the cores can multiply", ROWS, few_only, binding.serves_rows, ""),
    Lever(ONCE, DECODES, "0.65: 40 ms of weights at memory's rate against 62", ROWS, many_only, binding.serves_rows, "Kept."),
    Lever(ONCE, FEWER, "0.6", ROWS, many_only, binding.serves_rows, "Kept."),
    Lever(READ, PROMPTS, "0.95: no gather, no copy of keys for a group's heads", PAGES, never, dispatch.reads_pages, "Kept."),
    Lever(READ, DECODES, "0.8: 118 MB of keys and values are read once and not copied first", PAGES, never,
          dispatch.reads_pages, "Kept."),
    Lever(ADDED, PROMPTS, "0.97: a pass over 4.7 MB less, 60 times", NORM, norm.add_rms_norm_reference, dispatch.add_rms_norm,
          "No difference; kept for decodes."),
    Lever(ADDED, DECODES, "0.98: 60 calls instead of 120", NORM, norm.add_rms_norm_reference, dispatch.add_rms_norm, "Kept."),
    Lever(PLACED, PROMPTS, "0.95: seven passes over queries and keys become one", PLACE, place.place_reference,
          dispatch.place_tokens, "Kept."),
    Lever(PLACED, DECODES, "0.97: 30 calls instead of 300", PLACE, place.place_reference, dispatch.place_tokens,
          "Hardly a difference; kept for prompts."),
    Lever(OPENED, PROMPTS, "0.9: 25 MB less written and read in each layer", GATED, swiglu_in_parts, dispatch.swiglu, "Kept."),
    Lever(OPENED, DECODES, "0.98: two calls less in each layer", GATED, swiglu_in_parts, dispatch.swiglu,
          "Kept for prompts; here as predicted."),
    Lever(WHOLE, PROMPTS, "0.85: 31,000 page faults less, 0.15 s of the system's time", WALKED, never, dispatch.serves_layers, "Kept."),
    Lever(WHOLE, DECODES, "0.9: 270 calls become one, 15 us each", WALKED, never, dispatch.serves_layers, "Kept."),
)


def is_here(lever: Lever) -> bool:
    """Whether the lever moves anything on this processor: many rows go one of two ways."""
    amx = (binding.backend() or "").startswith("amx")
    return lever.name != (PANELS if amx else AMX)


def steps(llm: LLM) -> dict[str, Step]:
    """The three steps, by name; none is given back to the scheduler."""
    prompts = read_corpus(Path("legs/corpora/smollm2.json.gz")).prompts
    params = SamplingParams(max_tokens=64, min_tokens=64, ignore_eos=True)
    for index, prompt in enumerate(prompts[:16]):
        llm.add_request(str(index), prompt, params)
    assert isinstance(llm.runner, Runner)
    first = llm.scheduler.schedule()
    llm.scheduler.update(first, llm.runner.collect(llm.runner.launch(first)))
    second = llm.scheduler.schedule()
    return {PROMPTS: first._replace(admitted=()), DECODES: second, FEWER: second._replace(rows=second.rows[:4])}


def abba(old: Callable[[], Any], new: Callable[[], Any], rounds: int) -> dict[str, Any]:
    """Milliseconds of each over `rounds` of old, new, new, old: least and median; and the median over rounds of new / old."""
    spent = []
    for act in (old, new) + (old, new, new, old) * rounds:
        began = time.perf_counter()
        act()
        spent.append(1e3 * (time.perf_counter() - began))
    found = [spent[i : i + 4] for i in range(2, len(spent), 4)]
    ratios = [(new_1 + new_2) / (old_1 + old_2) for old_1, new_1, new_2, old_2 in found]
    olds, news = [ms for one in found for ms in (one[0], one[3])], [ms for one in found for ms in one[1:3]]
    return {"old_ms": [min(olds), statistics.median(olds)], "new_ms": [min(news), statistics.median(news)],
            "ratio": statistics.median(ratios), "ratio_quartiles": statistics.quantiles(ratios), "steps_each": 2 * rounds}


def measure(threads: int, rounds: int, commit: str | None) -> dict[str, Any]:
    """The record."""
    llm = LLM(Path(MODELS, NAME), max_num_seqs=16, threads=threads, **OPTIONS)
    if binding.backend() is None:
        raise SystemExit("no kernels are compiled here; g++ and an x86-64 are needed")
    made = steps(llm)

    def launch(lever: Lever, value: Any) -> None:
        with setting(apart, never), setting(lever, value):
            llm.runner.launch(made[lever.kind])

    rows = []
    apart = LEVERS[-1]  # all other levers change one kernel of layers that are gone through one by one
    for lever in filter(is_here, LEVERS):
        busy, own, began = _busy(), time.process_time(), time.monotonic()
        count = max(2, rounds // 2) if lever.kind == PROMPTS else rounds
        found = abba(partial(launch, lever, lever.old), partial(launch, lever, lever.new), count)
        others = (_busy() - busy - time.process_time() + own) / (time.monotonic() - began)
        rows.append({"name": lever.name, "kind": lever.kind, "prediction": lever.prediction, **found, "other_busy_cores": max(0.0, others)})
        print(f"{lever.kind:20} {found['ratio']:.3f} {lever.name}", file=sys.stderr, flush=True)
    return {
        "device": cpu_name(), "cores": os.cpu_count(), "threads": threads, "torch": str(torch.__version__), "backend": binding.backend(),
        "commit": commit, "code_sha256": code_sha256(Path.cwd()), "finished": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", "levers": rows}


def _busy() -> float:
    """Core-seconds that all cores have spent on anything since the machine started."""
    fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    return sum(int(field) for index, field in enumerate(fields[:8]) if index not in (3, 4)) / os.sysconf("SC_CLK_TCK")


def page(records: dict[str, dict[str, Any]]) -> str:
    """docs/CPU.md from records by file name."""
    lines = [
        "# Kernels of the host", "",
        "Each of the engine's own CPU kernels (`engine/kernels/cpu/`) against PyTorch's form of the same, all else as it is: whole steps",
        "of SmolLM2-135M in float32, old and new in ABBA order. new / old is the median over rounds, with its quartiles; times are the",
        "least and the median. Where other work shared the cores, both sides met it: read the ratio, not the times.",
        "None of this compares with vLLM: that takes both arms in one series.", "",
        "Derived by `python -m tools.bench.cpu_kernels page` from the records named.",
    ]
    decisions = {(lever.name, lever.kind): lever.decision for lever in LEVERS}
    for source, record in records.items():
        code = f"commit {record['commit']}" if record["commit"] else f"code {record['code_sha256'][:12]}"
        where = f"{record['device']}, {record['cores']} cores, {record['threads']} threads, torch {record['torch']}, `{record['backend']}`"
        lines += ["", f"## `{source}`", "", f"{where}; {code}.", "",
                  "| lever | step | new / old expected | old, ms | new, ms | new / old | steps each | other work, cores | |",
                  "|---|---|---|---|---|---|---|---|---|"]
        for row in record["levers"]:
            low, _, high = row["ratio_quartiles"]
            (old, old_median), (new, new_median) = row["old_ms"], row["new_ms"]
            lines.append(
                f"| {row['name']} | {row['kind']} | {row['prediction']} | {old:.1f}, {old_median:.1f} | {new:.1f}, {new_median:.1f} | "
                f"{row['ratio']:.3f} ({low:.3f} to {high:.3f}) | {row['steps_each']} | {row['other_busy_cores']:.1f} | "
                f"{decisions.get((row['name'], row['kind']), '')} |")
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("act", choices=("measure", "page"))
    parser.add_argument("out", type=Path)
    parser.add_argument("records", type=Path, nargs="*")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--commit")
    given = parser.parse_args(arguments)
    if given.act == "measure":
        given.out.write_bytes(to_json(measure(given.threads, given.rounds, given.commit)))
    else:
        given.out.write_text(page({str(path): json.loads(path.read_bytes()) for path in given.records}), encoding="utf-8")


if __name__ == "__main__":
    main()
