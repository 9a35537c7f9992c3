"""Tests of the card's own code.  Those of single kernels also run on a host under Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os

import pytest
import torch

ON_CARD = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if ON_CARD else "cpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/engine/gpu/" not in item.path.as_posix():
            continue
        item.add_marker(pytest.mark.gpu)
        kernels_only = item.path.name.endswith("kernels.py")
        if not ON_CARD and not (INTERPRETED and kernels_only):
            item.add_marker(pytest.mark.skip(reason="needs a card"))
