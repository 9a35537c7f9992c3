"""Does the oracle's own band still call planted faults wrong?  Our engine healthy and with each fault, judged as `parity near-tie` does.

    python -m tools.bench.near_tie_faults OUT.json [--series SPEC.toml] [--requests 4] [--ids 16] [--dtype float32]

SPEC.toml (default legs/series/quick.toml) names checkpoint, corpus, oracle and options.  The faults are those of the engine's own tests:
tests/engine/test_faults.py on the host, tests/engine/card_faults.py on a card, planted before graphs are captured.  One process serves
them all and ends, then one oracle scores it all.  The healthy engine must have no wrong output, each faulty one at least one.  Exit 0 when
that holds, 1 when not; the record says it either way.  Needs the spec's oracle and checkpoint, and the machine's lock.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.api import LLM, SamplingParams
from harness.analysis.near_tie import Mask
from harness.evidence.near_ties import SCORE, Task, to_record
from harness.machine.identity import machine_record, repository_record
from harness.machine.idle_rule import IdleLimits
from harness.machine.lock import SeriesLock, lock_path
from harness.near_tie import eos_ids, make_jobs, run_scoring
from harness.oracle import load_oracle, role_of
from harness.report.near_tie import lines
from harness.series.model import check_model
from harness.series.plan import corpus_path, make_plan
from harness.series.spec import load_spec
from legs.protocol import PROTOCOL, SCORE_PHASE, LegRequest, read_corpus, read_scores, to_json, write_atomic

Fault = Callable[[pytest.MonkeyPatch], None]
ROOT = Path(__file__).resolve().parents[2]
QUICK = Path("legs/series/quick.toml")
FAULTS = {"cpu": "tests.engine.test_faults", "cuda": "tests.engine.card_faults"}
"""Module of the faults by the device of a spec's options."""
CHUNK = {"cpu": 64, "cuda": 600}
"""Token budget of our engine: small enough that prompts are cut, since one fault lies in a prompt's second chunk."""
HEALTHY = "healthy"
NOT_OURS = ("enable_prefix_caching", "enable_chunked_prefill")
"""Options that a leg's driver checks and the engine does not have."""
TIMEOUT_S = 3600.0

Outputs = tuple[tuple[int, ...], ...]


def faults_of(device: str, dtype: str) -> list[Fault]:
    """The planted faults of a device; those of the host's float32 kernels only where these run."""
    found: list[Fault] = importlib.import_module(FAULTS[device]).FAULTS
    return [fault for fault in found if dtype == "float32" or not fault.__name__.startswith("reach_")]


def outputs_of(
    model: Path, prompts: Sequence[Sequence[int]], ids: int, options: Mapping[str, Any], faults: Sequence[Fault]
) -> dict[str, Outputs]:
    """Greedy ids of our engine, healthy and with each fault, end of sequence masked."""
    found = {}
    for fault in (None, *faults):
        with pytest.MonkeyPatch.context() as patch:
            if fault is not None:
                fault(patch)
            llm = LLM(model, **options)
            served = llm.generate(prompts, SamplingParams(max_tokens=ids, min_tokens=ids, ignore_eos=True))
            found[HEALTHY if fault is None else fault.__name__] = tuple(tuple(one.token_ids) for one in served)
        del llm
        gc.unfreeze()  # an engine on a card froze what it was made of
        gc.collect()
    return found


def judge_faults(
    root: Path, folder: Path, spec_path: Path, requests: int, ids: int, dtype: str | None, lock: SeriesLock
) -> dict[str, Any]:
    """Serve with and without faults, have the oracle of a spec score it all in FOLDER, and return the judgement."""
    spec, raw = load_spec(spec_path), spec_path.read_bytes()
    work = spec.workload
    names = {arm.oracle for arm in spec.arms.values() if arm.oracle}
    oracle = load_oracle(names.pop(), root)
    plan = make_plan(spec, raw, {oracle.name: oracle.environment}, 0, IdleLimits())
    arm, ours_arm = (next(one for one in plan["arms"] if bool(one["oracle"]) == wanted) for wanted in (True, False))
    changes = {} if dtype is None else {"dtype": dtype}
    arm = {**arm, "options": {**arm["options"], **changes}}
    device = ours_arm["options"].get("device", "cpu")
    faults = faults_of(device, arm["options"]["dtype"])
    model, model_record = check_model(root, spec.model)
    prompts = read_corpus(root / corpus_path(work.corpus), work.corpus_sha256).prompts[:requests]
    options = {name: value for name, value in ours_arm["options"].items() if name not in NOT_OURS} | changes | {
        "max_num_batched_tokens": CHUNK[device], "max_model_len": max(map(len, prompts)) + ids + 1}
    with multiprocessing.get_context("spawn").Pool(1) as child:  # what it held of a card's memory goes with it
        ours = child.apply(outputs_of, (model, prompts, ids, options, faults))
    batch = min(work.concurrency, requests)
    task = Task(prompts=prompts, ours=ours, legs={name: [name] for name in ours}, oracle={}, batch=batch,
                mask=Mask(ids=frozenset(eos_ids(model)), until=ids))
    request = LegRequest(
        protocol=PROTOCOL, leg=SCORE, phase=SCORE_PHASE, arm=arm["name"], driver=arm["driver"], corpus=corpus_path(work.corpus),
        corpus_sha256=work.corpus_sha256, requests=requests, warmup_requests=0, max_tokens=ids, min_tokens=ids, ignore_eos=True,
        concurrency=batch, client="step", options=arm["options"],
    )
    result = run_scoring(root, folder, arm, oracle, model, request, make_jobs(task), lock, TIMEOUT_S)
    scores = read_scores(folder / SCORE)
    batched = f"decode-{batch}"
    task = dataclasses.replace(task, oracle={batched: tuple(one.ids for one in scores[batched])})
    record = to_record(task, scores, result, {"series": None, "role": role_of(oracle, result)[0]})
    return record | {
        "model": model_record["sha256"], "machine": machine_record(), "repository": repository_record(root), "requests": requests,
        "ids": ids, "spec": spec.name, "device": result["device"], "options": options, "faults": [fault.__name__ for fault in faults],
        "missed": failures(record, [fault.__name__ for fault in faults]),
    }


def failures(record: Mapping[str, Any], faults: Sequence[str]) -> list[str]:
    """What the band should have said and did not; a fault that nobody served is not one that was caught."""
    wrong = {arm["legs"][0]: arm["wrong"] for arm in record["arms"]}
    missed = [f"{name}: no output is called wrong" for name in faults if not wrong.get(name)]
    return missed + ([f"{HEALTHY}: {wrong[HEALTHY]} outputs are called wrong"] if wrong[HEALTHY] else [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--series", type=Path, default=ROOT / QUICK)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--ids", type=int, default=16)
    parser.add_argument("--dtype", help="instead of the spec's")
    arguments = parser.parse_args()
    with SeriesLock(lock_path(None), "near_tie_faults") as lock, tempfile.TemporaryDirectory() as folder:
        lock.acquire(None)
        record = judge_faults(ROOT, Path(folder), arguments.series, arguments.requests, arguments.ids, arguments.dtype, lock)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(arguments.out, to_json(record))
    print("\n".join(lines(record)))
    print("\n".join(record["missed"]) or f"{HEALTHY}: none wrong; all {len(record['faults'])} planted faults called wrong")
    return 1 if record["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
