"""A small valid spec as text, and ways to bend it."""

from __future__ import annotations

from pathlib import Path

TEXT = """
schema = 1
name = "toy"
title = "A toy series"

[model]
name = "toy"
sha256 = "00"
made_by = "tools/bench/make_checkpoint.py"

[workload]
corpus = "toy"
corpus_sha256 = "11"
requests = 8
prompt_tokens = 80
max_tokens = 4
min_tokens = 4
ignore_eos = true
concurrency = 2
warmup_requests = 2

[phases]
memory = 3
performance = 3

[options]
dtype = "float32"
threads = 2

[arms.on]
driver = "engine"
[arms.on.options]
load = "direct"

[arms.off]
driver = "engine"
[arms.off.options]
load = "staged"

[arms.pin]
driver = "vllm"
oracle = "vllm-toy"

[limits]
leg_timeout_s = 60

[verdict]
primary = "total_throughput"
margin = 0.02
pairs = [["on", "pin"], ["off", "pin"], ["on", "off"]]
"""


def write_spec(folder: Path, *changes: tuple[str, str]) -> Path:
    """The toy spec with each (old, new) replaced; every `old` must be there."""
    text = TEXT
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new, 1)
    path = folder / "toy.toml"
    path.write_text(text, encoding="utf-8")
    return path
