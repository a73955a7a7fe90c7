"""Frozen dataclasses to JSON values and back, strictly: the only door through which stored recipes, graphs and specs come in.

Decoding follows the type hints of the class. It creates nothing but the dataclasses that the caller names (and those their hints name), tuples,
dicts, numbers, strings and enum members; anything else, a missing or an unknown key, or a value of another type is a SerializationError.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, Literal, TypeVar, Union

from graphdnn.errors import SerializationError, explain

T = TypeVar("T")
TAG = "is"
"""Key that carries the class name, so that unions of dataclasses can be told apart."""


def encode(value: Any) -> Any:
    """JSON form of a dataclass, enum member, tuple, list, dict with string keys, number, string, bool or None. TypeError for anything else."""
    if value is None or isinstance(value, (str, bool)) or type(value) in (int, float):
        return value
    if isinstance(value, Enum):
        return value.name
    if is_dataclass(value) and not isinstance(value, type):
        return {TAG: type(value).__name__} | {f.name: encode(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, (tuple, list)):
        return [encode(v) for v in value]
    if isinstance(value, Mapping) and all(isinstance(k, str) for k in value):
        return {k: encode(v) for k, v in value.items()}
    if isinstance(value, int):
        return int(value)
    if hasattr(value, "item"):
        return encode(value.item())
    raise TypeError(f"{type(value).__name__} has no JSON form: {value!r}")


def decode(cls: type[T], value: Any, where: str = "") -> T:
    """The object of class ``cls`` that :func:`encode` made ``value`` from. ``where`` names the place in error messages."""
    found: T = _decode(cls, value, where or cls.__name__)
    return found


def decode_all(cls: type[T], value: Any, where: str = "") -> tuple[T, ...]:
    """The objects of class ``cls`` in a list."""
    found: tuple[T, ...] = _decode(tuple[cls, ...], value, where or cls.__name__)  # type: ignore[valid-type]
    return found


def fail(where: str, expected: object, found: object) -> SerializationError:
    """The error for one value that does not fit the schema."""
    text = repr(found)
    return SerializationError(explain(f"stored data is not valid at {where}", expected=expected, found=text if len(text) < 80 else text[:77] + "..."))


def _decode(hint: Any, value: Any, where: str) -> Any:
    if hint is Any:
        return _plain(value, where)
    if hint is None or hint is type(None):
        if value is not None:
            raise fail(where, "null", value)
        return None
    origin = typing.get_origin(hint)
    if origin is not None:
        return _generic(origin, typing.get_args(hint), value, where)
    if hint in (int, float, str, bool):
        if type(value) is not hint:
            raise fail(where, hint.__name__, value)
        return value
    if isinstance(hint, type) and issubclass(hint, Enum):
        if not isinstance(value, str) or value not in hint.__members__:
            raise fail(where, f"a member of {hint.__name__}", value)
        return hint[value]
    if isinstance(hint, type) and is_dataclass(hint):
        return _dataclass(hint, value, where)
    if hint in (tuple, list):
        return _generic(tuple, (Any, ...), value, where)
    if hint is dict:
        return _generic(dict, (str, Any), value, where)
    raise TypeError(f"cannot decode into {hint!r} at {where}")


def _generic(origin: Any, args: tuple[Any, ...], value: Any, where: str) -> Any:
    if origin in (Union, types.UnionType):
        return _union(args, value, where)
    if origin is Literal:
        if value not in args or type(value) is not type(args[args.index(value)]):
            raise fail(where, f"one of {args}", value)
        return value
    if origin in (tuple, list, frozenset, Sequence):
        if not isinstance(value, list):
            raise fail(where, "a list", value)
        if origin is tuple and not (len(args) == 2 and args[1] is Ellipsis):
            if len(value) != len(args):
                raise fail(where, f"{len(args)} items", value)
            return tuple(_decode(a, v, f"{where}[{i}]") for i, (a, v) in enumerate(zip(args, value, strict=True)))
        items = (_decode(args[0], v, f"{where}[{i}]") for i, v in enumerate(value))
        return frozenset(items) if origin is frozenset else tuple(items)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise fail(where, "an object", value)
        return {_decode(args[0], k, where): _decode(args[1], v, f"{where}.{k}") for k, v in value.items()}
    raise TypeError(f"cannot decode into {origin!r} at {where}")


def _union(args: tuple[Any, ...], value: Any, where: str) -> Any:
    """The member of the union that the value belongs to: by tag for dataclasses, else the first that takes it."""
    if isinstance(value, dict) and TAG in value:
        for a in args:
            if isinstance(a, type) and is_dataclass(a) and a.__name__ == value[TAG]:
                return _dataclass(a, value, where)
    for a in args:
        if isinstance(a, type) and is_dataclass(a):
            continue
        try:
            return _decode(a, value, where)
        except SerializationError:
            continue
    raise fail(where, " or ".join(getattr(a, "__name__", str(a)) for a in args), value)


@lru_cache(maxsize=256)
def _hints(cls: type) -> dict[str, Any]:
    """Types of the fields. Those of every class that a field can hold are worked out too, so that damaged data never is what first asks for them."""
    hints = typing.get_type_hints(cls)
    found = {f.name: hints[f.name] for f in fields(cls)}
    todo = list(found.values())
    while todo:
        hint = todo.pop()
        if isinstance(hint, type) and is_dataclass(hint) and hint is not cls:
            _hints(hint)
        todo.extend(typing.get_args(hint))
    return found


def _dataclass(cls: type, value: Any, where: str) -> Any:
    hints = _hints(cls)
    if not isinstance(value, dict) or value.get(TAG) != cls.__name__:
        raise fail(where, f"an object of {cls.__name__}", value)
    if value.keys() - {TAG} != hints.keys():
        raise fail(where, f"the keys {', '.join(hints)}", ", ".join(map(str, value)))
    made = {name: _decode(hint, value[name], f"{where}.{name}") for name, hint in hints.items()}
    try:
        return cls(**made)
    except (ValueError, TypeError) as error:
        raise fail(where, f"a valid {cls.__name__}", str(error)) from error


def _plain(value: Any, where: str) -> Any:
    """JSON as it is, with lists made tuples (attributes and spec fields hold tuples)."""
    if value is None or type(value) in (int, float, str, bool):
        return value
    if isinstance(value, list):
        return tuple(_plain(v, where) for v in value)
    if isinstance(value, dict):
        return {k: _plain(v, where) for k, v in value.items()}
    raise fail(where, "a JSON value", value)
