"""Frozen dataclasses to JSON values and back, strictly: the only door through which stored recipes, graphs and specs come in.

Decoding follows the type hints of the class. It creates nothing but the dataclasses that the caller names (and those their hints name), tuples,
dicts, numbers, strings and enum members; anything else, a missing or an unknown key, or a value of another type is a SerializationError.
"""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Literal, TypeVar, Union

from graphdnn.errors import SerializationError, explain

T = TypeVar("T")
Reader = Callable[[Any, str], Any]
"""Checks one value of JSON and makes what it stands for; the text names the place in error messages."""
TAG = "is"
"""Key that carries the class name, so that unions of dataclasses can be told apart."""
_SCALARS = frozenset((int, float, str, bool, type(None)))


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
    hint: Any = cls
    found: T = _reader(hint)(value, where or cls.__name__)
    return found


def decode_all(cls: type[T], value: Any, where: str = "") -> tuple[T, ...]:
    """The objects of class ``cls`` in a list."""
    found: tuple[T, ...] = _reader(tuple[cls, ...])(value, where or cls.__name__)  # type: ignore[valid-type]
    return found


def fail(where: str, expected: object, found: object) -> SerializationError:
    """The error for one value that does not fit the schema."""
    text = repr(found)
    return SerializationError(explain(f"stored data is not valid at {where}", expected=expected, found=text if len(text) < 80 else text[:77] + "..."))


@cache
def _reader(hint: Any) -> Reader:
    """What reads a value of a type; made when it is first asked for."""
    if hint is Any:
        return _plain
    origin = typing.get_origin(hint)
    if origin is not None:
        return _generic(origin, typing.get_args(hint))
    if hint is None or hint in _SCALARS:
        return _scalar(type(None) if hint is None else hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _member(hint)
    if isinstance(hint, type) and is_dataclass(hint):
        return _dataclass(hint)
    if hint in (tuple, list):
        return _items(Any, tuple)
    if hint is dict:
        return _mapping(str, Any)
    raise TypeError(f"cannot decode into {hint!r}")


def _scalar(kind: type) -> Reader:
    expected = "null" if kind is type(None) else kind.__name__

    def read(value: Any, where: str) -> Any:
        if type(value) is not kind:
            raise fail(where, expected, value)
        return value

    return read


def _member(kind: type[Enum]) -> Reader:
    members = dict(kind.__members__)

    def read(value: Any, where: str) -> Any:
        if not isinstance(value, str) or value not in members:
            raise fail(where, f"a member of {kind.__name__}", value)
        return members[value]

    return read


def _generic(origin: Any, args: tuple[Any, ...]) -> Reader:
    if origin in (Union, types.UnionType):
        return _union(args)
    if origin is Literal:
        return _literal(args)
    if origin is tuple and not (len(args) == 2 and args[1] is Ellipsis):
        return _fixed(args)
    if origin in (tuple, list, frozenset, Sequence):
        return _items(args[0], frozenset if origin is frozenset else tuple)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(*args)
    raise TypeError(f"cannot decode into {origin!r}")


def _literal(allowed: tuple[Any, ...]) -> Reader:
    def read(value: Any, where: str) -> Any:
        if value not in allowed or type(value) is not type(allowed[allowed.index(value)]):
            raise fail(where, f"one of {allowed}", value)
        return value

    return read


def _fixed(hints: tuple[Any, ...]) -> Reader:
    readers = [_reader(h) for h in hints]

    def read(value: Any, where: str) -> Any:
        if not isinstance(value, list):
            raise fail(where, "a list", value)
        if len(value) != len(readers):
            raise fail(where, f"{len(readers)} items", value)
        return tuple(r(v, f"{where}[{i}]") for i, (r, v) in enumerate(zip(readers, value, strict=True)))

    return read


def _items(hint: Any, make: Callable[[Iterable[Any]], Any]) -> Reader:
    item, kind = _reader(hint), hint if hint in _SCALARS else None

    def read(value: Any, where: str) -> Any:
        if not isinstance(value, list):
            raise fail(where, "a list", value)
        if kind is not None and all(type(v) is kind for v in value):
            return make(value)
        return make(item(v, f"{where}[{i}]") for i, v in enumerate(value))

    return read


def _mapping(key: Any, item: Any) -> Reader:
    of_key, of_item = _reader(key), _reader(item)

    def read(value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            raise fail(where, "an object", value)
        return {of_key(k, where): of_item(v, f"{where}.{k}") for k, v in value.items()}

    return read


def _union(args: tuple[Any, ...]) -> Reader:
    """Of the member that the value belongs to: by type or tag, else the first that takes it."""
    tagged: dict[str, Any] = {a.__name__: a for a in args if isinstance(a, type) and is_dataclass(a)}
    scalars = {a for a in args if a in _SCALARS}
    others = [_reader(a) for a in args if a not in scalars and not (isinstance(a, type) and is_dataclass(a))]
    expected = " or ".join(getattr(a, "__name__", str(a)) for a in args)

    def read(value: Any, where: str) -> Any:
        if type(value) in scalars:
            return value
        tag = value.get(TAG) if isinstance(value, dict) else None
        if isinstance(tag, str) and tag in tagged:
            return _reader(tagged[tag])(value, where)
        for reader in others:
            try:
                return reader(value, where)
            except SerializationError:
                continue
        raise fail(where, expected, value)

    return read


def _hints(cls: type) -> dict[str, Any]:
    """Types of the fields, from their annotations: what typing.get_type_hints says, which takes five times as long."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        own = {name: text for name, text in base.__dict__.get("__annotations__", {}).items() if name in cls.__dataclass_fields__}  # type: ignore[attr-defined]
        texts = [text for text in own.values() if isinstance(text, str)]
        if texts:
            values = iter(eval(f"({','.join(texts)},)", vars(sys.modules[base.__module__])))
        found |= {name: next(values) if isinstance(text, str) else text for name, text in own.items()}
    return {f.name: found[f.name] for f in fields(cls)}


def _dataclass(cls: type) -> Reader:
    readers: dict[str, Reader] = {}

    def read(value: Any, where: str) -> Any:
        if not isinstance(value, dict) or value.get(TAG) != cls.__name__:
            raise fail(where, f"an object of {cls.__name__}", value)
        if len(value) != len(readers) + 1 or not value.keys() >= readers.keys():
            raise fail(where, f"the keys {', '.join(readers)}", ", ".join(map(str, value)))
        made = {name: reader(value[name], f"{where}.{name}") for name, reader in readers.items()}
        try:
            return cls(**made)
        except (ValueError, TypeError) as error:
            raise fail(where, f"a valid {cls.__name__}", str(error)) from error

    readers |= {name: _reader(hint) for name, hint in _hints(cls).items()}
    return read


def _plain(value: Any, where: str) -> Any:
    """JSON as it is, with lists made tuples (attributes and spec fields hold tuples)."""
    if value is None or type(value) in (int, float, str, bool):
        return value
    if isinstance(value, list):
        return tuple(_plain(v, where) for v in value)
    if isinstance(value, dict):
        return {k: _plain(v, where) for k, v in value.items()}
    raise fail(where, "a JSON value", value)
