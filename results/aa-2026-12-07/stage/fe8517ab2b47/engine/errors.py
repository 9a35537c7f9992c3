"""What the engine refuses, and why: every message names the field or file, the value and the limit."""

from __future__ import annotations


class EngineError(ValueError):
    """A mistake in what the engine was given; nothing was changed."""


class ConfigError(EngineError):
    """An engine option that is unknown, out of range or not built."""


class RequestError(EngineError):
    """A request that cannot be served; the engine goes on serving the others."""


class CheckpointError(EngineError):
    """A checkpoint that is incomplete, malformed or of an architecture that is not built; no model was made."""
