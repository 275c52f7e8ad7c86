"""Configs: TOML into nested frozen dataclasses, strictly, and back into plain data for the record."""

import dataclasses
import difflib
import hashlib
import json
import math
import pathlib
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]

_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text in quotes", type(None): "nothing"}


class ConfigError(ValueError):
    """Everything that is wrong with a config, one line per problem, each with its dotted path."""

    def __init__(self, problems: Sequence[str]):
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


def setting(default: Any = dataclasses.MISSING, *, low: float | None = None, high: float | None = None) -> Any:
    """A dataclass field with bounds (inclusive), which hold for every number in it; without a default it is required.

    Choices need no bounds: annotate the field with ``typing.Literal``. What one field alone cannot tell belongs in the
    dataclass's ``__post_init__``, whose ValueErrors are reported with the dotted path of the table, or of
    a field where they begin with its name and a colon.
    """
    return dataclasses.field(default=default, metadata={"low": low, "high": high})


def load[T](cls: type[T], path: str | pathlib.Path, overrides: Sequence[str] = ()) -> T:
    """Read ``path`` (TOML) into ``cls``, a frozen dataclass that may nest others.

    Args:
      cls: fields are bool, int, float, str, Literal, tuple, dict[str, ...], unions of those, or dataclasses. A table
        given where a tuple of dataclasses is expected counts as a tuple of one.
      path: the config file.
      overrides: ``"a.b=value"``, value in TOML; a bare word is text. They pass the same checks as the file.

    Raises:
      ConfigError: no such file, malformed TOML, unknown or missing key, wrong type or range; all problems at once.
    """
    path = pathlib.Path(path)
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"{path}: cannot read this config ({error.strerror}); expected a TOML file"]) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError([f"{path}: not valid TOML: {error}"]) from None
    for override in overrides:
        key, value = parse_override(override)
        raw = replace(raw, key, value)
    try:
        return from_dict(cls, raw)
    except ConfigError as error:
        raise ConfigError([f"{path}: {problem}" for problem in error.problems]) from None


def from_dict[T](cls: type[T], raw: Mapping[str, Any]) -> T:
    """Plain data into ``cls``, with every check ``load`` makes; the inverse of ``to_dict``."""
    return _table(cls, raw, "")


def to_dict(config: Any) -> dict[str, Any]:
    """A config as plain data that JSON can hold, with every default written out."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def digest(config: Any) -> str:
    """Ten hex digits that change with any setting of ``config``, written or default, and with nothing else."""
    return hashlib.sha256(json.dumps(to_dict(config), sort_keys=True).encode()).hexdigest()[:10]


def resolve(path: str) -> pathlib.Path:
    """A path written in a config: relative ones start at the repository, wherever the command was called."""
    try:
        return REPOSITORY / pathlib.Path(path).expanduser()
    except RuntimeError as error:  # ~somebody who is not there
        raise ConfigError([f"{path}: {error}"]) from None


def parse_override(text: str) -> tuple[str, Any]:
    """Split ``"a.b=value"`` into its dotted key and its TOML value."""
    key, equals, value = text.partition("=")
    key, value = key.strip(), value.strip()
    if not equals or not all(key.split(".")):
        raise ConfigError([f"override {text!r}: expected key=value with a dotted key, such as decode.temperature=0.7"])
    try:
        parsed = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return key, value
    return key, parsed["value"] if len(parsed) == 1 else value


def replace(raw: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy of nested tables with the value at a dotted key replaced or added."""
    head, _, rest = key.partition(".")
    if not rest:
        return {**raw, head: value}
    inner = raw.get(head, {})
    if not isinstance(inner, Mapping):
        raise ConfigError([f"{key}: {head!r} is {_say(inner)} here, not a table that could hold {rest!r}"])
    return {**raw, head: replace(inner, rest, value)}


