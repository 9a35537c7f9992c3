"""`parity verify`: everything a series folder says, checked against its raw evidence.  Reads only, and needs nothing but the folder and
the near-tie record beside it, where there is one.

The seal proves the evidence, and a near-tie record is judged anew from its scores; summary.json is recomputed and compared to nine
digits, report.md byte for byte, and each plot by what is drawn in it: the curves relative to their axes, and every text.  A plot's own
bytes also tell fonts and the version of the library.
"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from harness.analysis.summary import summarize
from harness.evidence.differences import brief, first_difference
from harness.evidence.layout import PLOTS, REPORT, SUMMARY
from harness.evidence.near_ties import find_record, folder_of
from harness.evidence.schema import load_series
from harness.evidence.store import check_seal, read_manifest
from harness.report.build import figures
from harness.report.markdown import render

DRAWN = 1e-3
"""How far two points may lie apart, as a share of the axes: far below the width of a line."""
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was checked: `difference` is the first that was found, None when there is none; `scope` says what it covered."""

    name: str
    scope: str
    difference: str | None


def verify(series: Path) -> list[Check]:
    """Check a series folder.  Raises BrokenSeal or EvidenceError, naming the file, when the evidence itself does not hold."""
    check_seal(series)
    manifest = read_manifest(series)
    loaded = load_series(series)
    record = find_record(series, loaded)
    summary = summarize(loaded, record)
    checks = [Check(name="seal", scope=f"{len(manifest.files)} files, chain {manifest.head[:12]}", difference=None)]
    if record is not None:
        scope = f"{len(read_manifest(folder_of(series)).files)} files, chain {record['head'][:12]}, judged anew from its scores"
        checks.append(Check(name=folder_of(series).name, scope=scope, difference=None))
    checks += [_summary(series / SUMMARY, summary), _report(series / REPORT, render(summary))]
    drawn = figures(loaded, summary)
    checks += [_plot(series / PLOTS / name, drawn[name]) for name in drawn]
    return checks + [Check(name=f"{PLOTS}/{path.name}", scope="a file", difference="belongs to no plot of this series; remove it")
                     for path in _strays(series / PLOTS, set(drawn))]


def to_lines(checks: list[Check]) -> list[str]:
    """What :func:`verify` found, a line each."""
    return [f"{'ok  ' if check.difference is None else 'DIFF'} {check.name}: {check.difference or check.scope}" for check in checks]


def _summary(path: Path, computed: dict[str, Any]) -> Check:
    difference = _missing(path)
    if difference is None:
        try:
            stored = json.loads(path.read_bytes())
            difference = _other_record(stored, computed) or first_difference(stored, computed)
        except ValueError as error:
            difference = f"is not JSON: {error}"
    return Check(name=SUMMARY, scope="recomputed, equal to nine digits", difference=difference)


def _other_record(stored: Any, computed: dict[str, Any]) -> str | None:
    """Whether a summary was made with another near-tie record than the one beside the series, or with none: it speaks of other evidence."""
    then, now = ((one.get("near_tie") or {}).get("head") for one in (stored if isinstance(stored, dict) else {}, computed))
    if then == now:
        return None
    was = "without a near-tie record" if then is None else f"with the near-tie record {then[:12]}"
    if now is None:
        return f"near_tie: was made {was}, which does not lie beside the series; put it back, or make the summary anew: `parity report DIR`"
    return f"near_tie: was made {was}, and {now[:12]} lies beside the series; make the summary anew with it: `parity report DIR`"


def _report(path: Path, computed: str) -> Check:
    difference = _missing(path)
    if difference is None and (stored := path.read_bytes()) != computed.encode():
        lines = zip_longest(stored.decode(errors="replace").split("\n"), computed.split("\n"))
        unlike = (f"line {number}: {brief(a)} is stored, {brief(b)} is computed" for number, (a, b) in enumerate(lines, 1) if a != b)
        difference = next(unlike, "is not UTF-8")
    return Check(name=REPORT, scope="recomputed, equal byte for byte", difference=difference)


def _plot(path: Path, computed: str | None) -> Check:
    name = f"{PLOTS}/{path.name}"
    if computed is None:
        there = "is there, and this series has no such plot" if path.exists() else None
        return Check(name=name, scope="this series has no such plot, nor is there one", difference=there)
    difference = _missing(path)
    if difference is None and path.read_bytes() != computed.encode():
        try:
            difference = _drawn_difference(ET.fromstring(path.read_bytes()), ET.fromstring(computed))
        except (ET.ParseError, ValueError) as error:
            difference = f"is not a plot as this program draws it: {error}"
    return Check(name=name, scope="drawn anew, equal in its data", difference=difference)


def _drawn_difference(stored: ET.Element, computed: ET.Element) -> str | None:
    texts = [[element.text for element in root.iter() if element.tag.endswith("}text")] for root in (stored, computed)]
    if texts[0] != texts[1]:
        a, b = next((a, b) for a, b in zip_longest(*texts) if a != b)
        return f"text {a!r} is stored, {b!r} is computed"
    curves = [_curves(root) for root in (stored, computed)]
    for number, (a, b) in enumerate(zip_longest(*curves), 1):
        if a is None or b is None or len(a) != len(b):
            return f"curve {number}: {len(a or ())} coordinates are stored, {len(b or ())} computed"
        if any(abs(x - y) > DRAWN for x, y in zip(a, b, strict=True)):
            return f"curve {number}: is drawn elsewhere"
    return None


def _curves(root: ET.Element) -> list[list[float]]:
    """The coordinates of every path clipped to its axes (curves, grid), relative to the axes' rectangle: independent of the layout."""
    curves = []
    for axes in (group for group in root.iter() if (group.get("id") or "").startswith("axes_")):
        paths = [element for element in axes.iter() if element.tag.endswith("}path")]
        frame = _numbers(paths[0])
        (left, right), (top, bottom) = ((min(side), max(side)) for side in (frame[::2], frame[1::2]))
        if left == right or top == bottom:
            raise ValueError("its axes have no area")
        for path in paths:
            if path.get("clip-path") is not None:
                numbers = _numbers(path)
                curves.append([(x - left) / (right - left) if i % 2 == 0 else (x - top) / (bottom - top) for i, x in enumerate(numbers)])
    return curves


def _numbers(path: ET.Element) -> list[float]:
    return [float(text) for text in NUMBER.findall(path.get("d") or "")]


def _missing(path: Path) -> str | None:
    if path.is_symlink() or path.parent.is_symlink():
        return "is a symbolic link where a plain file belongs"
    return None if path.is_file() else "is missing; write it with `parity report`"


def _strays(folder: Path, known: set[str]) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if path.name not in known] if folder.is_dir() and not folder.is_symlink() else []
