"""What one leg is asked and what it leaves behind: the only contract between the harness and an arm.

A leg is one process tree running one engine over one corpus.  It is started in an empty-but-for-`request.json` leg folder, which is
its working directory, and leaves these files there (all written with :func:`write_atomic` but the two streams):

    request.json        in: a :class:`LegRequest`
    marks.jsonl         out: one :class:`Mark` a line, flushed as it happens
    requests.jsonl.gz   out: one :class:`Trace` a line, in corpus order
    outputs.json.gz     out: the output ids, a list of lists in corpus order
    result.json         out, last: a result as :func:`check_result` accepts it.  A leg without it did not happen

A leg of phase `score` runs no clock: it is given score.json.gz beside request.json and leaves scores.json.gz instead of the two streams.

Standard library only: this module runs in every arm's interpreter.  docs/LEG_PROTOCOL.md tells the same to other languages.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import itertools
import json
import os
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

PROTOCOL = 1

REQUEST, MARKS, TRACES, OUTPUTS, RESULT = "request.json", "marks.jsonl", "requests.jsonl.gz", "outputs.json.gz", "result.json"
SCORE, SCORES = "score.json.gz", "scores.json.gz"
"""File names inside a leg folder."""

SCORE_PHASE = "score"
PHASES = ("ceiling", "correctness", "warmup", "memory", "performance", SCORE_PHASE)
FORMS = ("prefill", "decode")
TOP = 20
"""How many of the likeliest ids a score names at each position: as many as vLLM hands out by default."""
CLIENTS = ("step", "async")
MARK_NAMES = ("imported", "load_start", "loaded", "ready", "warm", "first_submit", "first_token", "last_token", "drained")
"""Marks of every leg, in the order they must appear.  `progress` marks (with a `tokens` count) may lie between first_submit and drained."""
START_MARKS = ("context", "read", "copied", "captured", "warmup_token")
"""Marks that tell more of a start where an arm can, in this order: between load_start and loaded the device's context, the weights read and
all arrived, the decode steps' graphs; between ready and warm the first token of a warm-up request, which ends the start."""

MODEL_VARIABLE = "PARITY_MODEL"
"""Environment variable that holds the checkpoint folder: evidence itself never holds an absolute path."""

SITE_VARIABLE = "PARITY_SITE"
"""Environment variable with the folders of installed packages that the arm's search path names beside the stage (`:` between them)."""

COMMON_OPTIONS = (
    "dtype", "device", "max_num_batched_tokens", "max_num_seqs", "max_model_len", "block_size", "num_blocks",
    "enable_prefix_caching", "enable_chunked_prefill", "enforce_eager", "depth", "threads", "load",
)
"""Option names shared by all drivers, after vLLM's own where the meaning is the same.  `depth` is 1 (synchronous) or 2 (overlapped);
`load` is how weights reach memory: direct, staged, or default (the oracle's own way).  A driver reports each under the same name in
`resolved`; the harness refuses a leg whose resolved value differs from a declared one."""

FAULTS = {"busy": (0.001, 0.5), "stall": (1, 16), "token": (1, 4096), "copies": (2, 2), "leak_mib": (1, 4096), "kill": (1, 4096)}
"""What option `inject`, a table of one fault, may hold and from where to where (legs/drivers/inject.py); calibrations alone may set it."""


class ProtocolError(ValueError):
    """A request, corpus or result that breaks the contract; the message names file, field and value."""


@dataclass(frozen=True, kw_only=True)
class LegRequest:
    """What a leg is asked to do.  Sizes are in tokens, `corpus` is relative to the staged code's root."""

    protocol: int
    leg: str
    phase: str
    arm: str
    driver: str
    corpus: str
    corpus_sha256: str
    requests: int
    """How many of the corpus's prompts are run, from the first."""
    warmup_requests: int
    """How many of its warm-up prompts are run, and awaited, before the first measured one."""
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    concurrency: int
    client: str
    options: dict[str, Any]


class Mark(NamedTuple):
    """A phase boundary; `t_ns` is CLOCK_MONOTONIC in nanoseconds, the clock the harness's own samplers use."""

    mark: str
    t_ns: int


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One request as the client saw it; all times CLOCK_MONOTONIC in nanoseconds."""

    index: int
    prompt_tokens: int
    scheduled_ns: int
    """When its slot was free: the start of the run, or the moment the finish that freed the slot was seen."""
    submitted_ns: int
    """When it was handed to the engine."""
    stamps: tuple[tuple[int, int], ...]
    """(t_ns, number of ids) of each delta that carried at least one id."""
    end_ns: int
    finish: str
    """The engine's finish reason, `length` or `stop`."""


