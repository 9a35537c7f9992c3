"""A wrong spec names its file, its field, the value and the cure."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.series.spec import load_spec
from harness.strict import SpecError
from tests.harness.series.spec_factory import write_spec


def test_a_good_spec_is_read(tmp_path: Path) -> None:
    spec = load_spec(write_spec(tmp_path))
    assert spec.workload.requests == 8
    assert list(spec.arms) == ["on", "off", "pin"]
    assert spec.limits.leg_timeout_s == 60.0
    assert spec.verdict.pairs == (("on", "pin"), ("off", "pin"), ("on", "off"))


@pytest.mark.parametrize(("old", "new", "field", "value"), [
    ("requests = 8", "requests = 8\nreqests = 9", "workload.reqests", "9"),
    ("requests = 8\n", "", "workload.requests", "None"),
    ("requests = 8", 'requests = "8"', "workload.requests", "'8'"),
    ("requests = 8", "requests = true", "workload.requests", "True"),
    ("requests = 8", "requests = 0", "workload.requests", "0"),
    ("concurrency = 2", "concurrency = 9", "workload.concurrency", "9"),
    ("warmup_requests = 2", "warmup_requests = 1", "workload.warmup_requests", "1"),
    ("min_tokens = 4", "min_tokens = 3", "workload.min_tokens", "3"),
    ("ignore_eos = true", "ignore_eos = false", "workload.min_tokens", "4"),
    ("schema = 1", "schema = 2", "schema", "2"),
    ('driver = "vllm"', 'driver = "sglang"', "arms.pin.driver", "'sglang'"),
    ('oracle = "vllm-toy"\n', "", "arms.pin.oracle", "None"),
    ("[arms.pin]", "[arms.null]", "arms.null", "'null'"),
    ('load = "direct"', 'lod = "direct"', "arms.on.options", "'lod'"),
    ('load = "direct"', 'dtype = "bfloat16"', "arms.on.options", "'dtype'"),
    ('["on", "pin"]', '["on", "nope"]', "verdict.pairs", "['on', 'nope']"),
    ('["on", "pin"]', '["on", "pin", "off"]', "verdict.pairs[0]", "['on', 'pin', 'off']"),
    ('primary = "total_throughput"', 'primary = "speed"', "verdict.primary", "'speed'"),
    ("margin = 0.02", "margin = 1.5", "verdict.margin", "1.5"),
    ("memory = 3\nperformance = 3", "memory = 0\nperformance = 0", "phases", "'both 0'"),
    ("leg_timeout_s = 60", "leg_timeout_s = 0", "limits.leg_timeout_s", "0.0"),
])
def test_a_wrong_field_is_named(tmp_path: Path, old: str, new: str, field: str, value: str) -> None:
    with pytest.raises(SpecError) as error:
        load_spec(write_spec(tmp_path, (old, new)))
    assert str(error.value).startswith(f"toy.toml: field `{field}` is {value}: ")


def test_a_missing_file_and_no_toml_are_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="there is no such file"):
        load_spec(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("schema = ", encoding="utf-8")
    with pytest.raises(SpecError, match=r"bad\.toml.*not TOML"):
        load_spec(tmp_path / "bad.toml")
