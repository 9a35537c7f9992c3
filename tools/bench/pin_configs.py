"""Which configuration of the pinned vLLM is the fastest on one card?  Runs workload W under each and keeps every stamp.

    python -m tools.bench.pin_configs run OUT --site SITE --corpus CORPUS     # on the machine; writes OUT/pin-NAME.json.gz as it goes
    python -m tools.bench.pin_configs table FOLDER                            # anywhere; derives pin_configs.json and pin_configs.md

Each configuration is a process of its own: start, one warm-up pass of W, then the measured passes.  Compile caches are filled first, all
distinct ones at once, so that every start after that is a warm one.  The model has Qwen3-4B's shape and weights that vLLM makes up
(`load_format=dummy`): right for speed, meaningless as text.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from legs.client import Delta, closed_loop
from legs.drivers.vllm import WorkerProbe
from legs.protocol import read_corpus, sha256, to_gzip, to_json
from tools.bench.checkpoint import file_sha256

REQUESTS, CONCURRENCY, OUTPUT_TOKENS = 128, 32, 128
W = {
    "dtype": "bfloat16", "max_num_batched_tokens": 2048, "max_num_seqs": CONCURRENCY, "max_model_len": 4096,
    "enable_prefix_caching": False, "load_format": "dummy", "skip_tokenizer_init": True, "seed": 0,
}
"""Engine arguments of every configuration, as vLLM names them."""

LARGE_CAPTURES = [1, 2, 4, *range(8, 65, 8), 128, 256, 512, 1024, 1536, 2048]
"""vLLM's own sizes for 32 sequences, and sizes of mixed steps up to the whole token budget."""

QWEN3_4B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560, "initializer_range": 0.02,
    "intermediate_size": 9728, "max_position_embeddings": 40960, "max_window_layers": 36, "num_attention_heads": 32,
    "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": True, "dtype": "bfloat16", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}
"""Published config.json of Qwen/Qwen3-4B."""

CODE = ("legs/client.py", "legs/protocol.py", "legs/drivers/vllm.py", "tools/bench/pin_configs.py")
RESERVE_S = 12.0
"""Time kept back from the deadline for ending processes and writing."""


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One way to run the pin: engine arguments on top of W, and whether the engine core has a process of its own."""

    name: str
    arguments: dict[str, Any]
    core_process: bool = True


CONFIGURATIONS = (
    Configuration("async-process", {"async_scheduling": True}),
    Configuration("async-inprocess", {"async_scheduling": True}, core_process=False),
    Configuration("sync-process", {"async_scheduling": False}),
    Configuration("async-process-captures", {"async_scheduling": True, "cudagraph_capture_sizes": LARGE_CAPTURES}),
    Configuration("sync-inprocess", {"async_scheduling": False}, core_process=False),
    Configuration("async-process-nostats", {"async_scheduling": True, "disable_log_stats": True}),
)
"""In the order they run, so that a run cut short has the ones that matter most.  All but the last keep vLLM's statistics on."""
NAMES = tuple(configuration.name for configuration in CONFIGURATIONS)
RAW_PREFIX = "pin-"

COMPILED = ("async-process", "async-process-captures")
"""Configurations whose compiled code differs: the others find theirs in one of these two's cache."""


FILL = {"gpu_memory_utilization": 0.35, "kv_cache_memory_bytes": 4 << 30}
"""Engine arguments while caches are filled side by side: no memory profiling, which a neighbour's allocations would upset."""


class PinProbe(WorkerProbe):
    """Mixed into vLLM's worker class: the driver's own settings, and the captured sizes."""

    def pin_probe(self) -> dict[str, Any]:
        config = self.vllm_config  # type: ignore[attr-defined]
        return {**self.parity_probe(), "cudagraph_capture_sizes": list(config.compilation_config.cudagraph_capture_sizes or []),
                "gpu_memory_utilization": config.cache_config.gpu_memory_utilization}


