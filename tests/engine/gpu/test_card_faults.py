"""Planted faults on the card: with each, the ids are no longer those of transformers; a fault that changes none proves nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.api import LLM
from tests.engine.card_faults import FAULTS
from tests.engine.conftest import Reference
from tests.engine.gpu.test_card_serving import generate
from tests.engine.serving import PARAMS

pytest.importorskip("triton")


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("fault", [None, *FAULTS], ids=lambda fault: "healthy" if fault is None else fault.__name__)
def test_each_fault_changes_ids(
    monkeypatch: pytest.MonkeyPatch, reference: Reference, fault: Callable[[pytest.MonkeyPatch], None] | None, eager: bool
) -> None:
    if fault is not None:
        fault(monkeypatch)
    llm = LLM(reference.folder, device="cuda", depth=2, enforce_eager=eager, max_num_seqs=4, max_num_batched_tokens=64, block_size=16)
    found = [ids for ids, _ in generate(llm, reference.prompts, [PARAMS] * len(reference.prompts))]
    assert (found == list(reference.ids)) == (fault is None)
