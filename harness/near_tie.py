"""`parity near-tie DIR`: the oracle scores our own ids of a finished series, and its own, and each difference gets its name.

The record is a sealed folder of its own beside the series, which it names by the head of its manifest:

    origin.json      what was judged and where: series, model, machine, code, the arm of the oracle, the lock
    stage/…          the staged code of the oracle's driver
    score/           the leg: request.json, score.json.gz, marks.jsonl, scores.json.gz, result.json, guard.json
    near_tie.json    the judgement, recomputed from the above whenever it is read
    manifest.jsonl   as of a series
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.analysis import near_tie as rule
from harness.analysis.near_tie import IDENTICAL, NEAR_TIE, WRONG, Mask, NearTieError
from harness.analysis.tokens import is_ours
from harness.evidence import layout, store
from harness.evidence.schema import Leg, Series, load_series
from harness.leg.launch import start_leg
from harness.machine.identity import machine_record, repository_record
from harness.machine.lock import SeriesLock
from harness.oracle import Oracle, load_oracle, oracle_python, role_of
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
    Scored,
    ScoreJob,
    check_result,
    read_corpus,
    read_request,
    read_scores,
    sha256,
    to_json,
    write_atomic,
    write_jobs,
    write_request,
)

SCHEMA = 1
ORIGIN, SCORE, RECORD = "origin.json", "score", "near_tie.json"
SUFFIX = "-near-tie"
TIMES_LONGER = 10
"""How many time limits of a series' leg the scoring leg has: it does the work several times over, one request at a time."""
BAND_REQUESTS = 32
"""Of how many of the first requests the oracle's jitter is taken: thousands of positions; all would cost minutes of decoding one by one."""
POLL_S = 0.5
SAME = ("name", "distribution", "version", "record_sha256", "packages")
"""What the scoring oracle must say of itself as the series' own oracle did."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Everything that a scoring needs, and that the judgement is computed from."""

    prompts: tuple[tuple[int, ...], ...]
    ours: dict[str, tuple[tuple[int, ...], ...]]
    """Distinct outputs of our arms by job name."""
    legs: dict[str, list[str]]
    """Which legs gave them."""
    oracle: dict[str, tuple[tuple[int, ...], ...]]
    """Outputs of the oracle's legs by leg name; divergences are told against the first."""
    batch: int
    mask: Mask


def near_tie(
    root: Path, path: Path, out: Path | None, lock_path: Path, lock_timeout_s: float | None, console: Console
) -> tuple[Path, dict[str, Any]]:
    """Score a sealed series' outputs with its own oracle, unless a record is there already; returns (folder, judgement).

    Raises :class:`NearTieError` for a series without both sides or an oracle that cannot judge, BrokenSeal, EvidenceError, ModelError,
    OracleError and LockError.
    """
    store.check_seal(path)
    series = load_series(path)
    folder = (out or path.with_name(path.name + SUFFIX)).absolute()
    if not folder.exists():
        _score(root, series, path.name, folder, SeriesLock(lock_path, f"parity near-tie {path.name}"), lock_timeout_s, console)
    return folder, read_record(folder, series)


def find_record(path: Path) -> dict[str, Any] | None:
    """The judgement that lies beside a series, recomputed from its evidence; None when there is none.  Raises as :func:`read_record`."""
    folder = path.with_name(path.name + SUFFIX)
    return read_record(folder, load_series(path)) if folder.is_dir() else None


def read_record(folder: Path, series: Series) -> dict[str, Any]:
    """The judgement of a sealed record, computed again from its scores and the series' outputs.

    Raises BrokenSeal, and :class:`NearTieError` when it was made for another series or says otherwise than its evidence.
    """
    if not store.is_sealed(folder):
        raise NearTieError(f"{folder.name}: a scoring that did not end, see its logs; remove the folder, or give --out for a new record")
    store.check_seal(folder)
    origin = json.loads((folder / ORIGIN).read_bytes())
    if origin["series"]["head"] != series.head:
        raise NearTieError(f"{folder.name}: was made for a series whose manifest ends in {origin['series']['head'][:12]}, this one ends in "
                           f"{series.head[:12]}; give --out for a new record")
    request = read_request(folder / SCORE)
    staged = next((folder / layout.STAGE).iterdir())
    task = make_task(series, read_corpus(staged / request.corpus, request.corpus_sha256).prompts, origin["eos_ids"])
    found = to_record(task, read_scores(folder / SCORE), json.loads((folder / SCORE / RESULT).read_bytes()), origin)
    if found != json.loads((folder / RECORD).read_bytes()):
        raise NearTieError(f"{folder.name}/{RECORD}: is not what its evidence gives")
    return found


