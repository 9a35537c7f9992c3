"""TOML tables to frozen dataclasses, strictly: a missing, unknown or mistyped field names file, field, value and what to do."""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class SpecError(ValueError):
    """A file a person wrote is wrong; the message names the file, the field, the value and the cure."""

    def __init__(self, file: str, field: str, value: object, advice: str) -> None:
        super().__init__(f"{file}: field `{field}` is {value!r}: {advice}")


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file.  Raises :class:`SpecError` when it is missing or is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecError(path.name, "-", str(path), "there is no such file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(path.name, "-", "-", f"this is not TOML: {error}") from None


def build(kind: type[T], table: Any, file: str, where: str = "") -> T:
    """Make the dataclass `kind` from `table`, recursively; fields with a default may be absent, unknown ones never pass."""
    if not isinstance(table, dict):
        raise SpecError(file, where or "-", table, "a table is needed here")
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name in table.keys() - fields.keys():
        raise SpecError(file, _join(where, name), table[name], f"unknown; this table has {', '.join(fields)}")
    values = {}
    for name, field in fields.items():
        if name in table:
            values[name] = _value(hints[name], table[name], file, _join(where, name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise SpecError(file, _join(where, name), None, "missing; add it")
    return kind(**values)


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _value(hint: Any, value: Any, file: str, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return build(hint, value, file, where)  # type: ignore[arg-type]
    if origin in (types.UnionType, typing.Union):
        return _value(next(a for a in arguments if a is not type(None)), value, file, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise SpecError(file, where, value, "a list is needed here")
        variadic = len(arguments) == 2 and arguments[1] is Ellipsis
        if not variadic and len(value) != len(arguments):
            raise SpecError(file, where, value, f"{len(arguments)} items are needed here")
        kinds = [arguments[0]] * len(value) if variadic else list(arguments)
        return tuple(_value(kind, item, file, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(kinds, value, strict=True)))
    if origin is dict:
        if not isinstance(value, dict):
            raise SpecError(file, where, value, "a table is needed here")
        return {key: _value(arguments[1], item, file, _join(where, key)) for key, item in value.items()}
    if hint is Any:
        return value
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise SpecError(file, where, value, f"a value of type {hint.__name__} is needed here")
    return value
