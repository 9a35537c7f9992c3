"""`parity near-tie DIR`: the oracle scores our own ids of a finished series, and its own, and each difference gets its name.

What it leaves is a sealed folder of its own beside the series (`evidence/near_ties.py`), from which the series' summary and report are
then made anew.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.analysis.near_tie import NearTieError
from harness.evidence import layout, store
from harness.evidence.near_ties import ORIGIN, OWN, RECORD, SAME, SCHEMA, SCORE, Task, folder_of, make_task, read_record, to_record
from harness.evidence.schema import Leg, Series, load_series
from harness.leg.launch import start_leg
from harness.machine.identity import machine_record, repository_record
from harness.machine.lock import SeriesLock
from harness.oracle import Oracle, load_oracle, oracle_python, role_of
from harness.report.build import build_report
from harness.series.arms import foreign_paths, launch
from harness.series.model import check_model
from harness.series.plan import corpus_path
from harness.series.spec import Model
from harness.series.stage import stage
from legs.protocol import (
    PROTOCOL,
    RESULT,
    SCORE_PHASE,
    SCORES,
    LegRequest,
    ScoreJob,
    check_result,
    read_corpus,
    read_scores,
    sha256,
    to_json,
    write_atomic,
    write_jobs,
    write_request,
)

TIMES_LONGER = 10
"""How many time limits of a series' leg the scoring leg has: it does the work several times over, one request at a time."""
BAND_REQUESTS = 32
"""Of how many of the first requests the oracle's jitter is taken: thousands of positions; all would cost minutes of decoding one by one."""
POLL_S = 0.5


def near_tie(
    root: Path, path: Path, out: Path | None, lock_path: Path, lock_timeout_s: float | None, console: Console
) -> tuple[Path, dict[str, Any]]:
    """Score a sealed series' outputs with its own oracle, unless a record is there already; returns (folder, judgement).

    With the record beside the series, its summary, report and plots are made anew; nothing else in it is touched.  Raises
    :class:`NearTieError` for a series without both sides or an oracle that cannot judge, BrokenSeal, EvidenceError, ModelError,
    OracleError and LockError.
    """
    store.check_seal(path)
    series = load_series(path)
    folder = (out or folder_of(path)).absolute()
    if not folder.exists():
        _score(root, series, path.name, folder, SeriesLock(lock_path, f"parity near-tie {path.name}"), lock_timeout_s, console)
    found = read_record(folder, series)
    if folder.resolve() == folder_of(path):
        verdict = build_report(path)["verdict"]
        console.print(f"{path.name}: summary.json, report.md and plots made anew with it; the verdict is {verdict}", highlight=False)
    return folder, found


def make_jobs(task: Task) -> list[ScoreJob]:
    """The oracle's own ids of the first requests in both forms and, where the series runs several at once, both batch sizes; then its own
    ids of the series' batch size, and ours, scored alike."""
    few = min(BAND_REQUESTS, len(task.prompts))
    jobs = [ScoreJob(name="decode-1", form="decode", batch=1, requests=few)]
    sizes = sorted({1, task.batch})
    jobs += [ScoreJob(name=f"decode-{size}", form="decode", batch=size, requests=few) for size in sizes[1:]]
    jobs += [ScoreJob(name=f"prefill-{size}", form="prefill", batch=size, follow="decode-1", requests=few) for size in sizes]
    jobs.append(ScoreJob(name=OWN, form="prefill", batch=1, follow=f"decode-{task.batch}", requests=few))
    return jobs + [ScoreJob(name=name, form="prefill", batch=1, ids=ids) for name, ids in task.ours.items()]


def _score(
    root: Path, series: Series, name: str, folder: Path, lock: SeriesLock, lock_timeout_s: float | None, console: Console
) -> None:
    """Run the scoring leg of a series' oracle into a new sealed record."""
    plan = series.plan
    arm, leg = _oracle_arm(series)
    oracle = load_oracle(arm["oracle"], root)
    oracle_python(oracle, root)
    model, model_record = check_model(root, Model(**plan["model"]))
    corpus = read_corpus(root / corpus_path(plan["workload"]["corpus"]), plan["workload"]["corpus_sha256"])
    eos = eos_ids(model)
    task = make_task(series, corpus.prompts, eos)
    request = _request(plan, arm, task)
    lock.acquire(lock_timeout_s)
    try:
        store.create_series(folder)
        origin = {
            "schema": SCHEMA, "series": {"name": name, "head": series.head}, "model": model_record["sha256"], "eos_ids": eos,
            "arm": arm["name"], "machine": machine_record(), "repository": repository_record(root), "lock": lock.record(),
        }
        console.print(f"{arm['name']}: {len(make_jobs(task))} scorings of {len(task.prompts)} requests, some minutes", highlight=False)
        result = run_scoring(root, folder, arm, oracle, model, request, make_jobs(task), lock, TIMES_LONGER * plan["leg_timeout_s"])
        origin["role"], _ = role_of(oracle, result)
        _same_oracle(leg, result)
        write_atomic(folder / ORIGIN, to_json(origin))
        found = to_record(task, read_scores(folder / SCORE), result, origin)
        write_atomic(folder / RECORD, to_json(found))
        store.record(folder, store.unrecorded(folder))
        store.seal(folder)
        shutil.rmtree(folder / layout.UNPACKED)
    finally:
        lock.release()


