"""Which role an oracle's leg had: told from what ran, never from what was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.oracle import Oracle

ROLES = ("pin", "older-release", "eager", "reduced-build")
"""Only a `pin` is what a verdict may be spoken against."""


def role_of(oracle: Oracle, result: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The role of a leg, from `who` and `resolved` of its result.json, and the reasons why it is no `pin` (none for a pin).

    In this order: another engine, or the same release built otherwise, is a `reduced-build`; another version an `older-release`; eager
    execution where production is compiled is `eager`; any other setting off production a `reduced-build`.
    """
    who, resolved = result["who"], result["resolved"]
    identity = wrong_identity(oracle, who)
    settings = [
        f"{name} is {resolved.get(name)!r}, production has {wanted!r}"
        for name, wanted in oracle.production.items() if resolved.get(name) != wanted
    ]
    reasons = identity + settings
    if not reasons:
        return "pin", []
    if who.get("name") != oracle.identity.engine:
        return "reduced-build", reasons
    if who.get("version") != oracle.identity.version:
        return "older-release", reasons
    if not identity and resolved.get("enforce_eager") is True and oracle.production["enforce_eager"] is False:
        return "eager", reasons
    return "reduced-build", reasons


def wrong_identity(oracle: Oracle, who: Mapping[str, Any]) -> list[str]:
    """How `who` (as in result.json) differs from the oracle file; a field that is not told differs."""
    pin = oracle.identity
    told = {
        "engine": who.get("name"), "version": who.get("version"), "distribution": who.get("distribution"),
        "torch": (who.get("packages") or {}).get("torch"), "record_sha256": who.get("record_sha256"),
    }
    reasons = [
        f"{name} is {value!r}, the oracle file {oracle.name}.toml has {getattr(pin, name)!r}"
        for name, value in told.items() if value != getattr(pin, name)
    ]
    if not pin.record_sha256:
        reasons.append(f"{oracle.name}.toml does not know its record_sha256 yet")
    missing = who.get("missing")
    if missing is None:
        return [*reasons, "it does not tell which requirements are missing"]
    if unexpected := sorted(set(missing) - set(oracle.left_out)):
        reasons.append(f"requirements missing that {oracle.name}.toml does not leave out: {', '.join(unexpected)}")
    return reasons
