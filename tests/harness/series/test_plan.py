"""The plan is data: exact legs in exact order, exact environments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.cli import _run
from harness.machine.idle_rule import IdleLimits
from harness.series.plan import block_order, make_plan
from harness.series.spec import load_spec
from tests.harness.series.spec_factory import write_spec

ROOT = Path(__file__).resolve().parents[3]


def test_three_arms_rotate_and_two_flip() -> None:
    assert [block_order("ABC", r) for r in (1, 2, 3, 4)] == [list("ABC"), list("BCA"), list("CAB"), list("ABC")]
    assert [block_order("AB", r) for r in (1, 2, 3, 4)] == [list("AB"), list("BA"), list("AB"), list("BA")]


def test_eighteen_legs_unique_and_rotated(tmp_path: Path) -> None:
    spec = load_spec(write_spec(tmp_path))
    plan = make_plan(spec, b"", {"vllm-toy": {"VLLM_X": "1"}}, 0, IdleLimits())
    names = [leg["name"] for leg in plan["legs"]]
    assert len(names) == len(set(names)) == 18
    assert names[:4] == ["memory-1-on", "memory-1-off", "memory-1-pin", "memory-2-off"]
    assert [leg["name"] for leg in plan["warmup"]] == ["warmup-on", "warmup-off", "warmup-pin"]
    assert not set(names) & {leg["name"] for leg in plan["warmup"]}
    assert plan["ceiling"] == {"leg": "ceiling-null", "name": "null", "driver": "null", "oracle": None, "client": "step", "options": {},
                               "environment": {}}
    assert plan["ceiling"]["leg"] not in names


def test_environment_deltas_are_exact(tmp_path: Path) -> None:
    plan = make_plan(load_spec(write_spec(tmp_path)), b"", {"vllm-toy": {"VLLM_X": "1"}}, 0, IdleLimits())
    environments = {arm["name"]: arm["environment"] for arm in plan["arms"]}
    assert environments == {
        "on": {"OMP_NUM_THREADS": "2"}, "off": {"OMP_NUM_THREADS": "2"}, "pin": {"OMP_NUM_THREADS": "2", "VLLM_X": "1"},
    }


def test_the_digest_follows_every_change(tmp_path: Path) -> None:
    environments = {"vllm-toy": {"VLLM_X": "1"}}
    first = make_plan(load_spec(write_spec(tmp_path)), b"", environments, 0, IdleLimits())
    again = make_plan(load_spec(write_spec(tmp_path)), b"", environments, 0, IdleLimits())
    longer = load_spec(write_spec(tmp_path, ("max_tokens = 4\nmin_tokens = 4", "max_tokens = 5\nmin_tokens = 5")))
    other = make_plan(longer, b"", environments, 0, IdleLimits())
    assert first["digest"] == again["digest"] != other["digest"]


@pytest.mark.parametrize(("series", "legs"), [("qwen3-4b", 18), ("qwen3.5-4b", 18), ("quick", 12), ("smollm2", 21)])
def test_the_series_of_the_house_plan(series: str, legs: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["plan", str(ROOT / "legs" / "series" / f"{series}.toml"), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert len(plan["legs"]) == legs == len({leg["name"] for leg in plan["legs"]})
    assert len(plan["warmup"]) == len(plan["arms"]) == 3
    if series.startswith("qwen"):
        work = plan["workload"]
        assert (work["requests"], work["prompt_tokens"], work["max_tokens"], work["concurrency"]) == (128, 131_784, 128, 32)
        assert {arm["options"]["max_num_batched_tokens"] for arm in plan["arms"]} == {2048}
        assert {arm["options"]["enable_prefix_caching"] for arm in plan["arms"]} == {False}
