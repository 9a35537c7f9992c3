"""A series as a person writes it: a TOML file, read strictly into frozen dataclasses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.evidence.layout import NULL_ARM
from harness.machine.idle_rule import WAIVABLE
from harness.strict import SpecError, build, read_toml
from legs.protocol import CLIENTS, COMMON_OPTIONS, FAULTS

SCHEMA = 1
INJECT = "inject"
DRIVER_OPTIONS: dict[str, tuple[str, ...]] = {"engine": (INJECT,), "vllm": ("language_model_only", "gdn_prefill_backend")}
"""What a driver takes beyond COMMON_OPTIONS; docs/LEG_PROTOCOL.md says what each means."""
AXES = (
    "total_throughput", "output_throughput", "request_throughput", "ttft_mean", "tpot_mean", "itl_p50", "e2e_mean",
    "peak_pss", "stable_pss",
)


@dataclass(frozen=True, kw_only=True)
class Model:
    """The checkpoint: `name` is its folder, `sha256` is over the listing of its files, `made_by` says how to get it."""

    name: str
    sha256: str
    made_by: str


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The work, the same for every arm.  `prompt_tokens` is the sum over the `requests` prompts and is asserted after every leg."""

    corpus: str
    corpus_sha256: str
    requests: int
    prompt_tokens: int
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    concurrency: int
    warmup_requests: int


@dataclass(frozen=True, kw_only=True)
class Phases:
    """Repetitions of each phase; one repetition of all arms is a block."""

    memory: int
    performance: int


@dataclass(frozen=True, kw_only=True)
class ArmSpec:
    """One arm.  `options` are this arm's own, on top of the series' shared ones; `oracle` names the file a vLLM arm is pinned by."""

    driver: str
    client: str = "step"
    oracle: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Limits:
    leg_timeout_s: float


@dataclass(frozen=True, kw_only=True)
class Waiver:
    """A check of the idle gate that this machine cannot meet: what it finds is recorded and refuses nothing, for every arm alike."""

    check: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """`margin` is how far short of the base an arm may be and still pass (0.02: 2 %); each pair is (ours, base)."""

    primary: str
    margin: float
    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Correctness:
    """The engine's gate: greedy ids of `arms` must equal the stored reference's, and each other's."""

    reference: str
    reference_sha256: str
    arms: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Spec:
    schema: int
    name: str
    title: str
    model: Model
    workload: Workload
    phases: Phases
    options: dict[str, Any]
    arms: dict[str, ArmSpec]
    limits: Limits
    verdict: Verdict
    correctness: Correctness | None = None
    """Without a gate a series runs, and its verdict is withheld."""
    waivers: tuple[Waiver, ...] = ()
    """Without one every check of the idle gate refuses."""
    calibration: bool = False
    """Arms may be given faults, and nothing but `parity calibrate` runs it."""


def load_spec(path: Path) -> Spec:
    """Read a spec.  Raises :class:`SpecError` naming file, field, value and cure."""
    spec = build(Spec, read_toml(path), path.name)

    def need(condition: bool, name: str, value: object, advice: str) -> None:
        if not condition:
            raise SpecError(path.name, name, value, advice)

    need(spec.schema == SCHEMA, "schema", spec.schema, f"this version reads schema {SCHEMA}")
    need(spec.name.replace("-", "").replace(".", "").isalnum(), "name", spec.name, "use letters, digits, `-` and `.`")
    _check_workload(spec, need)
    _check_arms(spec, need)
    known = set(spec.arms)
    need(spec.verdict.primary in AXES, "verdict.primary", spec.verdict.primary, f"one of {', '.join(AXES)}")
    need(0 <= spec.verdict.margin < 1, "verdict.margin", spec.verdict.margin, "a share from 0 up to 1")
    need(bool(spec.verdict.pairs), "verdict.pairs", [], "at least one pair of arms")
    for pair in spec.verdict.pairs:
        need(set(pair) <= known and pair[0] != pair[1], "verdict.pairs", list(pair), f"two different arms of {', '.join(spec.arms)}")
    if spec.correctness is not None:
        for arm in spec.correctness.arms:
            good = arm in known and spec.arms[arm].driver == "engine"
            need(good, "correctness.arms", arm, "an arm of this file whose driver is `engine`")
    for number, waiver in enumerate(spec.waivers):
        where = f"waivers[{number}]"
        need(waiver.check in WAIVABLE, f"{where}.check", waiver.check, f"one of {', '.join(WAIVABLE)}")
        need(waiver.check not in [other.check for other in spec.waivers[:number]], f"{where}.check", waiver.check, "waived once is enough")
        need(bool(waiver.reason.strip()), f"{where}.reason", waiver.reason, "say why this machine cannot meet the check")
    need(spec.limits.leg_timeout_s > 0, "limits.leg_timeout_s", spec.limits.leg_timeout_s, "seconds, above 0")
    return spec