@dataclass(frozen=True)
class Corpus:
    """Frozen prompts as token ids.  `warmup` is disjoint from `prompts`: no warm-up prompt shares its first 16 ids with any of them."""

    name: str
    source: str
    vocab_size: int
    prompts: tuple[tuple[int, ...], ...]
    warmup: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class ScoreJob:
    """Continuations of the corpus's first prompts whose log-probabilities are wanted, `batch` of them in flight at a time.

    `prefill` scores given ids, all positions of a sequence in the pass that reads it: `ids`, or those of the earlier job named `follow`.
    `decode` has the engine write its own greedy ids one by one, as the request's sampling says, and scores them as they come.
    """

    name: str
    form: str
    batch: int
    ids: tuple[tuple[int, ...], ...] | None = None
    follow: str | None = None
    requests: int | None = None
    """Of how many of the first prompts; None: of all."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """One continuation and what the engine thinks of it, before anything is masked: natural logarithms, in float32."""

    anchor: str
    """:func:`anchor` of the prompt and the ids that were really scored."""
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of each id, after the prompt and the ids before it."""
    top: tuple[tuple[tuple[int, float], ...], ...]
    """At each position (id, logprob) of the :data:`TOP` likeliest ids, likeliest first."""


class Marks:
    """The writer of marks.jsonl.  Opens the file for appending and flushes each line, so a killed leg still shows how far it came."""

    def __init__(self, path: Path) -> None:
        self._sink = path.open("a", encoding="utf-8")

    def __call__(self, mark: str, t_ns: int | None = None, **extra: Any) -> None:
        line = {"mark": mark, "t_ns": time.monotonic_ns() if t_ns is None else t_ns, **extra}
        self._sink.write(json.dumps(line) + "\n")
        self._sink.flush()


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a reader sees all of it or nothing; refuses to replace an existing file."""
    if path.exists() or path.is_symlink():
        raise FileExistsError(f"{path}: exists already; evidence is written once")
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    with os.fdopen(descriptor, "wb") as sink:
        sink.write(data)
        sink.flush()
        os.fsync(sink.fileno())
    os.replace(scratch, path)


def to_json(value: Any) -> bytes:
    """Canonical JSON: sorted keys, two-space indent, a final newline, no NaN.  Equal values give equal bytes."""
    return (json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def to_gzip(data: bytes) -> bytes:
    """gzip with no time and no name in the header, so that equal data gives equal bytes."""
    return gzip.compress(data, compresslevel=6, mtime=0)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_request(folder: Path, request: LegRequest) -> None:
    write_atomic(folder / REQUEST, to_json(dataclasses.asdict(request)))


def read_request(folder: Path) -> LegRequest:
    """Read and check request.json.  Raises :class:`ProtocolError` naming the field that is missing, unknown or wrong."""
    path = folder / REQUEST
    raw = json.loads(path.read_bytes())
    names = {field.name for field in dataclasses.fields(LegRequest)}
    if wrong := sorted(names ^ raw.keys()):
        raise ProtocolError(f"{path.name}: fields missing or unknown: {', '.join(wrong)}")
    for field in dataclasses.fields(LegRequest):
        if type(raw[field.name]).__name__ != str(field.type).partition("[")[0]:
            raise ProtocolError(f"{path.name}: field {field.name!r} is {raw[field.name]!r}, expected {field.type}")
    request = LegRequest(**raw)
    if request.protocol != PROTOCOL:
        raise ProtocolError(f"{path.name}: protocol {request.protocol}, this code speaks {PROTOCOL}")
    if request.phase not in PHASES or request.client not in CLIENTS:
        raise ProtocolError(f"{path.name}: phase {request.phase!r} or client {request.client!r} is unknown")
    return request


def read_corpus(path: Path, expected_sha256: str | None = None) -> Corpus:
    """Read a corpus file (gzipped JSON with the fields of :class:`Corpus`; prompts as ids, or as :func:`draw_prompts` draws them).

    Raises :class:`ProtocolError` when its hash is not the expected one, a field is missing or unknown, or :func:`check_corpus` refuses it.
    """
    data = path.read_bytes()
    found = sha256(data)
    if expected_sha256 is not None and found != expected_sha256:
        raise ProtocolError(
            f"{path.name}: sha256 is {found}, {expected_sha256} was asked for; the corpus changed, restore it or make a new one")
    return parse_corpus(path.name, data)


def parse_corpus(name: str, data: bytes) -> Corpus:
    """The corpus that a file's bytes hold, drawn where the file says how; `name` is for errors.  Raises as :func:`read_corpus`."""
    raw = json.loads(gzip.decompress(data))
    if wrong := sorted({field.name for field in dataclasses.fields(Corpus)} ^ raw.keys()):
        raise ProtocolError(f"{name}: fields missing or unknown: {', '.join(wrong)}")
    for kind in ("prompts", "warmup"):
        if isinstance(raw[kind], dict):
            if raw[kind].keys() != {"seed", "below", "lengths"}:
                raise ProtocolError(f"{name}: drawn {kind} have seed, below and lengths, not {', '.join(sorted(raw[kind])) or 'nothing'}")
            raw[kind] = draw_prompts(**raw[kind])
    corpus = Corpus(**raw | {kind: tuple(map(tuple, raw[kind])) for kind in ("prompts", "warmup")})
    check_corpus(corpus)
    return corpus


