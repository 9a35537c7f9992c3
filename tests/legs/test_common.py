"""The shared part of a leg, run in a process of its own with a small fake engine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from legs import protocol
from legs.protocol import Corpus, LegRequest

ROOT = Path(__file__).resolve().parents[2]
CORPUS = Corpus(
    name="tiny", source="test", vocab_size=50, prompts=tuple((i, i + 1, i + 2) for i in range(5)), warmup=((40, 41), (42, 43)),
)
DRIVER = '''
import os
from legs.client import Delta
from legs.drivers.common import main


class Arm:
    def __init__(self, length):
        self.length, self.open, self.steps, self.prompts = length, {}, 0, []

    def submit(self, index, prompt):
        self.prompts.append(list(prompt))
        self.open[index] = [sum(prompt) % 50 for _ in range(self.length)]

    def step(self):
        self.steps += 1
        out = []
        for index, left in list(self.open.items()):
            out.append(Delta(index, [left.pop()], None if left else "length"))
            if not left:
                del self.open[index]
        return out

    def who(self):
        return {"name": "fake"}

    def device(self):
        return {"kind": "cpu", "name": "", "count": 1}

    def resolved(self):
        return {"prompts": self.prompts}

    def counters(self):
        return {"steps": self.steps, "preemptions": None, "sampler_calls": {"greedy": self.steps}}

    def pids(self):
        return [os.getpid()]

    def close(self):
        pass


def build(request, model, marks):
    marks("load_start")
    assert model.name == "model"
    if request.options.get("fail"):
        raise RuntimeError("no such weights")
    marks("loaded")
    return Arm(request.max_tokens)


if __name__ == "__main__":
    main(build)
'''


def run_leg(tmp_path: Path, **changes: Any) -> tuple[subprocess.CompletedProcess[str], Path]:
    stage, folder = tmp_path / "stage", tmp_path / "leg"
    stage.mkdir()
    folder.mkdir()
    (stage / "legs").symlink_to(ROOT / "legs")
    corpus = tmp_path / "tiny.json.gz"
    corpus.write_bytes(protocol.corpus_bytes(CORPUS))
    fields: dict[str, Any] = {
        "protocol": 1, "leg": "x", "phase": "performance", "arm": "fake", "driver": "fake", "corpus": str(corpus),
        "corpus_sha256": protocol.sha256(corpus.read_bytes()), "requests": 5, "warmup_requests": 2, "max_tokens": 4, "min_tokens": 4,
        "ignore_eos": True, "concurrency": 2, "client": "step", "options": {},
    }
    protocol.write_request(folder, LegRequest(**{**fields, **changes}))
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(stage), "PYTHONDONTWRITEBYTECODE": "1",
                   protocol.MODEL_VARIABLE: str(tmp_path / "model")}
    return subprocess.run([sys.executable, str(driver)], cwd=folder, env=environment, capture_output=True, text=True, check=False), folder


def test_a_leg_leaves_all_its_files_and_they_agree(tmp_path: Path) -> None:
    done, folder = run_leg(tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((folder / protocol.RESULT).read_bytes())
    assert result["counts"] == {"requests": 5, "prompt_tokens": 15, "output_tokens": 20}
    assert result["resolved"]["prompts"] == [list(prompt) for prompt in (*CORPUS.warmup, *CORPUS.prompts)], "warm-up first, then all"
    assert protocol.read_outputs(folder) == [[sum(prompt)] * 4 for prompt in CORPUS.prompts]
    for name in (protocol.TRACES, protocol.OUTPUTS):
        assert result["files"][name] == protocol.sha256((folder / name).read_bytes())
    marks = {line["mark"]: line["t_ns"] for line in protocol.read_marks(folder)}
    times = [marks[name] for name in protocol.MARK_NAMES]
    assert times == sorted(times)
    traces = protocol.read_traces(folder)
    assert marks["first_submit"] == traces[0].submitted_ns
    assert marks["last_token"] == max(trace.stamps[-1][0] for trace in traces)


def test_counters_are_of_the_measured_window_alone_and_unread_ones_stay_null(tmp_path: Path) -> None:
    done, folder = run_leg(tmp_path)
    assert done.returncode == 0, done.stderr
    counters = json.loads((folder / protocol.RESULT).read_bytes())["counters"]
    # five requests of four ids, two in flight: 2 + 2 + 1 requests in turn, four steps each; the warm-up's four steps are not counted
    assert counters == {"steps": 12, "preemptions": None, "sampler_calls": {"greedy": 12}}


@pytest.mark.parametrize(("changes", "says"), [
    ({"corpus_sha256": "0" * 64}, "sha256 is"),
    ({"requests": 6}, "holds 5 prompts"),
    ({"warmup_requests": 3}, "2 warm-up prompts"),
    ({"client": "async"}, "'async' is not built"),
    ({"options": {"fail": True}}, "no such weights"),
])
def test_a_leg_that_cannot_do_its_work_leaves_no_result(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    done, folder = run_leg(tmp_path, **changes)
    assert done.returncode != 0
    assert says in done.stderr
    assert not (folder / protocol.RESULT).exists()