class Pin:
    """vLLM's LLMEngine as the closed loop's engine."""

    def __init__(self, model: Path, arguments: dict[str, Any], output_tokens: int) -> None:
        from vllm import EngineArgs, SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.llm_engine import LLMEngine

        probe = f"tools.bench.pin_configs.{PinProbe.__name__}"
        self.engine = LLMEngine.from_engine_args(EngineArgs(model=str(model), worker_extension_cls=probe, **arguments))
        self._sampling = SamplingParams(temperature=0.0, max_tokens=output_tokens, min_tokens=output_tokens, ignore_eos=True,
                                        detokenize=False, output_kind=RequestOutputKind.DELTA)
        self._submitted = 0

    def submit(self, index: int, prompt: Sequence[int]) -> None:
        from vllm import TokensPrompt

        self._submitted += 1
        self.engine.add_request(f"{self._submitted}-{index}", TokensPrompt(prompt_token_ids=list(prompt)), self._sampling)

    def step(self) -> list[Delta]:
        return [Delta(int(told.request_id.rpartition("-")[2]), told.outputs[0].token_ids, told.outputs[0].finish_reason)
                for told in self.engine.step()]

    def iterations(self) -> dict[str, int] | None:
        """Steps by the number of tokens vLLM's statistics count in them (a prompt counts at its last chunk); None without statistics."""
        with contextlib.suppress(AssertionError, AttributeError):
            for metric in self.engine.get_metrics():
                if metric.name == "vllm:iteration_tokens_total":
                    return {"count": metric.count, **metric.buckets}
        return None


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one configuration in this process; returns its raw record.  Stamps are CLOCK_MONOTONIC nanoseconds."""
    configuration = next(c for c in CONFIGURATIONS if c.name == name)
    corpus = read_corpus(options.corpus)
    prompts = corpus.prompts[: options.requests]
    import vllm

    imported = time.monotonic_ns()
    arguments = {"disable_log_stats": False, **W, **configuration.arguments, **json.loads(options.override)}
    pin = Pin(options.model, arguments, options.output_tokens)
    ready = time.monotonic_ns()
    record: dict[str, Any] = {
        "name": name, "vllm": vllm.__version__, "arguments": arguments, "core_process": configuration.core_process,
        "import_s": (imported - options.spawned_ns) / 1e9, "ready_s": (ready - options.spawned_ns) / 1e9,
        "resolved": pin.engine.collective_rpc("pin_probe")[0], "corpus": corpus.name, "corpus_sha256": file_sha256(options.corpus),
        "concurrency": options.concurrency, "output_tokens": options.output_tokens, "passes": [],
    }
    if options.passes:
        record["tree"] = machine_view()
        closed_loop(pin, prompts, options.concurrency)
    for _ in range(options.passes):
        before = pin.iterations()
        traces, outputs = closed_loop(pin, prompts, options.concurrency)
        after = pin.iterations()
        counted = None if before is None or after is None else {key: after[key] - before[key] for key in after}
        record["passes"].append({
            "traces": [dataclasses.asdict(trace) for trace in traces], "iterations": counted,
            "outputs_sha256": sha256(json.dumps(outputs).encode()),
        })
    record["card_after"] = card_state()
    with contextlib.suppress(AttributeError):
        pin.engine.engine_core.shutdown()
    return record


def card_state() -> dict[str, Any]:
    """One NVML reading, or the error that prevented it."""
    from tools.bench import platform_nvml

    told: dict[str, Any] = platform_nvml.attempt(lambda: platform_nvml.state(platform_nvml.handle()))
    return told


def machine_view() -> dict[str, Any]:
    """This process tree's PSS with the cost of reading it, and how NVML lists it."""
    from tools.bench import platform_host

    return {**platform_host.tree_pass(os.getpid()), "own_pid": os.getpid(), "card": card_state()}


def write_model(folder: Path) -> None:
    """config.json and generation_config.json of Qwen3-4B: all that `load_format=dummy` needs."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes(to_json(QWEN3_4B))
    (folder / "generation_config.json").write_bytes(to_json({"bos_token_id": 151643, "eos_token_id": [151645, 151643]}))


def environment(site: Path | None, core_process: bool) -> dict[str, str]:
    """What a configuration's process inherits: this one's, with the site folder and vLLM's switches."""
    path = os.pathsep.join(str(folder) for folder in (site, Path.cwd()) if folder)
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(core_process))}


def start(configuration: Configuration, out: Path, options: argparse.Namespace, passes: int, **override: Any) -> subprocess.Popen[bytes]:
    """Spawn one configuration in a session of its own; its log goes to `out` with the suffix .log."""
    command = [
        sys.executable, "-m", "tools.bench.pin_configs", "one", configuration.name, str(out), "--model", str(options.model),
        "--corpus", str(options.corpus), "--passes", str(passes), "--requests", str(options.requests),
        "--concurrency", str(options.concurrency), "--output-tokens", str(options.output_tokens),
        "--override", json.dumps({**json.loads(options.override), **override}), "--spawned-ns", str(time.monotonic_ns()),
    ]
    with out.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(command, env=environment(options.site, configuration.core_process), stdout=log, stderr=log,
                                start_new_session=True)


