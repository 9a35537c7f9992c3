"""A device's decode step as CUDA graphs, one for each padded number of rows: the host's work of a step is one launch.

Sizes as vLLM 0.26.0 captures them up to 32 rows: 1, 2, 4, then multiples of 8.  Padding rows write into the null block and read nothing,
so a row's result does not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def sizes_for(most_rows: int) -> tuple[int, ...]:
    """Padded sizes, ascending; the last one holds `most_rows`."""
    sizes = [1]
    while sizes[-1] < most_rows:
        sizes.append(sizes[-1] * 2 if sizes[-1] < 8 else sizes[-1] + 8)
    return tuple(sizes)


Decode = Callable[[int], None]
"""Queues the decode step of that many rows; it takes no other input than the device's memory."""


class DecodeGraphs:
    """Runs a decode step at the smallest size that holds the rows asked for, from a graph or, with `eager`, kernel by kernel."""

    def __init__(self, most_rows: int, eager: bool) -> None:
        self.sizes = sizes_for(most_rows)
        self.eager = eager
        self.replays = 0
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def prepare(self, decode: Decode) -> None:
        """Run each size once, which compiles kernels and makes workspaces, and capture it; memory of the graphs is shared."""
        pool = None
        for size in reversed(self.sizes):
            decode(size)
            if self.eager:
                continue
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                decode(size)
            pool = graph.pool()
            self._graphs[size] = graph

    def run(self, rows: int, decode: Decode) -> None:
        """Queue a decode step of `rows` rows on the current stream; `decode` is the one that was prepared."""
        size = next(size for size in self.sizes if size >= rows)
        if self.eager:
            decode(size)
        else:
            self._graphs[size].replay()
            self.replays += 1
