"""What a whole series does with arms that behave and arms that do not, seen through the command line and the folder it leaves."""

from __future__ import annotations

import gzip
import itertools
import json
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import cli
from harness.evidence import store
from harness.series import leg, runner
from tests.e2e import toy
from tests.harness.machine.idle_records import idle_record

VERDICT = (0, 1, 2)
"""A series that ran to its end: the stand-in's speed is noise, so any of these."""

Run = Callable[..., tuple[int, Path]]


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle machine, at once: what the gate itself sees is tested where the gate is."""
    for module in (leg, runner):
        monkeypatch.setattr(module, "check_idle", lambda *_: idle_record())
    judge = leg.summarise_telemetry
    lenient = {"foreign_cpu_max": 1.0, "steal_max": 1.0}
    monkeypatch.setattr(leg, "summarise_telemetry", lambda rows, marks, limits: judge(rows, marks, {**limits, **lenient}))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, idle: None) -> Run:
    """Make a toy checkout and run its series in this process; returns the exit code and the series folder."""
    monkeypatch.setenv(toy.LOCK_VARIABLE, str(tmp_path / "lock"))
    for variable in ("HOME", "TMPDIR"):  # where an arm's compilers keep what they made, others' must not show
        monkeypatch.setenv(variable, str(tmp_path / "home"))

    def do(fault: str = "", *changes: tuple[str, str], spoil: dict[str, tuple[str, str]] | None = None) -> tuple[int, Path]:
        root = tmp_path / "root"
        spec = toy.checkout(root, fault)
        for name, (old, new) in (spoil or {}).items():
            text = (root / name).read_text(encoding="utf-8")
            assert old in text
            (root / name).write_text(text.replace(old, new), encoding="utf-8")
        for old, new in changes:
            text = spec.read_text(encoding="utf-8")
            assert old in text
            spec.write_text(text.replace(old, new), encoding="utf-8")
        monkeypatch.setattr(cli, "repository_root", lambda: root)
        return cli._run(["run-series", str(spec), "--out", str(tmp_path / "out")]), tmp_path / "out"

    return do


def blocks(series: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_bytes()) for path in sorted((series / "blocks").glob("*/*/block.json"))]


def test_a_series_of_good_arms_is_sealed_and_reported(run: Run, tmp_path: Path) -> None:
    code, series = run()
    assert code in VERDICT
    assert [(b["repetition"], b["order"], b["status"]) for b in blocks(series)] == [(1, ["on", "off"], "ok"), (2, ["off", "on"], "ok")]
    gate = json.loads((series / "correctness" / "gate.json").read_bytes())
    assert (gate["ok"], gate["cases"], gate["passed"], gate["skipped"]) == (True, 8, 8, 0)
    assert json.loads((series / "manifest.jsonl").read_text().splitlines()[-1])["sealed"] is True
    assert "## Correctness" in (series / "report.md").read_text()
    assert cli._run(["summarize", str(series)]) == code
    records = [json.loads(path.read_bytes()) for path in series.glob("blocks/*/*/*/leg.json")]
    assert len({record["code_sha256"] for record in records}) == 1, "ON and OFF run one code"


def test_the_client_s_ceiling_is_measured_first_and_is_in_no_arm(run: Run) -> None:
    code, series = run()
    assert code in VERDICT
    folder = series / "ceiling" / "attempt-1" / "null"
    record = json.loads((folder / "leg.json").read_bytes())
    assert (record["leg"], record["phase"], record["status"], record["role"], record["environment"]) == (
        "ceiling-null", "ceiling", "ok", None, {})
    assert (folder / "idle.json").exists() and json.loads((folder.parent / "block.json").read_bytes())["order"] == ["null"]
    first = min(json.loads(path.read_bytes())["started_ns"] for path in series.glob("correctness/*/*/leg.json"))
    assert record["ended_ns"] <= first, "the lock, the idle gate, then the ceiling"
    ceiling = json.loads((series / "summary.json").read_bytes())["ceiling"]
    traces = [json.loads(line) for line in gzip.decompress((folder / "requests.jsonl.gz").read_bytes()).splitlines()]
    window = (max(trace["stamps"][-1][0] for trace in traces) - min(trace["submitted_ns"] for trace in traces)) / 1e9
    assert ceiling["requests_per_s"] == pytest.approx(8 / window)
    assert ceiling["arms"].keys() == {"on", "off"}
    assert "answers at once the `step` client reaches" in (series / "report.md").read_text()


def test_a_ceiling_that_cannot_be_had_is_told_and_blocks_nothing(run: Run) -> None:
    code, series = run(spoil={"legs/drivers/null.py": ("self.steps += 1", "raise SystemExit('no ceiling today')")})
    assert code in VERDICT
    assert [json.loads(path.read_bytes())["status"] for path in sorted(series.glob("ceiling/*/block.json"))] == ["failed"] * 3
    assert json.loads((series / "summary.json").read_bytes())["ceiling"] is None
    (line,) = [line for line in (series / "report.md").read_text().splitlines() if line.startswith("Not measured: ")]
    assert line.startswith("Not measured: ceiling-null: the arm exited with 1") and "no ceiling today" in line


def test_evidence_holds_no_path_and_no_name_of_this_machine(run: Run, tmp_path: Path) -> None:
    _, series = run()
    words = [str(tmp_path), str(toy.ROOT), str(Path.home()), socket.gethostname()]
    for path in series.rglob("*"):
        if path.is_file() and "logs" not in path.relative_to(series).parts and "stage" not in path.relative_to(series).parts:
            data = path.read_bytes()
            text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode(errors="replace")
            assert not [word for word in words if re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text)], path.relative_to(series)


def notes_of(folder: Path) -> list[str]:
    """A leg's notes but for the one on what watching costs, which is much of a leg that lasts for half a second."""
    return [note for note in json.loads((folder / "leg.json").read_bytes())["notes"] if not note.startswith("watching: ")]


