"""What a step of the engine costs on one card, split by kernel, beside the limits measured in the same process; and W end to end.

    python -m tools.bench.step_time OUT [--commit HASH] [--only SECTION ...] [--passes N]

A checkpoint of Qwen3-4B's shape is drawn on the card (make_checkpoint's scales, another generator: other values, same sensitivity) and
loaded by the engine.  Steps are timed by events, decode steps as the graphs that serve them.  OUT/step_time.json grows section by section;
a section that fails holds its error.  Nothing here runs the pin: its figures are of other runs and say nothing against these.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.api import LLM, SamplingParams
from engine.kernels import attention_decode_triton as decode_kernel
from engine.kernels import attention_prefill_triton as prefill_kernel
from engine.kernels.slots import LENGTH
from engine.kv_cache import BlockPool
from engine.loop import Loop
from engine.runner import CardRunner
from engine.scheduler import Scheduler, Step
from harness.analysis.metrics import leg_metrics
from legs.client import closed_loop
from legs.drivers.engine import EngineArm, code_sha256
from legs.protocol import read_corpus, to_gzip, to_json
from tools.bench import levers, platform_gpu
from tools.bench.gpu_tests import device
from tools.bench.make_checkpoint import SEED, SHAPES, config, tensors
from tools.bench.qwen3_5_shape import Draw

SHAPE = "qwen3-4b"
OPTIONS: dict[str, Any] = {
    "device": "cuda", "dtype": "bfloat16", "max_num_batched_tokens": 2048, "max_num_seqs": 32, "max_model_len": 4096, "num_blocks": 8192,
}
PARAMS = SamplingParams(max_tokens=128, min_tokens=128, ignore_eos=True)
CONTEXT, REPLAYS, ROWS = 1094, 200, (8, 16, 32)
KINDS = {
    "_decode_kernel": "attention, decode", "_prefill_kernel": "attention, prefill", "_place_kernel": "qk-norm, RoPE, KV write",
    "_norm_kernel": "add, RMSNorm", "_silu_mul_kernel": "SiLU-mul", "_slice_kernel": "argmax", "_row_kernel": "argmax",
    "_begin_kernel": "begin, advance", "_advance_kernel": "begin, advance", "_few_kernel": "linears (ours)", "gemm": "linears (cuBLAS)",
    "nvjet": "linears (cuBLAS)", "cutlass": "linears (cuBLAS)", "splitk": "linears (cuBLAS)", "cublas": "linears (cuBLAS)",
}


def write_checkpoint(folder: Path) -> float:
    """Draw and write the checkpoint; seconds."""
    from safetensors.torch import save_file

    began = time.monotonic()
    generator = torch.Generator("cuda").manual_seed(SEED)

    def draw(size: tuple[int, ...], std: Draw) -> torch.Tensor:
        assert isinstance(std, float)  # a dense model has nothing drawn from a range
        if std < 0:
            return torch.full(size, -std, dtype=torch.bfloat16)
        return (torch.randn(size, generator=generator, device="cuda") * std).bfloat16().cpu()

    save_file({name: draw(size, std) for name, size, std in tensors(SHAPES[SHAPE])}, folder / "model.safetensors")
    (folder / "config.json").write_bytes(to_json(config(SHAPES[SHAPE])))
    return time.monotonic() - began


def fresh(llm: LLM) -> LLM:
    """The same weights and cache with nothing scheduled and no slot taken."""
    llm.blocks = BlockPool(llm.resolved["num_blocks"], llm.resolved["block_size"])
    llm.scheduler = Scheduler(llm.resolved["max_num_batched_tokens"], llm.resolved["max_num_seqs"], llm.blocks)
    llm.loop = Loop(llm.scheduler, llm.runner, llm.resolved["depth"])
    llm._open.clear()
    return llm


def fill(llm: LLM, rows: int) -> None:
    """Bring `rows` requests of random ids into decoding, with keys and values of more tokens than any measurement reads."""
    generator = torch.Generator().manual_seed(rows)
    params = SamplingParams(max_tokens=REPLAYS, min_tokens=REPLAYS, ignore_eos=True)
    length = CONTEXT + REPLAYS
    for number in range(rows):
        ids: list[int] = torch.randint(1000, 150_000, (length,), generator=generator).tolist()
        llm.add_request(f"fill-{number}", ids, params)
    while any(request.computed <= length for request in (*llm.scheduler.running, *llm.scheduler.waiting)):
        llm.step()
    torch.cuda.synchronize()


def rewind(llm: LLM, length: int) -> None:
    """Set every slot back (or on) to `length` tokens."""
    assert isinstance(llm.runner, CardRunner)
    llm.runner.state[:, LENGTH] = length


def split(act: Callable[[], Any], repeats: int) -> dict[str, Any]:
    """Microseconds of one `act` by kind of kernel, from the profiler; kinds by KINDS, the rest under its own name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as told:
        for _ in range(repeats):
            act()
        torch.cuda.synchronize()
    kinds: dict[str, float] = defaultdict(float)
    names: dict[str, list[float]] = {}
    for event in told.key_averages():
        spent, name = float(event.device_time_total), event.key
        kinds[next((kind for word, kind in KINDS.items() if word in name.lower()), "other")] += spent / repeats
        names[name[:120]] = [spent / repeats, event.count / repeats]
    return {"us_by_kind": dict(kinds), "us_and_count_by_name": dict(sorted(names.items(), key=lambda one: -one[1][0])[:24])}


