"""Programmatic dependent launch (CUDA C++ programming guide, "Programmatic Dependent Launch and Synchronization").

A kernel launched so may start while its predecessor ends, which hides the gap between the two; it waits for all of the predecessor's
writes before it reads anything.  Kernels that take part call `gdc_wait` first and are launched with `options()`; one whose successor
takes part may let it start early.
"""

from __future__ import annotations

import os
from typing import Any

ON = os.environ.get("TRITON_INTERPRET") != "1"
"""Off under Triton's interpreter, which has no such thing."""


def options() -> dict[str, Any]:
    """Launch options of a kernel that waits for its predecessor itself."""
    return {"DEPENDENT": True, "launch_pdl": True} if ON else {"DEPENDENT": False}