def test_a_timed_leg_starts_with_the_model_evicted_from_the_page_cache(run: Run) -> None:
    _, series = run()
    for folder in series.glob("blocks/*/*/o*"):
        record = json.loads((folder / "page_cache.json").read_bytes())
        assert (record["proven"], record["pages_after"], record["files"]) == (True, 0, ["weights"])
        assert json.loads((folder / "guard.json").read_bytes())["read_bytes"] is not None
        assert notes_of(folder) == []
    assert not list(series.glob("correctness/*/*/page_cache.json"))


def test_a_timed_leg_that_compiled_is_noted_and_its_cache_s_state_kept(run: Run) -> None:
    cache = "__import__('pathlib').Path(os.environ['HOME'], '.cache', 'vllm')"
    compile_ = f"({cache}.mkdir(parents=True, exist_ok=True), {cache}.joinpath(request.leg).write_text('x'))"
    code, series = run(f"request.leg == 'performance-1-on' and {compile_}")
    assert code in VERDICT
    legs = {name: series / "blocks" / block / "attempt-1" / arm for name, block, arm in (
        ("before", "performance-1", "on"), ("after", "performance-1", "off"))}
    assert notes_of(legs["before"]) == ["compile cache vllm (cold before): the arm compiled anew, 0 to 1 files, the last of them outside "
                                        "its measured window"]
    assert notes_of(legs["after"]) == []
    states = {name: json.loads((folder / "leg.json").read_bytes())["compile_caches"] for name, folder in legs.items()}
    assert states["before"]["before"]["vllm"] == {"files": 0, "bytes": 0, "newest_ns": 0}
    assert states["before"]["after"]["vllm"] == states["after"]["before"]["vllm"] == states["after"]["after"]["vllm"]
    assert states["after"]["before"].keys() == {"inductor", "triton", "vllm", "engine", "flashinfer"}
    assert "- compile cache vllm (cold before): the arm compiled anew" in (series / "report.md").read_text()


