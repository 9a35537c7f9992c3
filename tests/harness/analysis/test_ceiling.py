"""The client's ceiling: by hand, from a real client, and what an arm that comes near it loses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.analysis.ceiling import CLIENT_BOUND, client_ceiling, client_share
from harness.evidence import layout
from harness.evidence.schema import EvidenceError
from harness.report.build import summarize_series
from legs.client import closed_loop
from legs.drivers.null import NullArm
from legs.protocol import REQUEST, RESULT, TRACES, Trace, read_traces, write_traces
from tests.harness.series_factory import edit_json, make_series, reseal

US = 1000


def leg(step_us: int, requests: int = 4, steps: int = 5, ids: int = 1) -> list[Trace]:
    """`requests` one after the other, each with `steps` deltas of `ids` ids, `step_us` apart."""
    found = []
    for index in range(requests):
        start = index * steps * step_us * US
        stamps = tuple((start + (n + 1) * step_us * US, ids) for n in range(steps))
        found.append(Trace(index=index, prompt_tokens=3, scheduled_ns=start, submitted_ns=start, stamps=stamps, end_ns=stamps[-1][0],
                           finish="length"))
    return found


def test_the_ceiling_by_hand() -> None:
    found = client_ceiling(leg(10))  # 20 deltas, 10 us each
    assert found.deltas_per_s == pytest.approx(100_000) and found.requests_per_s == pytest.approx(20_000)
    assert found.seconds_per_delta == pytest.approx(10e-6) and found.tpot == pytest.approx(10e-6)
    assert client_ceiling(leg(10, steps=1)).tpot is None


def test_a_share_is_a_rate_over_the_ceiling_and_the_limit_is_exact() -> None:
    ceiling = client_ceiling(leg(10))
    near, at, far = (client_share(leg(step), ceiling) for step in (99, 100, 101))
    assert near.share == pytest.approx(10 / 99) and near.bound
    assert far.share == pytest.approx(10 / 101) and not far.bound
    assert at.share == pytest.approx(CLIENT_BOUND)
    assert near.deltas_per_s == pytest.approx(1e6 / 99) and near.requests_per_s == pytest.approx(1e6 / 99 / 5)


def test_bundled_ids_do_not_hide_behind_few_deltas() -> None:
    ceiling = client_ceiling(leg(10, steps=8))
    bundled = client_share(leg(200, steps=2, ids=4), ceiling)  # a request in 0.4 ms, where the client alone needs 0.08 ms
    assert bundled.share == pytest.approx(0.2) and bundled.bound


def test_a_real_client_has_a_ceiling_far_above_any_engine() -> None:
    traces, outputs = closed_loop(NullArm(max_tokens=16), [[1, 2, 3]] * 64, 8)
    assert all(len(output) == 16 for output in outputs)
    found = client_ceiling(traces)
    assert found.deltas_per_s * found.seconds_per_delta == pytest.approx(1)
    assert 1e-8 < found.seconds_per_delta < 1e-3


def summary_of(path: Path, **changes: Any) -> dict[str, Any]:
    return summarize_series(make_series(path / "series", **changes))


def test_an_arm_near_the_ceiling_gets_no_verdict(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, ceiling_us=10, step_us={"on": 50, "off": 900, "pin": 1000})
    assert summary["verdict"] == "INCONCLUSIVE" and "CLIENT-BOUND (on ran at up to" in summary["reasons"][0]
    assert summary["pairs"][1]["withheld"] == [] and "CLIENT-BOUND" in summary["pairs"][2]["withheld"][0]
    assert [summary["ceiling"]["arms"][arm]["bound"] for arm in ("on", "off", "pin")] == [True, False, False]


def test_a_slow_base_does_not_excuse_a_base_near_the_ceiling(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, ceiling_us=10, step_us={"on": 900, "off": 900, "pin": 50})
    assert "CLIENT-BOUND (pin ran" in summary["reasons"][0]


def test_the_leg_nearest_to_the_ceiling_counts(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, ceiling_us=10, noise=0.3)
    rates = [leg["request_throughput"] for leg in summary["arms"]["on"]["performance"]]
    assert summary["ceiling"]["arms"]["on"]["requests_per_s"] == pytest.approx(max(rates)) and max(rates) > min(rates)


def test_far_from_the_ceiling_nothing_changes_and_without_one_nothing_is_claimed(tmp_path: Path) -> None:
    measured, missing = summary_of(tmp_path / "a", ceiling_us=1), summary_of(tmp_path / "b")
    assert measured["verdict"] == missing["verdict"] == "PASS" and missing["ceiling"] is None
    assert measured["ceiling"]["deltas_per_s"] == pytest.approx(64 / measured["ceiling"]["seconds_per_delta"] / 64)
    assert set(measured["arms"]) == {"on", "off", "pin"}, "the null engine is no arm"


def test_another_client_s_ceiling_is_no_ceiling(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, ceiling_us=10, clients=dict.fromkeys(("on", "off", "pin"), "async"),
                         step_us={"on": 50, "off": 50, "pin": 50})
    assert summary["ceiling"]["arms"] == dict.fromkeys(("on", "off", "pin"))


def test_only_the_null_engine_shows_the_ceiling(tmp_path: Path) -> None:
    series = make_series(tmp_path / "series", ceiling_us=10)
    edit_json(layout.leg_folder(series, layout.CEILING, 1, 1, "null") / REQUEST, lambda request: request.update(driver="engine"))
    reseal(series)
    with pytest.raises(EvidenceError, match=r"ceiling/attempt-1/null/request.json: field `driver` is 'engine'"):
        summarize_series(series)


def test_a_ceiling_leg_with_other_work_is_refused(tmp_path: Path) -> None:
    series = make_series(tmp_path / "series", ceiling_us=10)
    folder = layout.leg_folder(series, layout.CEILING, 1, 1, "null")
    traces = read_traces(folder)
    (folder / TRACES).unlink()
    digest = write_traces(folder, traces[:-1])
    edit_json(folder / RESULT, lambda result: result["files"].update({TRACES: digest}))
    reseal(series)
    with pytest.raises(EvidenceError, match=r"ceiling/attempt-1/null/requests.jsonl.gz: field `requests` is \(7, 8\), expected 8"):
        summarize_series(series)


def test_a_failed_ceiling_leg_is_not_measured(tmp_path: Path) -> None:
    series = make_series(tmp_path / "series", ceiling_us=10)
    edit_json(layout.leg_folder(series, layout.CEILING, 1, 1, "null") / layout.LEG, lambda leg: leg.update(status="failed"))
    reseal(series)
    assert summarize_series(series)["ceiling"] is None
