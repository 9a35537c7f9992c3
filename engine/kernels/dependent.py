"""Programmatic dependent launch (CUDA C++ programming guide, "Programmatic Dependent Launch and Synchronization").

A kernel launched so may start while its predecessor runs, which hides the gap between the two and what it can do without the
predecessor's output.  It waits for all of the predecessor's writes before it reads or writes anything that others write.  Every such
kernel waits in every program, so whatever came before the predecessor is done as well.
"""

from __future__ import annotations

import os
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ON = os.environ.get("TRITON_INTERPRET") != "1"
"""Off under Triton's interpreter, which has no such thing."""
EARLY = False
"""Whether a successor may start as soon as all programs of a kernel have; without it, when they have ended.

Off until a card has measured it."""


def options() -> dict[str, Any]:
    """Launch options of a kernel that waits for its predecessor itself: with `start`, or `let_next` and then `gdc_wait`."""
    return {"DEPENDENT": 2 if EARLY else 1, "launch_pdl": True} if ON else {"DEPENDENT": 0}


@triton.jit
def let_next(DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Let the successor start; it waits for the end of this kernel by itself."""
    if DEPENDENT == 2:
        gdc_launch_dependents()


@triton.jit
def start(DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """To be called before a kernel touches memory."""
    let_next(DEPENDENT)
    if DEPENDENT:
        gdc_wait()
