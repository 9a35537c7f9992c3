"""A toy checkout: the real harness and client around a stand-in engine that answers at once, to test what the runner does.

Nothing here measures anything: claims about speed, memory or tokens come from real engines.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

from legs.protocol import sha256, to_gzip, to_json

ROOT = Path(__file__).resolve().parents[2]
LOCK_VARIABLE = "PARITY_LOCK"

DRIVER = '''"""A stand-in engine: request i answers i, i + 1, ... and says of itself what it was told."""

import os
import time

from legs.client import Delta
from legs.drivers.common import main


class Arm:
    def __init__(self, request):
        self.request, self.open = request, {}

    def submit(self, index, prompt):
        self.open[index] = [(index + k) % 50 for k in range(self.request.max_tokens)]

    def step(self):
        time.sleep(STEP_S)
        out = []
        for index, left in list(self.open.items()):
            out.append(Delta(index, [left.pop(0)], None if left else "length"))
            if not left:
                del self.open[index]
        return out

    def who(self):
        return {"name": "stand-in", "distribution": None, "version": "0", "commit": None, "packages": {}, "record_sha256": "0",
                "missing": []}

    def device(self):
        return {"kind": "cpu", "name": "none", "count": 1}

    def resolved(self):
        return {**self.request.options, "attention_backend": None}

    def counters(self):
        return {"steps": 0, "mixed_steps": 0, "preemptions": 0, "prefix_cache_queries": 0, "prefix_cache_hits": 0, "sampler_calls": {}}

    def pids(self):
        return [os.getpid()]

    def close(self):
        pass


def build(request, model, marks):
    marks("load_start")
    marks("loaded")
    # FAULT
    return Arm(request)


STEP_S = 0.002

if __name__ == "__main__":
    main(build)
'''

SPEC = """
schema = 1
name = "toy"
title = "A toy series"
[model]
name = "toy"
sha256 = "{model}"
made_by = "nothing"
[workload]
corpus = "toy"
corpus_sha256 = "{corpus}"
requests = 8
prompt_tokens = 128
max_tokens = 4
min_tokens = 4
ignore_eos = true
concurrency = 2
warmup_requests = 2
[phases]
memory = 0
performance = 2
[options]
dtype = "float32"
[arms.on]
driver = "engine"
[arms.on.options]
load = "direct"
[arms.off]
driver = "engine"
[arms.off.options]
load = "staged"
[limits]
leg_timeout_s = 60
[verdict]
primary = "total_throughput"
margin = 0.02
pairs = [["on", "off"]]
[correctness]
reference = "toy"
reference_sha256 = "{reference}"
arms = ["on", "off"]
"""


def checkout(folder: Path, fault: str = "", step_s: float = 0.002) -> Path:
    """A toy checkout in `folder`; returns its spec.  `fault` is put into the stand-in's build step."""
    for package, left_out in (("harness", ()), ("legs", ("corpora", "references", "series")), ("engine", ())):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", *left_out))
    driver = DRIVER.replace("# FAULT", fault or "pass").replace("STEP_S = 0.002", f"STEP_S = {step_s}")
    (folder / "legs" / "drivers" / "engine.py").write_text(driver, encoding="utf-8")
    prompts = [[(7 * i + k) % 50 for k in range(16)] for i in range(8)]
    corpus = to_gzip(json.dumps({
        "name": "toy", "source": "counted", "vocab_size": 50, "prompts": prompts, "warmup": [[49 - i] * 16 for i in range(2)],
    }).encode())
    model = folder / ".models" / "toy"
    model.mkdir(parents=True)
    (model / "weights").write_bytes(b"none")
    files = [{"path": "weights", "bytes": 4, "sha256": sha256(b"none")}]
    digest = hashlib.sha256(to_json(files)).hexdigest()
    (model / "checkpoint.json").write_bytes(to_json({"name": "toy", "files": files, "sha256": digest}))
    reference = to_gzip(json.dumps({
        "corpus_sha256": sha256(corpus), "checkpoint_sha256": digest, "ids": {str(i): [(i + k) % 50 for k in range(4)] for i in range(4)},
    }).encode())
    for name, data in (("corpora", corpus), ("references", reference)):
        (folder / "legs" / name).mkdir()
        (folder / "legs" / name / "toy.json.gz").write_bytes(data)
    spec = folder / "toy.toml"
    spec.write_text(SPEC.format(model=digest, corpus=sha256(corpus), reference=sha256(reference)), encoding="utf-8")
    return spec


def command(root: Path, *arguments: str | Path) -> tuple[list[str], dict[str, str]]:
    """(argv, environment) of the toy checkout's own `parity`, with a lock of its own."""
    environment = {**os.environ, "PYTHONPATH": str(root), LOCK_VARIABLE: str(root / "lock")}
    return [sys.executable, "-P", "-m", "harness.cli", *map(str, arguments)], environment
