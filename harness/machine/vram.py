"""The lowest memory use of each GPU seen since this machine booted, kept beside the series lock: what a card without guests holds."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.machine import host

SCHEMA = 1


class VramUnreadable(Exception):
    """The file is there and says nothing; the message names it and the cure."""


class LowestVram:
    """{"schema", "boot_id", "lowest": {GPU uuid: bytes}} in `LOCK.vram`; one of another boot is begun anew."""

    def __init__(self, lock: Path, boot_id: str | None = None) -> None:
        self._path = lock.with_name(f"{lock.name}.vram")
        self._boot_id = boot_id or host.boot_id()

    def lower(self, used: Mapping[str, int]) -> dict[str, int]:
        """Take these readings in (bytes by uuid) and return the lowest of each card.  Raises :class:`VramUnreadable`.

        Where another user's file cannot be replaced, the lower reading holds for this call only.
        """
        known = self._read()
        lowest = {**known, **{uuid: min(value, known.get(uuid, value)) for uuid, value in used.items()}}
        if lowest != known:
            with suppress(OSError):
                self._write(lowest)
        return lowest

    def _read(self) -> dict[str, int]:
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(descriptor, encoding="utf-8") as source:
                record: dict[str, Any] = json.load(source)
            if record["boot_id"] != self._boot_id:
                return {}
            return {str(uuid): int(value) for uuid, value in record["lowest"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise VramUnreadable(
                f"{self._path.name} beside the lock cannot be read ({error}); remove it while the machine is idle") from None

    def _write(self, lowest: Mapping[str, int]) -> None:
        scratch = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(os.open(scratch, flags, 0o644), "w", encoding="utf-8") as sink:
                json.dump({"schema": SCHEMA, "boot_id": self._boot_id, "lowest": lowest}, sink)
            os.replace(scratch, self._path)
        except OSError:
            with suppress(OSError):
                scratch.unlink()
            raise