def run_scoring(
    root: Path, folder: Path, arm: Mapping[str, Any], oracle: Oracle | None, model: Path, request: LegRequest, jobs: Sequence[ScoreJob],
    lock: SeriesLock, timeout_s: float,
) -> dict[str, Any]:
    """Run one leg of phase `score` in FOLDER/score, from a staged copy and under a guard, and return its result.

    Raises :class:`NearTieError` when it did not do what was asked; its words are in FOLDER/logs.
    """
    staged, _ = stage(root, arm["driver"], folder, request.corpus)
    command = launch(arm, staged, model, oracle, root)
    leg, logs = folder / SCORE, folder / layout.LOGS
    leg.mkdir()
    logs.mkdir()
    write_request(leg, request)
    write_jobs(leg, jobs)
    process = start_leg(command.argv, command.environment, leg, lock.fd, timeout_s, record=leg / layout.GUARD,
                        stdout=logs / "stdout.log", stderr=logs / "stderr.log")
    try:
        while process.wait(POLL_S) is None:
            lock.verify()
    except BaseException:
        process.terminate()
        raise
    if not (leg / RESULT).is_file():
        reason = json.loads((leg / layout.GUARD).read_bytes())["reason"]
        said = [line for line in (logs / "stderr.log").read_text(errors="replace").splitlines() if line.strip()] or ["nothing"]
        raise NearTieError(f"the scoring leg left no result ({reason}); it said: {said[-1].strip()[:300]} ({folder.name}/logs)")
    result: dict[str, Any] = json.loads((leg / RESULT).read_bytes())
    check_result(result, request)
    if sha256((leg / SCORES).read_bytes()) != result["files"].get(SCORES):
        raise NearTieError(f"{SCORES}: its hash is not the one in {RESULT}")
    if outside := foreign_paths(result["sys_path"]):
        raise NearTieError(f"the arm could import from outside its stage: {Path(outside[0]).name}")
    if wrong := [option for option, value in request.options.items() if result["resolved"].get(option) != value]:
        raise NearTieError(f"option {wrong[0]}: declared {request.options[wrong[0]]!r}, resolved {result['resolved'].get(wrong[0])!r}")
    return result


def eos_ids(model: Path) -> list[int]:
    """End-of-sequence ids of a checkpoint: those of generation_config.json, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        value = json.loads((model / name).read_bytes()).get("eos_token_id") if (model / name).is_file() else None
        if value is not None:
            return sorted(value) if isinstance(value, list) else [value]
    return []


def _oracle_arm(series: Series) -> tuple[dict[str, Any], Leg]:
    """The oracle's arm in the plan and its first accepted leg."""
    for arm in series.plan["arms"]:
        legs = series.legs(arm["name"])
        if arm["oracle"] is not None and legs:
            return arm, legs[0]
    raise NearTieError("the series has no accepted leg of an oracle; near-ties need one")


def _request(plan: Mapping[str, Any], arm: Mapping[str, Any], task: Task) -> LegRequest:
    """The series' own sampling and options, only that prompt, ids and the one id that vLLM insists on generating must fit."""
    work, options = plan["workload"], dict(arm["options"])
    if options.get("max_model_len") is not None:
        options["max_model_len"] = max(options["max_model_len"], max(map(len, task.prompts)) + work["max_tokens"] + 1)
    return LegRequest(
        protocol=PROTOCOL, leg=SCORE, phase=SCORE_PHASE, arm=arm["name"], driver=arm["driver"], corpus=corpus_path(work["corpus"]),
        corpus_sha256=work["corpus_sha256"], requests=len(task.prompts), warmup_requests=0, max_tokens=work["max_tokens"],
        min_tokens=work["min_tokens"], ignore_eos=work["ignore_eos"], concurrency=task.batch, client="step", options=options,
    )


def _same_oracle(leg: Leg, result: Mapping[str, Any]) -> None:
    assert leg.result is not None
    for name in SAME:
        if (then := leg.result["who"].get(name)) != (now := result["who"].get(name)):
            raise NearTieError(f"the oracle is another than the series': {name} was {then!r}, is {now!r}; install that one again")
