"""The `parity` command.  Each function parses, calls, prints; what it calls decides."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from harness.series.stage import repository_root
from harness.verdict import Exit

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich",
    help="Prove, with numbers that carry their doubt, how an LLM inference engine stands against a pinned vLLM.",
    epilog="Exit codes: 0 PASS, 1 FAIL, 2 INCONCLUSIVE, 3 VOID, 4 ERROR, 5 REFUSED (nothing ran), 64 usage, 130 interrupted (resumable).",
)
tokens_app = typer.Typer(no_args_is_help=True, help="Compare output token ids.")
oracle_app = typer.Typer(no_args_is_help=True, help="The pinned vLLM builds that series are measured against.")
records_app = typer.Typer(no_args_is_help=True, help="What is said of a sealed series afterwards: VOID and corrections, only ever added.")
app.add_typer(records_app, name="records")
app.add_typer(tokens_app, name="tokens")
app.add_typer(oracle_app, name="oracle")

out_console = Console()
err_console = Console(stderr=True)

SpecArgument = Annotated[Path, typer.Argument(metavar="SPEC", help="A series file, such as legs/series/quick.toml.")]
SeriesArgument = Annotated[Path, typer.Argument(metavar="DIR", help="A series folder.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for a machine to read.")]


OutOption = Annotated[Path | None, typer.Option(help="Folder for the evidence; must not exist. [default: series/NAME-TIME]")]
ResumeOption = Annotated[Path | None, typer.Option(metavar="DIR", help="Go on with this series at its first incomplete block.")]
LockOption = Annotated[Path | None, typer.Option(help="The machine's one lock file. [default: $PARITY_LOCK or /tmp/vllm-parity.lock]")]
LockTimeoutOption = Annotated[float | None, typer.Option(help="Seconds to wait for the lock. [default: wait]")]


@app.command("run-series")
def run_series(
    spec: SpecArgument, out: OutOption = None, resume: ResumeOption = None, lock: LockOption = None,
    lock_timeout: LockTimeoutOption = None, as_json: JsonOption = False,
) -> int:
    """Run a whole series under one lock and write its evidence and report."""
    from harness.series.runner import run_series as carry_out

    return _carry_out(carry_out, spec, out, resume, lock, lock_timeout, as_json)


@app.command()
def ab(
    spec: SpecArgument, out: OutOption = None, resume: ResumeOption = None, lock: LockOption = None,
    lock_timeout: LockTimeoutOption = None, as_json: JsonOption = False,
) -> int:
    """Run a series of one build and one difference (or none: an A/A); a spec that is neither is refused."""
    from harness.ab import run_ab

    return _carry_out(run_ab, spec, out, resume, lock, lock_timeout, as_json)


@app.command()
def calibrate(
    out: Annotated[Path | None, typer.Option(help="Folder for the evidence; must not exist. [default: series/calibration-TIME]")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="DIR", help="Go on with this calibration, or read it when complete.")] = None,
    lock: LockOption = None, lock_timeout: LockTimeoutOption = None, as_json: JsonOption = False,
) -> int:
    """Inject known faults into real legs of our engine: does this instrument notice each? Exit 0 when every case is as expected."""
    from harness.calibrate import calibrate as carry_out
    from harness.machine.lock import lock_path
    from harness.report.calibration import page

    folder = _folder("calibration", out, resume)
    record = carry_out(repository_root(), folder.absolute(), resume is not None, lock_path(lock), lock_timeout, err_console)
    print(json.dumps(record, indent=2) if as_json else page(record))
    return Exit.PASS if record["ok"] else Exit.FAIL


@app.command()
def nightly(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A list of series, such as legs/nightly/quick.toml.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the evidence; must not exist. [default: series/CONFIG-TIME]")] = None,
    lock: LockOption = None, lock_timeout: LockTimeoutOption = None,
) -> int:
    """Run a list of series and write one page about them, also to the file that GITHUB_STEP_SUMMARY names; exit by the worst verdict."""
    from harness.machine.lock import lock_path
    from harness.nightly import load_nightly, run_nightly, worst
    from harness.report.nightly import publish

    asked, folder = load_nightly(repository_root(), config), _folder(config.stem, out, None).absolute()
    nights = run_nightly(repository_root(), asked, folder, lock_path(lock), lock_timeout, err_console)
    print(publish(folder, asked.title, nights))
    return worst(nights)


@app.command()
def plan(spec: SpecArgument, as_json: JsonOption = False) -> int:
    """Print what a series would run, leg by leg, without running anything."""
    from harness.report.terminal import print_plan
    from harness.series.runner import prepare

    made = prepare(repository_root(), spec).plan
    if as_json:
        print(json.dumps(made, indent=2))
    else:
        print_plan(made, out_console)
    return Exit.PASS


@app.command()
def summarize(series: SeriesArgument, as_json: JsonOption = False) -> int:
    """Check a series' seal, recompute its summary from the evidence and print it."""
    from harness.report.build import summarize_series

    summary = summarize_series(series)
    _show_summary(summary, series, as_json)
    return int(summary["exit_code"])


