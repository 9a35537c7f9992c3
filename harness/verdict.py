"""The five verdicts of a series, and the exit codes of every command."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes.  The first five are verdicts of a series; after REFUSED nothing ran."""

    PASS = 0
    FAIL = 1
    INCONCLUSIVE = 2
    VOID = 3
    ERROR = 4
    REFUSED = 5
    USAGE = 64
    INTERRUPTED = 130


VERDICTS = (Exit.PASS, Exit.FAIL, Exit.INCONCLUSIVE, Exit.VOID, Exit.ERROR)
