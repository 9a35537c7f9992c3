"""Rates of one card that bound an engine: copies, reads, matrix products, the linears of Qwen3-4B, graph replay, dependent launch.

Every time is from device events around replays or repeats after a warm-up, on random data; lists hold each repeat.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

GIB = 1 << 30
LAYERS = 36
HIDDEN = 2560
LINEARS = {"qkv": (6144, HIDDEN), "o": (HIDDEN, 4096), "gate_up": (19456, HIDDEN), "down": (HIDDEN, 9728)}
"""Qwen3-4B: (rows, columns) of each layer's merged weights, from its config.json: 32 query and 8 KV heads of 128, MLP 9728."""
HEAD = (151936, HIDDEN)
ROWS = (1, 8, 16, 32, 64, 256, 512, 1024, 1536, 2048)
HEAD_ROWS = (1, 8, 16, 32, 64)


def device_times(act: Callable[[], Any], repeats: int, warm: int = 3) -> list[float]:
    """Milliseconds of `repeats` runs of `act`, each between its own two events, submitted together after `warm` runs."""
    for _ in range(warm):
        act()
    torch.cuda.synchronize()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        act()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def captured(act: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """`act` as a CUDA graph, run once on a side stream first so that handles and workspaces exist."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        act()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        act()
    return graph


@triton.jit
def _read_kernel(source, sums, count, BLOCK: tl.constexpr, TILES: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), dtype=tl.int32)
    for tile in range(TILES):
        offsets = (program * TILES + tile) * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(source + offsets, mask=offsets < count, other=0)
    tl.store(sums + program, tl.sum(total))


def bandwidth(size: int = 4 * GIB) -> dict[str, Any]:
    """Device copy (bytes read and written) and read-only rates in bytes per second; the read's sum is checked against PyTorch's."""
    source = torch.randint(-1000, 1000, (size // 4,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    copies = device_times(lambda: target.copy_(source), 10)
    block, tiles = 4096, 16
    programs = triton.cdiv(source.numel(), block * tiles)
    sums = torch.empty(programs, dtype=torch.int32, device="cuda")
    reads = device_times(lambda: _read_kernel[(programs,)](source, sums, source.numel(), BLOCK=block, TILES=tiles, num_warps=8), 10)
    agree = int(sums.sum(dtype=torch.int64)) == int(source.sum(dtype=torch.int64))
    return {"bytes": size, "copy_bytes_per_s": [2e3 * size / ms for ms in copies], "read_bytes_per_s": [1e3 * size / ms for ms in reads],
            "read_sum_agrees": agree}


def transfers(size: int = GIB) -> dict[str, Any]:
    """Host to device and back, pinned and pageable, in bytes per second."""
    card = torch.empty(size, dtype=torch.uint8, device="cuda")
    out: dict[str, Any] = {"bytes": size}
    for kind in ("pageable", "pinned"):
        memory = torch.ones(size, dtype=torch.uint8, pin_memory=kind == "pinned")
        for name, act in (("host_to_device", lambda m=memory: card.copy_(m, non_blocking=True)),
                          ("device_to_host", lambda m=memory: m.copy_(card, non_blocking=True))):
            times = []
            for _ in range(4):
                torch.cuda.synchronize()
                start = time.perf_counter()
                act()
                torch.cuda.synchronize()
                times.append(time.perf_counter() - start)
            out[f"{name}_{kind}_bytes_per_s"] = [size / spent for spent in times[1:]]
    return out


def matmul(size: int = 8192) -> dict[str, Any]:
    """bf16 product of two square matrices, in floating-point operations per second."""
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    times = device_times(lambda: a @ b, 20, warm=5)
    rates = [2e3 * size**3 / ms for ms in times]
    return {"size": size, "flop_per_s": rates, "median_flop_per_s": statistics.median(rates)}


def linears() -> list[dict[str, Any]]:
    """cuBLAS on Qwen3-4B's linears: milliseconds of a CUDA graph that holds one kind of weight for all layers, and of one with everything.

    Each layer has weights of its own, so nothing comes from a cache that would not in a model.  `all` has the layers' four products in
    order, without the head; `all_and_head` the head behind them.
    """
    def random(rows: int, columns: int, scale: float) -> torch.Tensor:
        return torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda") * scale

    weights = {name: [random(*shape, 0.02) for _ in range(LAYERS)] for name, shape in LINEARS.items()}
    head = random(*HEAD, 0.02)
    out = []
    for rows in ROWS:
        inputs = {columns: random(rows, columns, 1.0) for columns in {shape[1] for shape in LINEARS.values()}}

        def run(names: tuple[str, ...], with_head: bool, inputs: dict[int, torch.Tensor] = inputs) -> None:
            for layer in range(LAYERS):
                for name in names:
                    torch.nn.functional.linear(inputs[LINEARS[name][1]], weights[name][layer])
            if with_head:
                torch.nn.functional.linear(inputs[HIDDEN], head)

        repeats = 30 if rows <= 64 else 10
        cases: dict[str, tuple[tuple[str, ...], bool]] = {**{name: ((name,), False) for name in LINEARS}, "all": (tuple(LINEARS), False)}
        if rows in HEAD_ROWS:
            cases |= {"head": ((), True), "all_and_head": (tuple(LINEARS), True)}
        graphs = {name: captured(partial(run, *case)) for name, case in cases.items()}
        times = {name: statistics.median(device_times(graph.replay, repeats)) for name, graph in graphs.items()}
        out.append({"rows": rows, "median_ms": times})
    return out


def graph_replay(nodes: int = 330) -> dict[str, Any]:
    """What replaying a graph of `nodes` tiny dependent kernels costs: host time of the call, and device time."""
    value = torch.zeros(1024, device="cuda")

    def chain() -> None:
        for _ in range(nodes):
            value.add_(1.0)

    graph = captured(chain)
    device = device_times(graph.replay, 50)
    host = []
    for _ in range(50):
        torch.cuda.synchronize()
        start = time.perf_counter()
        graph.replay()
        host.append((time.perf_counter() - start) * 1e3)
    eager = device_times(chain, 10)
    return {"nodes": nodes, "device_ms": statistics.median(device), "device_us_a_node": statistics.median(device) * 1e3 / nodes,
            "host_call_ms": statistics.median(host), "eager_ms": statistics.median(eager)}


@triton.jit
def _chain_kernel(source, target, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if DEPENDENT:
        gdc_wait()
    value = tl.load(source + offsets) + 1
    tl.store(target + offsets, value)
    if DEPENDENT:
        gdc_launch_dependents()


def dependent_launch(kernels: int = 300) -> dict[str, Any]:
    """Programmatic dependent launch in Triton under graph capture: microseconds a kernel of a dependent chain, with and without it.

    Two buffers are added to in turn, so a kernel that read before its predecessor wrote would give a wrong sum; `right` says none did.
    """
    programs, block = 132, 1024
    out: dict[str, Any] = {"kernels": kernels}
    for dependent in (False, True):
        buffers = [torch.zeros(programs * block, dtype=torch.int32, device="cuda") for _ in range(2)]

        def chain(dependent: bool = dependent, buffers: list[torch.Tensor] = buffers) -> None:
            for number in range(kernels):
                _chain_kernel[(programs,)](buffers[number % 2], buffers[1 - number % 2], BLOCK=block, DEPENDENT=dependent,
                                           num_warps=4, launch_pdl=dependent)

        graph = captured(chain)
        times = device_times(graph.replay, 50)
        buffers[0].zero_()
        graph.replay()
        torch.cuda.synchronize()
        out["with" if dependent else "without"] = {
            "us_a_kernel": statistics.median(times) * 1e3 / kernels,
            "right": bool((buffers[kernels % 2] == kernels).all()),
        }
    return out