def finish(process: subprocess.Popen[bytes], seconds: float) -> str | None:
    """Wait for a configuration; None when it ended well, else what went wrong.  Ends whatever is left of its session."""
    try:
        code = process.wait(max(seconds, 1.0))
        return f"exit status {code}" if code else None
    except subprocess.TimeoutExpired:
        return f"no result after {seconds:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def settle(limit_s: float = 15.0) -> None:
    """Wait until the card holds less than 1 GiB again."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        memory = card_state().get("memory_v2")
        if not isinstance(memory, dict) or memory.get("used", 0) < 1 << 30:
            return
        time.sleep(0.25)


def run(options: argparse.Namespace) -> int:
    """Fill the compile caches, then every configuration that the deadline leaves room for; results appear in OUT one by one."""
    end = time.monotonic() + options.deadline_s - RESERVE_S
    options.out.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp())
    if options.model is None:
        options.model = scratch / "qwen3-4b-shape"
        write_model(options.model)
    common = {"schema": 1, "commit": options.commit, "code_sha256": {name: file_sha256(Path(name)) for name in CODE}}
    chosen = [c for c in CONFIGURATIONS if c.name in (options.only or NAMES)]
    failed = 0
    if not options.no_fill:
        fill([c for c in chosen if c.name in COMPILED], scratch, options, end)
    for configuration in chosen:
        left = end - time.monotonic()
        if left < options.least_s:
            print(f"{configuration.name}: not run, {left:.0f} s left", flush=True)
            continue
        settle()
        path = scratch / f"{configuration.name}.json"
        began = time.monotonic()
        problem = finish(start(configuration, path, options, options.passes), end - time.monotonic())
        record = json.loads(path.read_bytes()) if path.exists() else {"name": configuration.name, "error": f"{problem}", "passes": []}
        (options.out / f"{RAW_PREFIX}{configuration.name}.json.gz").write_bytes(to_gzip(to_json({**common, **record})))
        print(f"{configuration.name}: {problem or 'well'} in {time.monotonic() - began:.0f} s {brief(record)}", flush=True)
        if "error" in record:
            failed += 1
            print(tail(path.with_suffix(".log")), flush=True)
    return int(failed > 0)


def fill(configurations: Sequence[Configuration], scratch: Path, options: argparse.Namespace, end: float) -> None:
    """Start `configurations` all at once and end them when they are ready: their compiled code is then in the cache."""
    processes = {c.name: start(c, scratch / f"fill-{c.name}.json", options, 0, **FILL) for c in configurations}
    for name, process in processes.items():
        problem = finish(process, end - time.monotonic())
        path = scratch / f"fill-{name}.json"
        spent = json.loads(path.read_bytes())["ready_s"] if path.exists() else None
        print(f"filled the cache of {name}: ready after {spent} s with the others beside it; {problem or 'well'}", flush=True)
        if problem:
            print(tail(path.with_suffix(".log")), flush=True)


def brief(record: dict[str, Any]) -> str:
    """Start time and tokens per second of each pass, for the person watching."""
    rates = []
    for done in record["passes"]:
        tokens = sum(t["prompt_tokens"] + sum(n for _, n in t["stamps"]) for t in done["traces"])
        window = max(t["end_ns"] for t in done["traces"]) - min(t["submitted_ns"] for t in done["traces"])
        rates.append(f"{tokens / window * 1e9:.0f}")
    return f"(ready after {record.get('ready_s', 0):.1f} s; tok/s {' '.join(rates)})"


def tail(path: Path, size: int = 3000) -> str:
    """The end of a log."""
    return path.read_bytes()[-size:].decode(errors="replace") if path.exists() else ""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="pin_configs", description="Compare configurations of the pinned vLLM on workload W.")
    commands = parser.add_subparsers(dest="command", required=True)
    running, one = commands.add_parser("run", help="run the configurations"), commands.add_parser("one", help="run one here (used by run)")
    running.add_argument("out", type=Path)
    one.add_argument("name", choices=NAMES)
    one.add_argument("out", type=Path)
    for command in (running, one):
        command.add_argument("--model", type=Path, help="folder with a config.json (default: Qwen3-4B's, written by the program)")
        command.add_argument("--corpus", type=Path, default=Path("legs/corpora/qwen3-4b.json.gz"))
        command.add_argument("--passes", type=int, default=3)
        command.add_argument("--requests", type=int, default=REQUESTS)
        command.add_argument("--concurrency", type=int, default=CONCURRENCY)
        command.add_argument("--output-tokens", type=int, default=OUTPUT_TOKENS)
        command.add_argument("--override", default="{}", help="engine arguments as JSON, on top of everything")
    one.add_argument("--spawned-ns", type=int, required=True)
    running.add_argument("--site", type=Path, help="folder with the pin's packages")
    running.add_argument("--only", nargs="+", choices=NAMES)
    running.add_argument("--deadline-s", type=float, default=540.0)
    running.add_argument("--least-s", type=float, default=60.0, help="start no configuration with less time left")
    running.add_argument("--no-fill", action="store_true", help="the compile caches are filled already")
    running.add_argument("--commit", help="commit of the code, where the machine has no repository")
    table = commands.add_parser("table", help="derive the table from a folder of raw records")
    table.add_argument("folder", type=Path)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: 0, or 1 when a configuration failed."""
    options = parse(arguments)
    if options.command == "table":
        from tools.bench.pin_table import write_table

        return write_table(options.folder)
    if options.command == "run":
        return run(options)
    options.out.write_bytes(to_json(measure(options.name, options)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
