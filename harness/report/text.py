"""How numbers and tables are written in a report.  None is always `n/a`: a value that could not be read never looks like one that could."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

NONE = "n/a"
MIB = 2**20

AXIS_NAMES = {
    "total_throughput": "total throughput", "output_throughput": "output throughput", "request_throughput": "request throughput",
    "ttft_mean": "TTFT, mean", "tpot_mean": "TPOT, mean", "itl_p50": "ITL, median", "e2e_mean": "E2E, mean",
    "peak_pss": "peak PSS", "stable_pss": "stable PSS", "peak_gpu": "peak GPU memory",
}


NBSP = "\u00a0"
SPACE = re.compile(f"[^\\S{NBSP}]+")


class Markup(str):
    """Text with markup that the report itself wrote: :func:`cell` leaves it alone."""

    __slots__ = ()


def table(header: Sequence[str], rows: Iterable[Sequence[Any]], text: int = 1) -> list[str]:
    """A Markdown table; the first `text` columns are text, the others are aligned right.  `None.` without a row; an empty line follows."""
    body = [_row(row) for row in rows]
    head = [_row(header), "|" + "|".join([":--"] * text + ["--:"] * (len(header) - text)) + "|"]
    return [*head, *body, ""] if body else ["None.", ""]


def folded(title: str, lines: Sequence[str]) -> list[str]:
    """Lines that a reader opens when they want them; the empty line after the summary is what makes GitHub render them as Markdown."""
    return ["<details>", f"<summary>{title}</summary>", "", *lines, "", "</details>", ""]


def whole(text: str) -> str:
    """`text` in one piece: a browser does not break it over lines."""
    return text.replace(" ", NBSP)


def cell(value: Any) -> str:
    """A value inside a table: no pipe or line break of it can change the table."""
    if value is None:
        return NONE
    if isinstance(value, Markup):
        return value
    if isinstance(value, bool):
        return "yes" if value else "no"
    return SPACE.sub(" ", str(value).replace("|", "\\|").replace("<", "&lt;")).strip()


def _row(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(cell(value) for value in cells) + " |"


def number(value: float | None, digits: int = 2, scale: float = 1.0, unit: str = "") -> str:
    return NONE if value is None else f"{value * scale:,.{digits}f}{unit}"


def percent(share: float | None, digits: int = 2) -> str:
    return number(share, digits, 100, f"{NBSP}%")


def milliseconds(seconds: float | None) -> str:
    return number(seconds, 3, 1000)


def ratio(value: float | None) -> str:
    return number(value, 4)


def interval(bounds: Sequence[float] | None) -> str:
    return NONE if bounds is None else whole(f"{bounds[0]:.4f} to {bounds[1]:.4f}")


def label(pair: dict[str, Any]) -> str:
    """A pair with the roles of both arms: no ratio is shown without them."""
    return f"{side(pair, 0)} / {side(pair, 1)}"


def side(pair: dict[str, Any], which: int) -> str:
    """One arm of a pair (0 ours, 1 base) with its role."""
    return whole(f"{pair[('ours', 'base')[which]]} [{cell(pair['roles'][which])}]")


def absolute(axis: str, value: float | None) -> str:
    """An axis's own value with its unit."""
    if axis.endswith(("pss", "gpu")):
        return number(value, 1, 1 / MIB, " MiB")
    if axis == "request_throughput":
        return number(value, 3, 1, " req/s")
    if axis.endswith("throughput"):
        return number(value, 2, 1, " tok/s")
    return number(value, 3, 1000, " ms")


def short(digest: str | None) -> str:
    return NONE if digest is None else f"`{digest[:12]}`"


def arms_in_order(summary: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Arms as the plan lists them: JSON objects are stored sorted."""
    return [(name, summary["arms"][name]) for name in summary["arm_order"]]


def flatten(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """A nested record as (dotted name, text) in sorted order."""
    if isinstance(value, dict):
        return [pair for name in sorted(value) for pair in flatten(value[name], f"{prefix}.{name}" if prefix else name)]
    if isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        return [pair for number_, item in enumerate(value) for pair in flatten(item, f"{prefix}[{number_}]")]
    return [(prefix, (", ".join(map(cell, value)) or "none") if isinstance(value, list) else cell(value))]