@pytest.mark.parametrize(("proven", "code"), [(False, (3,)), (None, VERDICT)])
def test_a_warm_page_cache_voids_a_timed_leg_and_one_that_cannot_be_proven_is_noted(
    run: Run, monkeypatch: pytest.MonkeyPatch, proven: bool | None, code: tuple[int, ...]
) -> None:
    reasons = ["weights: the reason and the cure"]
    monkeypatch.setattr(leg, "evict", lambda _: {"proven": proven, "pages_before": 1, "pages_after": 1, "reasons": reasons, "files": []})
    found, series = run()
    assert found in code
    folder = series / "blocks" / "performance-1" / "attempt-1" / "on"
    record = json.loads((folder / "leg.json").read_bytes())
    said = ["page cache: weights: the reason and the cure"]
    assert (record["status"], record["reasons"], notes_of(folder)) == (("ok", [], said) if proven is None else ("void", said, []))


def test_a_performance_leg_is_watched_and_its_cost_kept(run: Run) -> None:
    _, series = run()
    for folder in series.glob("blocks/*/*/o*"):
        record = json.loads((folder / "leg.json").read_bytes())
        rows = [json.loads(line) for line in gzip.decompress((folder / "telemetry.jsonl.gz").read_bytes()).splitlines()]
        assert record["telemetry"]["samples"] == len(rows) - 1 >= 1
        assert rows[-1]["cpu_s"] > 0
        assert rows[0]["start_ns"] <= json.loads((folder / "marks.jsonl").read_text().splitlines()[0])["t_ns"] <= rows[-2]["end_ns"]
    assert not list(series.glob("correctness/*/*/telemetry.jsonl.gz"))


def watched(clock: Callable[[], float], reasons: list[str]) -> Callable[..., Any]:
    def summarise(*_: Any) -> Any:
        mhz = clock()
        card = {"index": 0, "name": "card", "sm_clock_mhz": {"min": mhz, "median": mhz, "max": mhz}, "sm_clock_capped_mhz": None,
                "memory_used_max": None, "clock_event_reasons": []}
        return {"gpus": [card]}, reasons, []
    return summarise


def test_what_the_watcher_saw_voids_the_leg_and_its_block(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leg, "summarise_telemetry", watched(lambda: 1980, ["foreign cpu: pid 4711 (stress)"]))
    code, series = run()
    assert code == 3
    assert [(b["attempt"], b["status"], b["reasons"]) for b in blocks(series)] == [
        (attempt, "void", ["performance-1-on: foreign cpu: pid 4711 (stress)"]) for attempt in (1, 2, 3)]


@pytest.mark.parametrize(("second", "void"), [(1965, False), (1950, True)])
def test_arms_at_two_clocks_void_their_block(run: Run, monkeypatch: pytest.MonkeyPatch, second: int, void: bool) -> None:
    clocks = itertools.cycle((1980, second))
    monkeypatch.setattr(leg, "summarise_telemetry", watched(lambda: next(clocks), []))
    code, series = run()
    assert code in ((3,) if void else VERDICT)
    first = blocks(series)[0]
    assert first["status"] == ("void" if void else "ok")
    assert first["reasons"] == (["gpu 0 (card): SM clock 1980 MHz in on, 1950 in off (medians at most 1% apart); lock the clocks, or let "
                                 "the card cool"] if void else [])


