"""Near-tie records: what lies beside a sealed series, and what it says of our ids, computed again whenever it is read.

    DIR-near-tie/origin.json      what was judged and where: series, model, machine, code, the arm of the oracle, the lock
    DIR-near-tie/stage/           the staged code of the oracle's driver, and the corpus, as one file
    DIR-near-tie/score/           the leg: request.json, score.json.gz, marks.jsonl, scores.json.gz, result.json, guard.json
    DIR-near-tie/near_tie.json    the judgement
    DIR-near-tie/manifest.jsonl   as of a series

The record names its series by the head of its manifest.  One that is there and does not hold is refused, never passed over.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.analysis import near_tie as rule
from harness.analysis.near_tie import IDENTICAL, NEAR_TIE, WRONG, Mask, NearTieError
from harness.analysis.tokens import is_ours
from harness.evidence import packed, store
from harness.evidence.differences import first_difference
from harness.evidence.schema import Series
from legs.protocol import RESULT, ProtocolError, Scored, read_corpus, read_request, read_scores, to_json

SCHEMA = 1
ORIGIN, SCORE, RECORD = "origin.json", "score", "near_tie.json"
SUFFIX = "-near-tie"
OWN = "own"
"""The scoring of what the oracle itself wrote at the series' batch size: in prefill form, one by one, as ours are scored."""
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


def folder_of(path: Path) -> Path:
    """Where the record of the series at `path` lies: beside the series itself, also when `path` is a link to it."""
    real = path.resolve()
    return real.with_name(real.name + SUFFIX)


def find_record(path: Path, series: Series) -> dict[str, Any] | None:
    """The judgement that lies beside a series, with `head` of its manifest; None when there is none.  Raises as :func:`read_record`."""
    folder = folder_of(path)
    return read_record(folder, series) if folder.exists() or folder.is_symlink() else None


def read_record(folder: Path, series: Series) -> dict[str, Any]:
    """The judgement of a sealed record, computed again from its scores and the series' outputs, and `head`, that of its manifest.

    Raises :class:`NearTieError`, naming the folder, when it is not whole, was made for another series or says otherwise than its evidence.
    """
    try:
        return _read(folder, series)
    except (NearTieError, store.BrokenSeal) as error:
        raise NearTieError(f"{folder.name}: {error}") from None
    except (OSError, ValueError, KeyError, TypeError, StopIteration, EOFError, zlib.error, ProtocolError) as error:
        raise NearTieError(f"{folder.name}: cannot be read as a near-tie record: {error!r}; remove it, and make one by "
                           "`parity near-tie DIR`") from None


def _read(folder: Path, series: Series) -> dict[str, Any]:
    if folder.is_symlink() or not folder.is_dir():
        raise NearTieError("is no folder; a record is a plain folder beside its series")
    if not store.is_sealed(folder):
        raise NearTieError("a scoring that did not end, see its logs; remove the folder, or give --out for a new record")
    store.check_seal(folder)
    origin = json.loads((folder / ORIGIN).read_bytes())
    if (named := str(origin["series"]["head"])) != series.head:
        raise NearTieError(f"was made for a series whose manifest ends in {named[:12]}, this one ends in {series.head[:12]}; remove it, or "
                           "give --out for a new record")
    with packed.opened(folder) as staged:
        prompts = read_corpus(staged / read_request(folder / SCORE).corpus, series.plan["workload"]["corpus_sha256"]).prompts
    task = make_task(series, prompts, origin["eos_ids"])
    found = to_record(task, read_scores(folder / SCORE), json.loads((folder / SCORE / RESULT).read_bytes()), origin)
    if unlike := first_difference(json.loads((folder / RECORD).read_bytes()), json.loads(to_json(found))):
        raise NearTieError(f"{RECORD}: is not what its evidence gives: {unlike}")
    return {**found, "head": store.read_manifest(folder).head}


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
    one_by_one = rule.agreement(first, "decode-1", task.oracle[first][: len(own["decode-1"])], own["decode-1"])
    for name, ids in task.ours.items():
        rows = rule.judge(task.prompts, ids, task.oracle[first], scores[name], band, task.mask)
        count = {label: sum(row.label == label for row in rows) for label in (IDENTICAL, NEAR_TIE, WRONG)}
        arms.append({
            "legs": task.legs[name], "against": first, "of": len(rows), "identical": count[IDENTICAL], "near_ties": count[NEAR_TIE],
            "wrong": count[WRONG], "worst_gap": max((row.worst_gap for row in rows if row.worst_gap is not None), default=None),
            "beside_oracle": rule.beside(count[IDENTICAL], scores[name], one_by_one, scores[OWN], task.mask),
            "requests": [dataclasses.asdict(row) for row in rows],
        })
    return {
        "schema": SCHEMA, "series": origin["series"], "oracle": {**{name: result["who"][name] for name in SAME}, "role": origin["role"]},
        "dtype": result["resolved"]["dtype"], "masked_ids": sorted(task.mask.ids), "masked_until": task.mask.until,
        "self_agreement": [rule.agreement(first, name, task.oracle[first][: len(ids)], ids) for name, ids in runs.items() if name != first],
        "jitter": [dataclasses.asdict(one) for one in found], "band": band, "factor": rule.FACTOR, "percentile": rule.PERCENTILE,
        "oracle_worst_gap": rule.check_control(scores["prefill-1"], band, task.mask), "arms": arms,
    }
