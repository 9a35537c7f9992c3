"""What a person sees while a series runs: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import defaultdict

from rich.console import Console
from rich.status import Status

PLAIN_PERIOD_S = 15.0


class Progress:
    """Which leg of how many, the arm and phase, tokens/s so far, time left (from the durations of like legs, None until one ended)."""

    def __init__(self, console: Console, legs: int) -> None:
        self._console, self._left, self._legs = console, legs, legs
        self._live: Status | None = None
        self._durations: dict[str, list[float]] = defaultdict(list)
        self._name, self._kind, self._started, self._said = "", "", 0.0, 0.0

    def say(self, text: str) -> None:
        """One lasting line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def leg(self, name: str, kind: str) -> None:
        """A leg begins.  `kind` groups legs that last about as long (an arm and its phase)."""
        self._name, self._kind, self._started, self._said = name, kind, time.monotonic(), time.monotonic()
        self.update("waiting for an idle machine")

    def update(self, doing: str) -> None:
        """What the leg does now: shown at once on a terminal, at most every 15 s as a plain line."""
        now = time.monotonic()
        text = f"leg {self._legs - self._left + 1}/{self._legs} {self._name}: {doing}, {now - self._started:.0f} s{self._time_left()}"
        if self._console.is_terminal:
            if self._live is None:
                # Rich's own twelve frames a second cost the measured machine one per cent of a core.
                self._live = self._console.status(text, refresh_per_second=1)
                self._live.start()
            self._live.update(text)
        elif now - self._said >= PLAIN_PERIOD_S:
            self._said = now
            self.say(text)

    def done(self, status: str, detail: str) -> None:
        """The leg ended."""
        self.stop()
        duration = time.monotonic() - self._started
        self._durations[self._kind].append(duration)
        self._left -= 1
        self.say(f"leg {self._legs - self._left}/{self._legs} {self._name}: {status} after {duration:.0f} s{detail}")

    def more(self, legs: int) -> None:
        """A block is repeated: that many legs are added."""
        self._legs += legs
        self._left += legs

    def skip(self, legs: int) -> None:
        """A resumed series has these behind it."""
        self._left -= legs

    def drop(self, legs: int) -> None:
        """A block that broke off does not run these."""
        self._legs -= legs
        self._left -= legs

    def stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _time_left(self) -> str:
        seen = [duration for durations in self._durations.values() for duration in durations]
        if not seen:
            return ""
        return f", about {self._left * sum(seen) / len(seen) / 60:.0f} min left"