def test_a_second_run_into_the_same_folder_changes_nothing(run: Run, tmp_path: Path) -> None:
    _, series = run()
    before = {path: path.read_bytes() for path in series.rglob("*") if path.is_file()}
    assert cli._run(["run-series", str(tmp_path / "root" / "toy.toml"), "--out", str(series)]) == 5
    assert before == {path: path.read_bytes() for path in series.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("fault", "status", "said"), [
    ("raise SystemExit('out of luck')", "failed", "out of luck"),
    ("import time; time.sleep(60)", "hung", "leg_timeout_s = 1"),
    ("request.options['dtype'] = 'bfloat16'", "failed", "declared 'float32', resolved 'bfloat16'"),
    ("Arm.counters = lambda self: {'prefix_cache_hits': None, 'preemptions': 0}", "void", "prefix_cache_hits is unreadable"),
    ("import sys; sys.path.append('/repository')", "failed", "from outside its stage"),
])
def test_a_bad_arm_is_tried_three_times_and_all_is_kept(run: Run, fault: str, status: str, said: str) -> None:
    code, series = run(fault, ("leg_timeout_s = 60", "leg_timeout_s = 1"))
    assert code == (3 if status == "void" else 4)
    attempts = [json.loads(path.read_bytes()) for path in sorted(series.glob("correctness/*/block.json"))]
    assert [attempt["status"] for attempt in attempts] == [status] * 3
    assert said in attempts[0]["reasons"][0]
    assert not (series / "blocks").exists(), "no timing without correctness"
    assert said in (series / "report.md").read_text()


def test_a_block_that_fails_once_is_repeated_whole(run: Run, tmp_path: Path) -> None:
    flag = tmp_path / "once"
    fault = f"if request.leg == 'performance-1-off' and not os.path.exists('{flag}'): open('{flag}', 'w').close(); os._exit(3)"
    code, series = run(fault)
    assert code in VERDICT
    assert [(b["repetition"], b["attempt"], b["status"], b["order"]) for b in blocks(series)] == [
        (1, 1, "failed", ["on", "off"]), (1, 2, "ok", ["on", "off"]), (2, 1, "ok", ["off", "on"])]
    assert (series / "blocks" / "performance-1" / "attempt-1" / "on" / "result.json").exists()


def test_wrong_ids_stop_the_series_before_any_timing(run: Run) -> None:
    fault = "Arm.submit = lambda self, i, prompt: self.open.update({i: [(i + k) % 50 for k in range(3)] + [7]})"
    code, series = run(fault)
    assert code not in (0, 1)
    assert not (series / "blocks").exists()
    gate = json.loads((series / "correctness" / "gate.json").read_bytes())
    assert gate["failures"][0] == {"arm": "on", "request": 0, "position": 3, "expected": 3, "got": 7}