Need = Callable[[bool, str, object, str], None]


def _check_workload(spec: Spec, need: Need) -> None:
    work = spec.workload
    for name in ("requests", "prompt_tokens", "max_tokens", "concurrency"):
        value = getattr(work, name)
        need(value >= 1, f"workload.{name}", value, "a whole number of at least 1")
    need(0 <= work.min_tokens <= work.max_tokens, "workload.min_tokens", work.min_tokens, "from 0 to max_tokens")
    need(work.ignore_eos and work.min_tokens == work.max_tokens, "workload.min_tokens", work.min_tokens,
         "set ignore_eos = true and min_tokens = max_tokens: arms are compared on exactly the same number of tokens")
    need(work.concurrency <= work.requests, "workload.concurrency", work.concurrency, "at most `requests`")
    need(work.warmup_requests >= work.concurrency, "workload.warmup_requests", work.warmup_requests,
         "at least `concurrency`, or the measured batch shapes are met cold")
    for name in ("memory", "performance"):
        value = getattr(spec.phases, name)
        need(value >= 0, f"phases.{name}", value, "a whole number of at least 0")
    need(spec.phases.memory + spec.phases.performance > 0, "phases", "both 0", "at least one repetition")


def _check_arms(spec: Spec, need: Need) -> None:
    need(len(spec.arms) >= 2, "arms", list(spec.arms), "at least two arms, or there is nothing to compare")
    for name, arm in spec.arms.items():
        where = f"arms.{name}"
        need(name != NULL_ARM, where, name, "this name is the client's ceiling's; take another")
        need(name.isidentifier(), where, name, "an arm's name is made of letters, digits and `_`")
        need(arm.driver in DRIVER_OPTIONS, f"{where}.driver", arm.driver, f"one of {', '.join(DRIVER_OPTIONS)}")
        need(arm.client in CLIENTS, f"{where}.client", arm.client, f"one of {', '.join(CLIENTS)}")
        need((arm.oracle is not None) == (arm.driver == "vllm"), f"{where}.oracle", arm.oracle,
             "a vllm arm names its oracle file, an engine arm has none")
        known = (*COMMON_OPTIONS, *DRIVER_OPTIONS[arm.driver])
        for option in (*spec.options, *arm.options):
            need(option in known, f"{where}.options", option, f"one of {', '.join(known)}")
            need(option != INJECT or spec.calibration, f"{where}.options.{INJECT}", arm.options.get(INJECT, spec.options.get(INJECT)),
                 "faults are put into the arms of a calibration only; remove it")
        if INJECT in arm.options:
            _check_fault(arm.options[INJECT], f"{where}.options.{INJECT}", need)
        both = sorted(spec.options.keys() & arm.options.keys())
        need(not both, f"{where}.options", ", ".join(both), "set in [options] for all arms already; set it in one place")


def _check_fault(fault: object, where: str, need: Need) -> None:
    good = isinstance(fault, dict) and len(fault) == 1 and fault.keys() <= FAULTS.keys()
    need(good, where, fault, f"a table of one fault: one of {', '.join(FAULTS)}")
    assert isinstance(fault, dict)
    name, value = next(iter(fault.items()))
    low, high = FAULTS[name]
    need(type(value) is type(low) and low <= value <= high, f"{where}.{name}", value,
         f"a value of type {type(low).__name__} from {low} to {high}")