def make_task(series: Series, prompts: Sequence[tuple[int, ...]], eos: Sequence[int]) -> Task:
    """What a series asks of its oracle.  Raises :class:`NearTieError` unless it has accepted legs of ours and of an oracle."""
    legs = [leg for arm in series.arms for leg in series.legs(arm)]
    oracle = {leg.name: leg.outputs for leg in legs if not is_ours(leg)}
    names: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    for leg in legs:
        if is_ours(leg):
            names.setdefault(leg.outputs, []).append(leg.name)
    if not oracle or not names:
        raise NearTieError(f"the series has {len(oracle)} accepted legs of an oracle and {sum(map(len, names.values()))} of ours; "
                           "near-ties need both")
    ours = {f"ours-{number}": outputs for number, outputs in enumerate(names, 1)}
    work = series.plan["workload"]
    return Task(
        prompts=tuple(prompts[: work["requests"]]), ours=ours, legs=dict(zip(ours, names.values(), strict=True)), oracle=oracle,
        batch=work["concurrency"], mask=Mask(ids=frozenset(eos), until=work["min_tokens"]),
    )


def make_jobs(task: Task) -> list[ScoreJob]:
    """The oracle's own ids of the first requests in both forms and, where the series runs several at once, both batch sizes; then ours."""
    few = min(BAND_REQUESTS, len(task.prompts))
    jobs = [ScoreJob(name="decode-1", form="decode", batch=1, requests=few)]
    sizes = sorted({1, task.batch})
    jobs += [ScoreJob(name=f"decode-{size}", form="decode", batch=size, requests=few) for size in sizes[1:]]
    jobs += [ScoreJob(name=f"prefill-{size}", form="prefill", batch=size, follow="decode-1", requests=few) for size in sizes]
    return jobs + [ScoreJob(name=name, form="prefill", batch=1, ids=ids) for name, ids in task.ours.items()]


def to_record(task: Task, scores: Mapping[str, Sequence[Scored]], result: Mapping[str, Any], origin: Mapping[str, Any]) -> dict[str, Any]:
    """The judgement as JSON: oracle self-agreement first, then the band and where it came from, then each request of ours."""
    sizes = sorted({1, task.batch})
    found = [rule.jitter(f"prefill against decode, batch {size}", scores, f"prefill-{size}", f"decode-{size}") for size in sizes]
    if len(sizes) > 1:
        found += [rule.jitter(f"batch 1 against {task.batch}, {form}", scores, f"{form}-1", f"{form}-{task.batch}")
                  for form in ("prefill", "decode")]
    band = rule.band_of(found)
    own = {name: [one.ids for one in scores[name]] for name in (f"decode-{size}" for size in sizes)}
    runs = {**task.oracle, **own}
    first = next(iter(task.oracle))
    arms = []
    for name, ids in task.ours.items():
        rows = rule.judge(task.prompts, ids, task.oracle[first], scores[name], band, task.mask)
        count = {label: sum(row.label == label for row in rows) for label in (IDENTICAL, NEAR_TIE, WRONG)}
        arms.append({
            "legs": task.legs[name], "against": first, "of": len(rows), "identical": count[IDENTICAL], "near_ties": count[NEAR_TIE],
            "wrong": count[WRONG], "worst_gap": max((row.worst_gap for row in rows if row.worst_gap is not None), default=None),
            "requests": [dataclasses.asdict(row) for row in rows],
        })
    return {
        "schema": SCHEMA, "series": origin["series"], "oracle": {**{name: result["who"][name] for name in SAME}, "role": origin["role"]},
        "dtype": result["resolved"]["dtype"], "masked_ids": sorted(task.mask.ids), "masked_until": task.mask.until,
        "self_agreement": [rule.agreement(first, name, task.oracle[first][: len(ids)], ids) for name, ids in runs.items() if name != first],
        "jitter": [dataclasses.asdict(one) for one in found], "band": band, "factor": rule.FACTOR, "percentile": rule.PERCENTILE,
        "oracle_worst_gap": rule.check_control(scores["prefill-1"], band, task.mask), "arms": arms,
    }


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