def test_a_busy_machine_is_refused_and_nothing_ran(run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    busy = {"ok": False, "reasons": ["process 4711 (stress) used 98 % of a core"]}
    monkeypatch.setattr(runner, "check_idle", lambda *_: busy)
    code, series = run()
    assert code == 5
    assert not series.exists()
    assert "process 4711 (stress)" in capsys.readouterr().err


def test_a_machine_that_turns_busy_voids_the_block(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = {"schema": 1, "ok": False, "reasons": ["process 4711 (stress)"], "samples": [], "waited_s": 90.0, "load1": 2.0,
            "since_previous_s": None, "limits": {}}
    monkeypatch.setattr(leg, "check_idle", lambda *_: busy)
    code, series = run()
    assert code == 3
    assert "not idle: process 4711" in json.loads((series / "correctness" / "attempt-1" / "block.json").read_bytes())["reasons"][0]


def test_usage_errors_are_64(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli._run(["run-series"]) == 64
    assert cli._run(["run-series", "x.toml", "--lock-timeout", "soon"]) == 64
    assert cli._run(["run-series", str(tmp_path / "none.toml")]) == 64
    assert "none.toml" in capsys.readouterr().err


def test_a_changed_spec_cannot_resume(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, series = run()
    spec = tmp_path / "root" / "toy.toml"
    assert cli._run(["run-series", str(spec), "--resume", str(series)]) == 4
    assert "complete and sealed" in capsys.readouterr().err
    manifest = series / "manifest.jsonl"
    manifest.write_text("".join(line for line in manifest.read_text().splitlines(keepends=True) if "sealed" not in line))
    spec.write_text(spec.read_text().replace("margin = 0.02", "margin = 0.03"), encoding="utf-8")
    assert cli._run(["run-series", str(spec), "--resume", str(series)]) == 4
    assert "begin a new series" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["ceiling/attempt-1", "correctness/attempt-1", "warmup/attempt-2", "blocks/memory-1/attempt-1"])
def test_what_a_killed_runner_left_open_is_closed(tmp_path: Path, place: str) -> None:
    store.create_series(tmp_path / "out")
    left = tmp_path / "out" / place / "arm" / "request.json"
    left.parent.mkdir(parents=True)
    left.write_text("{}")
    runner._adopt(tmp_path / "out")
    block = json.loads((tmp_path / "out" / place / "block.json").read_bytes())
    assert (block["status"], block["order"], block["attempt"]) == ("interrupted", ["arm"], int(place[-1]))
    assert block["phase"] == place.split("/")[-2].removesuffix("-1")
    assert store.unrecorded(tmp_path / "out") == []


def wait_for(path: Path, process: subprocess.Popen[str], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, path
        time.sleep(0.05)


@pytest.mark.slow
def test_the_lock_excludes_both_ways_and_names_its_holder(tmp_path: Path) -> None:
    root = tmp_path / "root"
    spec = toy.checkout(root, "import time; time.sleep(30)")
    argv, environment = toy.command(root, "run-series", spec, "--out", tmp_path / "out", "--lock-timeout", "1")
    with subprocess.Popen(["flock", str(root / "lock"), "sleep", "20"]) as holder:
        time.sleep(0.3)
        refused = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
        holder.terminate()
    assert refused.returncode == 5
    assert str(root / "lock") in refused.stderr
    assert "flock" in refused.stderr or str(holder.pid) in refused.stderr
    subprocess.run(["flock", str(root / "lock"), "true"], check=True)
    with subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as series:
        wait_for(tmp_path / "out" / "correctness" / "attempt-1" / "on" / "marks.jsonl", series)
        assert subprocess.run(["flock", "-n", str(root / "lock"), "true"], check=False).returncode != 0
        series.send_signal(signal.SIGINT)
        series.communicate(timeout=30)
        assert series.returncode == 130
    subprocess.run(["flock", "-n", str(root / "lock"), "true"], check=True)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)])
def test_an_interrupted_series_leaves_nothing_running_and_resumes(tmp_path: Path, how: signal.Signals, code: int) -> None:
    root = tmp_path / "root"
    flag = tmp_path / "once"
    fault = (f"if request.leg == 'performance-1-on' and not os.path.exists('{flag}'):\n"
             f"        open('{flag}', 'w').write(str(os.getpid()))\n        time.sleep(60)")
    spec = toy.checkout(root, fault)
    spec.write_text(spec.read_text().replace("performance = 2", "performance = 1"), encoding="utf-8")
    argv, environment = toy.command(root, "run-series", spec, "--out", tmp_path / "out")
    with subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as series:
        wait_for(flag, series, 90)
        time.sleep(0.2)
        arm = int(flag.read_text())
        series.send_signal(how)
        series.communicate(timeout=30)
        assert series.returncode == code
    subprocess.run(["flock", "-w", "5", str(root / "lock"), "true"], check=True)
    assert not Path(f"/proc/{arm}").exists(), "the arm outlived its series"
    argv, environment = toy.command(root, "run-series", spec, "--resume", tmp_path / "out")
    finished = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode in VERDICT, finished.stderr
    found = blocks(tmp_path / "out")
    # Here the gate looks at the machine as it is: company while the tests run voids an attempt more.
    assert [b["status"] for b in found if b["status"] != "void"] == ["interrupted", "ok"]
    assert len(list((tmp_path / "out" / "lock").glob("*-acquired.json"))) == 2
    done = [json.loads(path.read_bytes())["status"] for path in (tmp_path / "out" / "correctness").glob("*/block.json")]
    assert done.count("ok") == 1, "what was done is not done again"
