"""`parity recheck-idle`: today's idle rule over the snapshots that a series has kept.  Touches no GPU and runs nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.evidence import layout, store
from harness.evidence.schema import EvidenceError
from harness.machine.idle_rule import IdleLimits, decide


def recheck_idle(series: Path, limits: IdleLimits) -> dict[str, Any]:
    """Judge each leg's idle.json again under `limits`: {"label", "utilisation_max", "limits", "snapshots"}.

    A snapshot has `leg`, `ran` (the gate let the leg run then), `utilisation_max` (per cent, over all GPUs and the snapshot's decision
    sample; None without a GPU or with an unreadable one) and `reasons`.  The series is `contended` when a leg ran under reasons, else
    `idle`; its `utilisation_max` is over the legs that ran.  Raises :class:`EvidenceError`, BrokenSeal.
    """
    if not series.is_dir():
        raise EvidenceError(f"{series}: there is no such series")
    store.check_seal(series, require_sealed=False)
    parts = (*layout.SINGLE, layout.BLOCKS)
    paths = sorted(path for part in parts for path in (series / part).rglob(layout.IDLE))
    snapshots = [_judge(series, path, limits) for path in paths]
    if not snapshots:
        raise EvidenceError(f"{series}: holds no {layout.IDLE}: no leg got as far as the idle gate")
    ran = [snapshot for snapshot in snapshots if snapshot["ran"]]
    known = [snapshot["utilisation_max"] for snapshot in ran if snapshot["utilisation_max"] is not None]
    return {
        "label": "contended" if any(snapshot["reasons"] for snapshot in ran) else "idle",
        "utilisation_max": max(known, default=None),
        "limits": {"gpu_util_max": limits.gpu_util_max, "gpu_util_source": limits.gpu_util_source},
        "snapshots": snapshots,
    }


def _judge(series: Path, path: Path, limits: IdleLimits) -> dict[str, Any]:
    name = path.relative_to(series).as_posix()
    try:
        record = json.loads(path.read_bytes())
        (sample,) = (sample for sample in record["samples"] if sample["role"] == "decision")
        highest = [gpu["utilisation_max"] for gpu in sample["gpus"] or ()]
        return {
            "leg": path.parent.relative_to(series).as_posix(), "ran": record["ok"],
            "utilisation_max": max(highest) if highest and None not in highest else None, "reasons": decide(sample, limits),
        }
    except KeyError as error:
        raise EvidenceError(f"{name}: field {error} is missing") from None
    except (ValueError, TypeError, OSError) as error:
        raise EvidenceError(f"{name}: cannot be read: {error}") from None


def recheck_lines(found: dict[str, Any]) -> list[str]:
    """What :func:`recheck_idle` found, for people."""
    ran, highest = [snapshot for snapshot in found["snapshots"] if snapshot["ran"]], found["utilisation_max"]
    text = "no GPU was there" if highest is None else f"maximum GPU utilisation {highest} %"
    lines = [f"{found['label']}: {text}; snapshots that let a leg run: {len(ran)}, that refused one: {len(found['snapshots']) - len(ran)}"]
    lines += [f"  {snapshot['leg']}{'' if snapshot['ran'] else ' (refused then)'}: {reason}"
              for snapshot in found["snapshots"] for reason in snapshot["reasons"]]
    return lines
