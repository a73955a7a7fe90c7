"""Sealed files: magic (8), format (4), SHA-256 of all that follows (32), length of the JSON (8), the JSON, then bytes that the JSON describes.

What is sealed opens only if every byte is what was written. Reading executes nothing; what the JSON holds is checked by those who ask for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from graphdnn.errors import SerializationError, explain

BUNDLE = b"GDNNPLNS"
"""How a file of several plans begins."""
_HEADER = struct.Struct("<8sI32s")
_SIZE = struct.Struct("<Q")


def seal(magic: bytes, version: int, content: Mapping[str, Any], blobs: Iterable[bytes] = ()) -> bytes:
    """The file of a JSON object and the bytes after it. The same content gives the same bytes."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), default=_number).encode()
    rest = b"".join((_SIZE.pack(len(text)), text, *blobs))
    return _HEADER.pack(magic, version, hashlib.sha256(rest).digest()) + rest


def _number(value: Any) -> Any:
    """NumPy numbers among the facts of a compiler."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be stored")


def unseal(data: bytes, magic: bytes, version: int, what: str, running: str) -> tuple[dict[str, Any], memoryview]:
    """The JSON object and the bytes after it. ``what`` ("plan") and ``running`` are named by the SerializationError for anything but a whole file."""
    unknown = "something else, or damaged since"
    if len(data) < _HEADER.size + _SIZE.size:
        raise refuse(f"not a serialized {what}: {len(data)} bytes", unknown, running)
    found, format, digest = _HEADER.unpack_from(data)
    if found != magic:
        raise refuse(f"not a serialized {what}: it starts with {found!r}", unknown, running)
    if format != version:
        raise refuse(f"the {what} has another format", f"{what} format {format}", f"{what} format {version} of {running}")
    if hashlib.sha256(memoryview(data)[_HEADER.size :]).digest() != digest:
        raise refuse(f"the {what} is damaged: its checksum does not fit", unknown, running)
    (size,) = _SIZE.unpack_from(data, _HEADER.size)
    start = _HEADER.size + _SIZE.size
    try:
        content = json.loads(data[start : start + size])
    except (ValueError, RecursionError) as error:
        raise refuse(f"the {what}'s JSON cannot be read ({error})", unknown, running) from error
    if not isinstance(content, dict):
        raise refuse(f"the {what}'s JSON is no object", unknown, running)
    return content, memoryview(data)[start + size :]


def refuse(rule: str, built: str, running: str, fix: str = "build the graph again here and serialize the new plan") -> SerializationError:
    """The error for a file that cannot be used: what it was built with, and what is here."""
    return SerializationError(explain(rule, found=f"built with {built}, running with {running}", fix=fix))


def write(path: Path, data: bytes) -> None:
    """Write a file in one step: a reader sees the old content or the new, never half of it. What is no file (a pipe, a device) is written as it is.

    SerializationError where it cannot be written."""
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        place = Path(os.path.realpath(path))  # a link stays a link
        work = place.with_name(f".{os.urandom(8).hex()}.part")
        try:
            work.write_bytes(data)
            os.replace(work, place)
        finally:
            with contextlib.suppress(OSError):
                work.unlink(missing_ok=True)
    except (OSError, ValueError) as error:  # the latter: a NUL in the name
        fix = "free some space, or name a folder that can be written"
        found = getattr(error, "strerror", None) or error
        raise SerializationError(explain(f"'{path}' cannot be written", expected=f"room for {len(data)} bytes", found=found, fix=fix)) from error