@app.command()
def report(series: SeriesArgument) -> int:
    """Write report.md, its plots and summary.json anew from the evidence."""
    from harness.report.build import build_report

    summary = build_report(series)
    out_console.print(f"{series / 'report.md'}", highlight=False, soft_wrap=True)
    return int(summary["exit_code"])


@app.command()
def verify(series: SeriesArgument, as_json: JsonOption = False) -> int:
    """Check a series' seal and recompute summary, report and plots from the evidence; exit 1 at a difference, 4 at a broken seal."""
    from harness.evidence.verify import to_lines
    from harness.evidence.verify import verify as check

    checks = check(series)
    if as_json:
        print(json.dumps([dataclasses.asdict(one) for one in checks], indent=2))
    else:
        for line in to_lines(checks):
            out_console.print(line, markup=False, highlight=False, soft_wrap=True)
    return Exit.PASS if all(one.difference is None for one in checks) else Exit.FAIL


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(metavar="A", help="The earlier series.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="The later series.")],
    as_json: JsonOption = False,
) -> int:
    """Say what moved between two series, against the arm that did not change; exit 1 when an arm moved, 2 when nothing may be said."""
    from harness.report.build import compare_dirs
    from harness.report.drift import drift_exit, drift_lines

    found = compare_dirs(before, after)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        for line in drift_lines(found):
            out_console.print(line, markup=False, highlight=False, soft_wrap=True)
    return drift_exit(found)


@app.command()
def scoreboard(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 when the page is not what results/ gives.")] = False,
) -> int:
    """Generate docs/BENCHMARKS.md from the sealed series in results/."""
    from harness.report.scoreboard import render_scoreboard

    root = repository_root()
    page, text = root / "docs" / "BENCHMARKS.md", render_scoreboard(root / "results")
    if not check:
        page.write_text(text, encoding="utf-8")
    same = page.is_file() and page.read_text(encoding="utf-8") == text
    state = "as results/ gives it" if same else "differs from what results/ gives; run `parity scoreboard`"
    out_console.print(f"docs/BENCHMARKS.md: {state}", markup=False, highlight=False, soft_wrap=True)
    return Exit.PASS if same else Exit.FAIL


@app.command("recheck-idle")
def recheck_idle(series: SeriesArgument, as_json: JsonOption = False) -> int:
    """Judge a series' stored idle snapshots again; exit 3 when a leg ran on a contended machine."""
    from harness.machine.idle_rule import limits_from_environment
    from harness.series.recheck import recheck_idle as judge
    from harness.series.recheck import recheck_lines

    try:
        limits = limits_from_environment()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    found = judge(series, limits)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        for line in recheck_lines(found):
            out_console.print(line, markup=False, highlight=False, soft_wrap=True)
    return Exit.PASS if found["label"] == "idle" else Exit.VOID


