"""Run the tests that need a card, and record what came of it.

    python -m tools.bench.gpu_tests OUT.json [--commit HASH] [pytest arguments]

The record names the commit and, since a machine with a card may have no repository, the hash of the code and tests that ran.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from legs.protocol import sha256, to_json

TESTS = "tests/engine/gpu"
CODE = ("engine", "tests/engine", "legs")


def counts(report: Path) -> dict[str, Any]:
    """Passed, failed (errors included) and skipped tests of a JUnit report, the failed by name, the skipped by reason, and the seconds."""
    cases = list(ET.parse(report).getroot().iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case.find("skipped") for case in cases if case.find("skipped") is not None]
    return {
        "passed": len(cases) - len(failed) - len(skipped), "failed": len(failed), "skipped": len(skipped),
        "failures": sorted(f"{case.get('classname')}::{case.get('name')}" for case in failed),
        "skips": sorted({str(one.get("message")) for one in skipped if one is not None}),
        "seconds": round(sum(float(case.get("time", 0)) for case in cases), 1),
    }


def code_sha256(root: Path) -> str:
    """One hash over the Python files below CODE: their relative paths and contents, sorted."""
    files = sorted(path for part in CODE for path in (root / part).rglob("*.py"))
    return sha256("".join(f"{path.relative_to(root)} {sha256(path.read_bytes())}\n" for path in files).encode())


def device() -> dict[str, Any]:
    """The card and the versions that matter to it."""
    import torch
    import triton

    return {
        "device": torch.cuda.get_device_name(), "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "versions": {"python": sys.version.split()[0], "torch": str(torch.__version__), "triton": triton.__version__},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: pytest's exit code."""
    parser = argparse.ArgumentParser(prog="gpu_tests", description="Run the tests that need a card and record the outcome.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--commit", help="commit of the code, where the machine has no repository")
    options, rest = parser.parse_known_args(arguments)
    root = Path(__file__).resolve().parents[2]
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [sys.executable, "-m", "pytest", TESTS, "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}", *rest]
        code = subprocess.run(command, cwd=root, check=False).returncode
        found = counts(report)
    record = {"schema": 1, "commit": options.commit, "code_sha256": code_sha256(root),
              "finished": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", "exit_code": code, "arguments": rest, **found, **device()}
    options.out.write_bytes(to_json(record))
    print({key: record[key] for key in ("passed", "failed", "skipped", "failures", "skips")})
    return code


if __name__ == "__main__":
    sys.exit(main())