def decode_steps(llm: LLM) -> list[dict[str, Any]]:
    """Replays of the decode graph whose context averages CONTEXT; the split by kernel is of replays around it."""
    out = []
    for rows in ROWS:
        fill(fresh(llm), rows)
        run = partial(llm.runner.graphs.run, rows, llm.runner._decode)  # type: ignore[union-attr]
        rewind(llm, CONTEXT - REPLAYS // 2)
        times = platform_gpu.device_times(run, REPLAYS, warm=5)
        rewind(llm, CONTEXT - 5)
        out.append({"rows": rows, "replays": REPLAYS, "context": CONTEXT, "median_ms": statistics.median(times),
                    "quartiles_ms": statistics.quantiles(times), **split(run, 10)})
    return out


def mixed(llm: LLM) -> Step:
    """The step of the whole token budget that holds 30 decodes and the chunks of two new prompts."""
    fill(fresh(llm), 30)
    generator = torch.Generator().manual_seed(7)
    for number in range(2):
        ids: list[int] = torch.randint(1000, 150_000, (1030,), generator=generator).tolist()
        llm.add_request(f"new-{number}", ids, PARAMS)
    return llm.scheduler.schedule()


def mixed_step(llm: LLM) -> dict[str, Any]:
    """That step, launched again and again: it writes the same keys and values each time."""
    step = mixed(llm)
    launch = partial(llm.runner.launch, step)
    times = platform_gpu.device_times(launch, 20, warm=3)
    host = []
    for _ in range(10):
        torch.cuda.synchronize()
        began = time.perf_counter()
        launch()
        host.append(1e3 * (time.perf_counter() - began))
    torch.cuda.synchronize()
    return {"tokens": step.tokens, "chunks": [row.length for row in step.rows if row.length > 1], "decodes_at": CONTEXT + REPLAYS,
            "median_ms": statistics.median(times), "host_launch_ms": statistics.median(host), **split(launch, 5)}


def workload(llm: LLM, passes: int, out: Path, name: str) -> dict[str, Any]:
    """W through the engine's loop and the harness's client: one warm-up pass, then `passes`; raw traces go to a file of their own."""
    corpus = read_corpus(Path("legs/corpora/qwen3-4b.json.gz"))
    arm = EngineArm(fresh(llm), PARAMS)
    closed_loop(arm, corpus.prompts[:128], 32)
    rows, raw, ids = [], [], []
    for _ in range(passes):
        before = llm.counters()
        traces, outputs = closed_loop(arm, corpus.prompts[:128], 32)
        after = llm.counters()
        told = leg_metrics(traces)
        assert told.tpot is not None and told.itl is not None and told.itl.p95 is not None
        rows.append({
            "total_tok_s": told.total_throughput, "mean_ttft_ms": told.ttft.mean * 1e3, "mean_tpot_ms": told.tpot.mean * 1e3,
            "itl_p50_ms": told.itl.median * 1e3, "itl_p95_ms": told.itl.p95 * 1e3,
            **{key: after[key] - before[key] for key in ("steps", "mixed_steps", "graph_replays")}})
        raw.append([dataclasses.asdict(trace) for trace in traces])
        ids.append(outputs)
    (out / f"w-{name}.json.gz").write_bytes(to_gzip(to_json(raw)))
    varied = [len(set(output)) for output in ids[0]]
    return {"resolved": llm.resolved, "passes": rows, "same_ids": all(one == ids[0] for one in ids),
            "distinct_ids_per_output": {"least": min(varied), "median": statistics.median(varied)}}


DECODE_TUNINGS = ((32, 2, 4), (32, 2, 5), (32, 2, 6), (32, 2, 7), (32, 4, 6), (64, 2, 3), (64, 4, 3), (64, 4, 4))
PREFILL_TUNINGS = ((32, 4, 2), (32, 4, 3), (32, 4, 4), (64, 4, 2), (64, 4, 3), (64, 8, 2), (64, 8, 3), (64, 8, 4), (128, 8, 2), (128, 8, 3))
BLOCK_SIZES = (16, 32, 64)


def _attend_layers(
    query: torch.Tensor, cache: torch.Tensor, tables: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor, result: torch.Tensor,
    tuning: decode_kernel.Tuning,
) -> None:
    for layer in cache.unbind(0):
        decode_kernel.attention_decode(query, layer, tables, slots, lengths, result, query.shape[2] ** -0.5, tuning)


def decode_tunings() -> list[dict[str, Any]]:
    """Decode attention alone, 36 layers' worth in one graph, over tile sizes, warps and stages: microseconds a layer, bytes a second."""
    heads, kv_heads, dim, rows, layers = 32, 8, 128, 32, 12
    out = []
    for block_size in BLOCK_SIZES:
        width = -(-CONTEXT // block_size)
        cache = torch.randn(layers, 1 + rows * width, block_size, 2 * kv_heads, dim, dtype=torch.bfloat16, device="cuda")
        tables = (1 + torch.randperm(rows * width, device="cuda")).view(rows, width).int()
        query, result = (torch.randn(rows, heads, dim, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        slots, lengths = torch.arange(rows, device="cuda").int(), torch.full((rows,), CONTEXT, device="cuda").int()
        for tuning in DECODE_TUNINGS:
            layers_once = partial(_attend_layers, query, cache, tables, slots, lengths, result, decode_kernel.Tuning(*tuning))
            row: dict[str, Any] = {"block_size": block_size, "tuning": tuning}
            try:
                us = 1e3 * statistics.median(platform_gpu.device_times(platform_gpu.captured(layers_once).replay, 30)) / layers
                row |= {"us": us, "bytes_per_s": rows * CONTEXT * 2 * kv_heads * dim * 2 / us * 1e6}
            except Exception as error:  # one shape that does not fit must not end the rest
                row["error"] = repr(error)[:200]
            out.append(row)
    return out


def prefill_tunings() -> list[dict[str, Any]]:
    """Prefill attention alone on 2,048 tokens in chunks as W has them, over block and tile sizes, warps and stages."""
    heads, kv_heads, dim, longest = 32, 8, 128, 1040
    query, result = (torch.randn(2048, heads, dim, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    tiles, first, pairs = [], 0, 0
    for slot, (rows, begin) in enumerate(((40, 990), (1030, 0), (978, 0))):
        tiles += [(first + at, min(128, rows - at), begin + at, slot) for at in range(0, rows, 128)]
        first += rows
        pairs += sum(range(begin + 1, begin + rows + 1))
    tiles.sort(key=lambda tile: -(tile[1] + tile[2]))
    there = torch.tensor(tiles, dtype=torch.int32, device="cuda")
    out = []
    for block_size in BLOCK_SIZES:
        width = -(-longest // block_size)
        cache = torch.randn(1 + 3 * width, block_size, 2 * kv_heads, dim, dtype=torch.bfloat16, device="cuda")
        tables = (1 + torch.randperm(3 * width, device="cuda")).view(3, width).int()
        for tuning in PREFILL_TUNINGS:
            act = partial(prefill_kernel.attention_prefill, query, cache, tables, there, result, dim**-0.5, prefill_kernel.Tuning(*tuning))
            row: dict[str, Any] = {"block_size": block_size, "tuning": tuning}
            try:
                us = 1e3 * statistics.median(platform_gpu.device_times(act, 30))
                row |= {"us": us, "flop_per_s": 4 * heads * dim * pairs / us * 1e6}
            except Exception as error:  # one shape that does not fit must not end the rest
                row["error"] = repr(error)[:200]
            out.append(row)
    return out


def floors() -> dict[str, Any]:
    """The limits: read bandwidth, and cuBLAS on the linears, in this process."""
    return {"bandwidth": platform_gpu.bandwidth(2 * platform_gpu.GIB), "linears": platform_gpu.linears()}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: the number of sections that failed."""
    parser = argparse.ArgumentParser(prog="step_time", description="Time the engine's steps on one card.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--commit", help="commit of the code, where the machine has no repository")
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--passes", type=int, default=3)
    options = parser.parse_args(arguments)
    record: dict[str, Any] = {"schema": 1, "commit": options.commit, "code_sha256": code_sha256(Path(__file__).resolve().parents[2]),
                              **device(), "sections": {}}

    def section(name: str, act: Callable[[], Any]) -> Any:
        if options.only and name.partition("_")[0] not in options.only:
            return None
        began = time.monotonic()
        try:
            value, found = act(), None
        except Exception:
            value, found = None, traceback.format_exc()
            print(found, flush=True)
        torch.cuda.synchronize()
        record["sections"][name] = {"value": value, "error": found, "took_s": time.monotonic() - began}
        (options.out / "step_time.json").write_bytes(to_json(record))
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
        return value

    section("tunings_decode", decode_tunings)
    section("tunings_prefill", prefill_tunings)
    section("floors", floors)
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as scratch:
        write_checkpoint(Path(scratch))
        torch.cuda.empty_cache()
        modes: dict[str, dict[str, Any]] = {"depth2": {"depth": 2}, "depth1": {"depth": 1}, "eager": {"depth": 2, "enforce_eager": True}}
        for name, extra in modes.items():
            began = time.monotonic()
            llm = LLM(scratch, **OPTIONS, **extra)
            torch.cuda.synchronize()
            record.setdefault("ready_s", {})[name] = time.monotonic() - began
            section(f"w_{name}", partial(workload, llm, options.passes if name == "depth2" else 1, options.out, name))
            if name == "depth2":
                section("decode", partial(decode_steps, llm))
                section("mixed", partial(mixed_step, llm))
                section("levers", partial(levers.measure, llm))
            del llm
            torch.cuda.empty_cache()
    return sum(one["error"] is not None for one in record["sections"].values())


if __name__ == "__main__":
    sys.exit(main())