@tokens_app.command("diff")
def tokens_diff(
    series: SeriesArgument,
    other: Annotated[Path | None, typer.Argument(metavar="[OTHER]", help="Another series: compare leg by leg.")] = None,
    as_json: JsonOption = False,
) -> int:
    """Name the first request and position at which outputs differ; exit 1 unless all are equal."""
    from harness.analysis.tokens import diff_dirs, diff_series

    found = diff_series(series) if other is None else diff_dirs(series, other)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        for line in found["lines"]:
            out_console.print(line, markup=False, highlight=False, soft_wrap=True)
    return Exit.PASS if found["identical"] else Exit.FAIL


@app.command("near-tie")
def near_tie(
    series: SeriesArgument,
    out: Annotated[Path | None, typer.Option(help="Folder for the record. [default: DIR-near-tie; one that is there is read]")] = None,
    lock: Annotated[Path | None, typer.Option(help="The machine's one lock file. [default: $PARITY_LOCK or /tmp/vllm-parity.lock]")] = None,
    lock_timeout: Annotated[float | None, typer.Option(help="Seconds to wait for the lock. [default: wait]")] = None,
    as_json: JsonOption = False,
) -> int:
    """Have a series' oracle judge our ids: identical, near-tie or wrong; exit 1 when any is wrong."""
    from harness.machine.lock import lock_path
    from harness.near_tie import near_tie as judge
    from harness.report.near_tie import lines

    folder, found = judge(repository_root(), series.absolute(), out, lock_path(lock), lock_timeout, err_console)
    for line in [json.dumps(found, indent=2)] if as_json else [*lines(found), "", f"record: {folder.name}, sealed"]:
        out_console.print(line, markup=False, highlight=False, soft_wrap=True)
    return Exit.FAIL if any(arm["wrong"] for arm in found["arms"]) else Exit.PASS


@records_app.command("add")
def records_add(
    kind: Annotated[str, typer.Argument(help="`void` or `correction`.")],
    series: Annotated[str, typer.Argument(help="A series of results/, by its folder's name.")],
    reason: Annotated[str, typer.Argument(help="Why, in a sentence.")],
    supersedes: Annotated[int | None, typer.Option(help="The record that stands for this series now, when there is one.")] = None,
) -> int:
    """Add a record to results/records.jsonl; the scoreboard shows it."""
    from harness.evidence.records import add_record

    record = add_record(repository_root() / "results", kind, series, reason, supersedes)
    out_console.print(f"record {record.number}: {kind} {series}", markup=False, highlight=False, soft_wrap=True)
    return Exit.PASS


@records_app.command("check")
def records_check(base: Annotated[str | None, typer.Option(help="A commit whose records must all still be there.")] = None) -> int:
    """Check that results/records.jsonl is whole, and that since a commit it only grew."""
    from harness.evidence.records import RECORDS, check_grown, committed_records, read_records

    root = repository_root()
    records = read_records(root / "results")
    path = root / "results" / RECORDS
    if base is not None:
        check_grown(committed_records(root, base), path.read_text(encoding="utf-8") if path.exists() else "")
    out_console.print(f"{len(records)} records, whole{f', none lost since {base}' if base else ''}", markup=False, highlight=False)
    return Exit.PASS


@oracle_app.command("install")
def oracle_install(
    name: Annotated[str, typer.Argument(help="An oracle of `parity oracle list`.")],
    kit: Annotated[Path | None, typer.Option(help="Folder of a kit, for a machine without a package index.")] = None,
) -> int:
    """Build an oracle's own environment from its lock file, or from a kit; does nothing when it is there already."""
    from harness.oracle import load_oracle
    from harness.oracle_install import install_oracle

    root = repository_root()
    install_oracle(load_oracle(name, root), root, lambda line: err_console.print(line, markup=False, highlight=False), kit)
    return Exit.PASS


@oracle_app.command("list")
def oracle_list(as_json: JsonOption = False) -> int:
    """List the oracles and whether each is installed."""
    from harness.oracle import describe_oracle, list_oracles

    root = repository_root()
    rows = [describe_oracle(oracle, root) for oracle in list_oracles(root)]
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        for row in rows:
            state = "installed" if row["installed"] else "not installed"
            out_console.print(f"{row['name']}: {row['distribution']} {row['version']}, {state}", highlight=False)
    return Exit.PASS