def _table(cls: type, raw: Any, path: str) -> Any:
    if not isinstance(raw, Mapping):
        raise ConfigError([f"{path}: expected a table, got {_say(raw)}"])
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    problems, values = [], {}
    for key in raw.keys() - fields.keys():
        near = difflib.get_close_matches(key, fields, n=1, cutoff=0.5)
        hint = f"did you mean {_join(path, near[0])}?" if near else f"expected one of {', '.join(fields)}"
        problems.append(f"{_join(path, key)}: unknown key; {hint}")
    for name, field in fields.items():
        where = _join(path, name)
        if name not in raw:
            if field.default is field.default_factory is dataclasses.MISSING:
                problems.append(f"{where}: missing, and it has no default")
            continue
        try:
            values[name] = _value(hints[name], raw[name], where, field.metadata)
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(sorted(problems))
    try:
        return cls(**values)
    except ValueError as error:
        by = "." if str(error).partition(":")[0] in fields else ": "
        raise ConfigError([_join(path, str(error), by)]) from None


def _value(hint: Any, raw: Any, path: str, bounds: Mapping[str, Any]) -> Any:
    if isinstance(hint, typing.TypeAliasType):
        hint = hint.__value__
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    wrong = ConfigError([f"{path}: expected {_describe(hint)}, got {_say(raw)}"])
    if hint is Any:
        return raw
    if dataclasses.is_dataclass(hint):
        return _table(typing.cast(type, hint), raw, path)
    if origin in (types.UnionType, typing.Union):
        return _first(args, raw, path, bounds, wrong)
    if origin is typing.Literal:
        if not any(raw == arg and type(raw) is type(arg) for arg in args):
            near = difflib.get_close_matches(str(raw), [str(arg) for arg in args], n=1)
            raise ConfigError([wrong.problems[0] + (f"; did you mean {near[0]!r}?" if near else "")])
        return raw
    if origin is tuple:
        if isinstance(raw, Mapping) and dataclasses.is_dataclass(args[0]):
            return (_table(typing.cast(type, args[0]), raw, path),)
        if not isinstance(raw, list | tuple) or (args[-1] is not ... and len(raw) != len(args)):
            raise wrong
        hints = [args[0]] * len(raw) if args[-1] is ... else args
        return tuple(
            _value(hint, value, f"{path}[{i}]", bounds) for i, (hint, value) in enumerate(zip(hints, raw, strict=True))
        )
    if origin is dict:
        if not isinstance(raw, Mapping):
            raise wrong
        return {key: _value(args[1], value, _join(path, key), bounds) for key, value in raw.items()}
    if hint is float and type(raw) is int:
        raw = float(raw)
    if type(raw) is not hint:
        raise wrong
    if isinstance(raw, int | float) and not isinstance(raw, bool):
        _check_bounds(raw, path, bounds)
    return raw


def _first(hints: Sequence[Any], raw: Any, path: str, bounds: Mapping[str, Any], wrong: ConfigError) -> Any:
    """The first member of a union that takes the value; a value of a right type but wrong range says so."""
    for hint in hints:
        try:
            return _value(hint, raw, path, bounds)
        except _RangeError:
            raise
        except ConfigError:
            continue
    raise wrong


class _RangeError(ConfigError):
    pass


def _check_bounds(value: float, path: str, bounds: Mapping[str, Any]) -> None:
    low, high = bounds.get("low"), bounds.get("high")
    if math.isfinite(value) and (low is None or value >= low) and (high is None or value <= high):
        return
    limits = [f">= {low}" if low is not None else "", f"<= {high}" if high is not None else ""]
    expected = " and ".join(filter(None, limits)) or "a finite number"
    raise _RangeError([f"{path}: expected {expected}, got {value}"])


def _describe(hint: Any) -> str:
    if isinstance(hint, typing.TypeAliasType):
        hint = hint.__value__
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_describe(arg) for arg in args if arg is not type(None))
    if origin is typing.Literal:
        return "one of " + ", ".join(map(repr, args))
    if origin is tuple and args[-1] is ...:
        return f"a list, each entry {_describe(args[0])}"
    if origin is tuple:
        return f"a list of {len(args)}"
    return _NAMES.get(hint, "a table")


def _say(raw: Any) -> str:
    if isinstance(raw, Mapping):
        return "a table"
    return json.dumps(raw, default=str)


def _join(path: str, name: str, by: str = ".") -> str:
    return f"{path}{by}{name}" if path else name
