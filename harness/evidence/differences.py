"""Where two JSON values differ: what is stored and what is computed again."""

from __future__ import annotations

import json
import math
from typing import Any

DIGITS = 1e-9


def first_difference(stored: Any, computed: Any, where: str = "") -> str | None:
    """The first place at which two JSON values differ, as `a.b[2]: x is stored, y is computed`; numbers with a fraction to nine digits."""
    if isinstance(stored, dict) and isinstance(computed, dict):
        for key in sorted(stored.keys() | computed.keys()):
            place = f"{where}.{key}" if where else key
            if key not in stored or key not in computed:
                return f"{place}: is {'not stored' if key not in stored else 'stored, and nothing computes it'}"
            if found := first_difference(stored[key], computed[key], place):
                return found
        return None
    if isinstance(stored, list) and isinstance(computed, list) and len(stored) == len(computed):
        differences = (first_difference(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(stored, computed, strict=True)))
        return next((found for found in differences if found), None)
    if isinstance(stored, float) and isinstance(computed, float) and math.isclose(stored, computed, rel_tol=DIGITS, abs_tol=0.0):
        return None
    if type(stored) is type(computed) and stored == computed:
        return None
    return f"{where}: {brief(stored)} is stored, {brief(computed)} is computed"


def brief(value: Any) -> str:
    """A value as JSON, cut to what a line can hold."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
