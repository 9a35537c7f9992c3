"""The null engine as a leg of its own, through the same shared part and client as every arm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from legs import protocol
from legs.protocol import COMMON_OPTIONS, LegRequest
from tests.legs.test_common import CORPUS, ROOT


def run_null(tmp_path: Path, **changes: Any) -> tuple[subprocess.CompletedProcess[str], Path]:
    folder, corpus = tmp_path / "leg", tmp_path / "tiny.json.gz"
    folder.mkdir()
    corpus.write_bytes(protocol.corpus_bytes(CORPUS))
    fields: dict[str, Any] = {
        "protocol": 1, "leg": "ceiling-null", "phase": "ceiling", "arm": "null", "driver": "null", "corpus": str(corpus),
        "corpus_sha256": protocol.sha256(corpus.read_bytes()), "requests": 5, "warmup_requests": 2, "max_tokens": 4, "min_tokens": 4,
        "ignore_eos": True, "concurrency": 2, "client": "step", "options": {},
    }
    protocol.write_request(folder, LegRequest(**{**fields, **changes}))
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1",
                   protocol.MODEL_VARIABLE: str(tmp_path / "no model")}
    done = subprocess.run([sys.executable, "-m", "legs.drivers.null"], cwd=folder, env=environment, capture_output=True, text=True,
                          check=False)
    return done, folder


def test_it_answers_every_request_in_full_and_at_once(tmp_path: Path) -> None:
    done, folder = run_null(tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((folder / protocol.RESULT).read_bytes())
    assert result["counts"] == {"requests": 5, "prompt_tokens": 15, "output_tokens": 20}
    assert protocol.read_outputs(folder) == [[0] * 4] * 5
    traces = protocol.read_traces(folder)
    assert all(len(trace.stamps) == 4 and trace.finish == "length" for trace in traces)
    assert result["counters"]["steps"] == 12 and result["counters"]["mixed_steps"] is None
    assert set(COMMON_OPTIONS) <= result["resolved"].keys() and result["who"]["name"] == "null"


def test_it_has_no_options(tmp_path: Path) -> None:
    done, folder = run_null(tmp_path, options={"threads": 2})
    assert done.returncode != 0 and "options ['threads']: the null engine has none" in done.stderr
    assert not (folder / protocol.RESULT).exists()


def test_it_loads_no_torch_and_no_engine() -> None:
    code = "import sys, legs.drivers.null; sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'engine', 'vllm')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