@oracle_app.command("show")
def oracle_show(name: Annotated[str, typer.Argument(help="An oracle of `parity oracle list`.")], as_json: JsonOption = False) -> int:
    """Print what an oracle is pinned to."""
    from harness.oracle import describe_oracle, load_oracle

    root = repository_root()
    described = describe_oracle(load_oracle(name, root), root)
    if as_json:
        print(json.dumps(described, indent=2))
    else:
        for field, value in described.items():
            out_console.print(f"{field}: {value}", markup=False, highlight=False)
    return Exit.PASS


@app.command()
def doctor(as_json: JsonOption = False) -> int:
    """Say whether this machine can run a series now, and what to do where it cannot."""
    from harness.doctor import examine

    findings = examine(repository_root())
    if as_json:
        print(json.dumps(findings, indent=2))
    else:
        for finding in findings:
            line = f"{'ok  ' if finding['ok'] else 'MISS'} {finding['name']}: {finding['detail']}"
            out_console.print(line, markup=False, highlight=False, soft_wrap=True)
    return Exit.PASS if all(finding["ok"] for finding in findings) else Exit.REFUSED


def _carry_out(
    run: Callable[..., dict[str, Any]], spec: Path, out: Path | None, resume: Path | None, lock: Path | None,
    lock_timeout: float | None, as_json: bool,
) -> int:
    from harness.machine.lock import lock_path

    folder = _folder(spec.stem, out, resume)
    summary = run(repository_root(), spec, folder.absolute(), resume is not None, lock_path(lock), lock_timeout, err_console)
    _show_summary(summary, folder, as_json)
    return int(summary["exit_code"])


def _folder(name: str, out: Path | None, resume: Path | None) -> Path:
    if out is not None and resume is not None:
        raise typer.BadParameter("give --out for a new series or --resume for an old one, not both")
    return resume or out or Path("series") / f"{name}-{datetime.now(UTC).strftime('%Y%m%dT%H%M%SZ')}"


def _show_summary(summary: dict[str, Any], series: Path, as_json: bool) -> None:
    from harness.report.terminal import print_summary

    if as_json:
        print(json.dumps(summary, indent=2))
    else:
        print_summary(summary, series, out_console)


def main() -> None:
    """Entry point: run the command and turn every expected failure into one line and its exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a terminated series ends as cleanly as an interrupted one
    sys.exit(_run(sys.argv[1:]))


def _run(arguments: list[str]) -> int:
    from harness.calibrate import CalibrationVoid
    from harness.evidence.schema import EvidenceError
    from harness.evidence.store import BrokenSeal
    from harness.machine.lock import LockError
    from harness.oracle import OracleError
    from harness.series.runner import CannotResume, Refused
    from harness.strict import SpecError

    def fail(code: Exit, text: str) -> int:
        err_console.print(f"{code.name}: {text}", markup=False, highlight=False, soft_wrap=True)
        return code

    # typer may bring a click of its own: the base of all usage errors is reached through the one that typer names
    usage_error: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
    try:
        returned = app(arguments, standalone_mode=False)
        return int(returned or 0)
    except usage_error as error:
        error.show()
        return Exit.USAGE
    except SpecError as error:
        return fail(Exit.USAGE, str(error))
    except (Refused, OracleError, LockError) as error:
        return fail(Exit.REFUSED, str(error))
    except CalibrationVoid as error:
        return fail(Exit.VOID, str(error))
    except (CannotResume, EvidenceError, BrokenSeal, FileExistsError) as error:
        return fail(Exit.ERROR, str(error))
    except (KeyboardInterrupt, typer.Abort):
        return fail(Exit.INTERRUPTED, "interrupted; a series or a calibration goes on with `--resume DIR`")


if __name__ == "__main__":
    main()