def draw_prompts(seed: str, below: int, lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Prompts of `lengths` ids each, uniform over 0..`below` - 1: SHAKE-256 of the seed's UTF-8 bytes, cut into little-endian words of
    64 bits, each modulo `below`, in order.  Any language can do it, and the same ids come of it for ever."""
    total = sum(lengths)
    words = iter(struct.unpack(f"<{total}Q", hashlib.shake_256(seed.encode()).digest(8 * total)))
    return tuple(tuple(word % below for word in itertools.islice(words, length)) for length in lengths)


def check_corpus(corpus: Corpus) -> None:
    """Raise :class:`ProtocolError` when an id lies outside the vocabulary, or two prompts (or warm-up prompts) share their first 16 ids."""
    heads: dict[tuple[int, ...], str] = {}
    for kind, prompts in (("prompt", corpus.prompts), ("warm-up prompt", corpus.warmup)):
        for index, prompt in enumerate(prompts):
            if not prompt or min(prompt) < 0 or max(prompt) >= corpus.vocab_size:
                raise ProtocolError(f"{corpus.name}: {kind} {index} is empty or has an id outside 0..{corpus.vocab_size - 1}")
            here = f"{kind} {index}"
            if (earlier := heads.setdefault(prompt[:16], here)) != here:
                raise ProtocolError(f"{corpus.name}: {here} starts with the same 16 ids as {earlier}; a prefix cache could serve it")


def corpus_bytes(corpus: Corpus | Mapping[str, Any]) -> bytes:
    """The corpus as a file, or one whose fields are given as the file has them: equal ones give equal bytes."""
    fields = dataclasses.asdict(corpus) if isinstance(corpus, Corpus) else corpus
    return to_gzip((json.dumps(fields, sort_keys=True, separators=(",", ":")) + "\n").encode())


def write_traces(folder: Path, traces: list[Trace]) -> str:
    """Write requests.jsonl.gz and return its SHA-256."""
    data = to_gzip("".join(json.dumps(dataclasses.asdict(trace)) + "\n" for trace in traces).encode())
    write_atomic(folder / TRACES, data)
    return sha256(data)


def read_traces(folder: Path) -> list[Trace]:
    lines = gzip.decompress((folder / TRACES).read_bytes()).decode().splitlines()
    rows = [json.loads(line) for line in lines]
    return [Trace(**{**row, "stamps": tuple((t, n) for t, n in row["stamps"])}) for row in rows]


def write_outputs(folder: Path, outputs: list[list[int]]) -> str:
    """Write outputs.json.gz and return its SHA-256."""
    data = to_gzip(json.dumps(outputs, separators=(",", ":")).encode())
    write_atomic(folder / OUTPUTS, data)
    return sha256(data)


def read_outputs(folder: Path) -> list[list[int]]:
    outputs: list[list[int]] = json.loads(gzip.decompress((folder / OUTPUTS).read_bytes()))
    return outputs


def anchor(prompt: Sequence[int], ids: Sequence[int]) -> str:
    """SHA-256 that binds a score to exactly these ids after exactly this prompt: with one id changed it is another score."""
    return sha256(json.dumps([list(prompt), list(ids)], separators=(",", ":")).encode())


def write_jobs(folder: Path, jobs: Sequence[ScoreJob]) -> str:
    """Write score.json.gz and return its SHA-256."""
    data = to_gzip(to_json([dataclasses.asdict(job) for job in jobs]))
    write_atomic(folder / SCORE, data)
    return sha256(data)


def read_jobs(folder: Path, requests: int) -> list[ScoreJob]:
    """Read and check score.json.gz.  Raises :class:`ProtocolError` naming the job and what is wrong with it."""
    jobs: dict[str, ScoreJob] = {}
    for raw in json.loads(gzip.decompress((folder / SCORE).read_bytes())):
        job = ScoreJob(**{**raw, "ids": None if raw["ids"] is None else tuple(map(tuple, raw["ids"]))})
        given = (job.ids is not None) + (job.follow is not None)
        count = requests if job.requests is None else job.requests
        for good, problem in (
            (job.name not in jobs, "has a name that an earlier job has"),
            (job.form in FORMS, f"form {job.form!r} is unknown"),
            (job.batch >= 1, f"batch {job.batch!r} is not 1 or more"),
            (given == (job.form == "prefill"), "prefill scores `ids` or those of `follow`, decode writes its own"),
            (job.follow is None or job.follow in jobs, f"follows {job.follow!r}, which is no earlier job"),
            (job.follow is None or job.follow not in jobs or jobs[job.follow].requests == job.requests, f"and {job.follow!r} are of "
             "different requests"),
            (1 <= count <= requests, f"is of {job.requests} requests, the leg has {requests}"),
            (job.ids is None or (len(job.ids) == count and all(job.ids)), f"has not {count} continuations of one id or more"),
        ):
            if not good:
                raise ProtocolError(f"{SCORE}: job {job.name!r} {problem}")
        jobs[job.name] = job
    return list(jobs.values())


def write_scores(folder: Path, scores: Mapping[str, Sequence[Scored]]) -> str:
    """Write scores.json.gz, {job name: scores in corpus order}, and return its SHA-256."""
    data = to_gzip(json.dumps(
        {name: [dataclasses.asdict(one) for one in of] for name, of in scores.items()}, allow_nan=False, separators=(",", ":")).encode())
    write_atomic(folder / SCORES, data)
    return sha256(data)


def read_scores(folder: Path) -> dict[str, list[Scored]]:
    raw = json.loads(gzip.decompress((folder / SCORES).read_bytes()))
    return {
        name: [Scored(
            anchor=one["anchor"], ids=tuple(one["ids"]), logprobs=tuple(one["logprobs"]),
            top=tuple(tuple((token, value) for token, value in at) for at in one["top"]),
        ) for one in of]
        for name, of in raw.items()
    }


def read_marks(folder: Path) -> list[dict[str, Any]]:
    """The marks of a leg, oldest first; a last line cut short by a kill is dropped."""
    lines = (folder / MARKS).read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


RESULT_FIELDS: dict[str, type | tuple[type, ...]] = {
    "protocol": int,
    "leg": str,
    "arm": str,
    "who": dict,
    "device": dict,
    "resolved": dict,
    "counters": dict,
    "counts": dict,
    "files": dict,
    "sys_path": list,
    "pids": list,
    "client": str,
}
"""result.json.  `who`: name, distribution, version, commit (or null), packages {name: version}, record_sha256 (of the files that the
installed distribution's RECORD lists, or of the staged code), missing [distributions its metadata asks for that are not there].
`device`: kind, name, count.  `resolved`: settings as the engine itself resolved them, at least COMMON_OPTIONS (null where it has none) and
`attention_backend`.  `counters`: over the measured window, null where the engine does not tell: steps, mixed_steps, preemptions,
prefix_cache_queries, prefix_cache_hits, sampler_calls {kind: n}.  `counts`: requests, prompt_tokens, output_tokens.  `files`:
{file name: sha256}.  `sys_path`: sys.path entries, each relative to the stage as `stage:…`, to a declared package folder as `site:…`,
to the interpreter's prefixes as `prefix:…` or `base:…`, and anything else in full (a full path is what the harness refuses)."""


def check_result(result: dict[str, Any], request: LegRequest) -> None:
    """Raise :class:`ProtocolError` unless `result` is well formed and answers `request`."""
    for name, kind in RESULT_FIELDS.items():
        if not isinstance(result.get(name), kind):
            raise ProtocolError(f"{RESULT}: field {name!r} is {result.get(name)!r}, expected {kind}")
    if (result["protocol"], result["leg"], result["arm"]) != (request.protocol, request.leg, request.arm):
        raise ProtocolError(f"{RESULT}: answers {result['leg']!r} of arm {result['arm']!r}, {request.leg!r} of {request.arm!r} was asked")
