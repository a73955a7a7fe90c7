"""Exception tree of graphdnn.

Every error has two bases: :class:`GraphError`, so that one ``except`` catches all of ours, and the built-in class that the cuDNN Frontend
raises in the same place, so that scripts written for it keep working. A message names the node, the tensor, the rule, what was expected, what was
found and the way out; :func:`explain` composes it so that no part is forgotten.
"""

from __future__ import annotations


class GraphError(Exception):
    """Base of every error that graphdnn raises."""


class ValidationError(GraphError, ValueError):
    """The graph, or an argument of it, has no meaning (shape mismatch, missing dims, missing buffer)."""


class NotSupportedError(GraphError):
    """The graph is valid but no engine takes it. Not a RuntimeError, so that it does not hide real failures."""


cudnnGraphNotSupportedError = NotSupportedError


class BuildError(GraphError, RuntimeError):
    """A step of building a plan failed, or was asked for out of order (no plan built, unset data type, compiler missing)."""


class ExecutionError(GraphError, RuntimeError):
    """Running a plan failed (driver error, wrong device, lazy step inside a capture)."""


class SerializationError(GraphError, RuntimeError):
    """A stored plan or cache entry is damaged, or was made by another version or for another device."""


class KindError(GraphError, TypeError):
    """An argument has the wrong Python type."""


_last_error = ""


def explain(
    rule: str,
    *,
    node: str | None = None,
    tensor: str | None = None,
    expected: object = None,
    found: object = None,
    fix: str | None = None,
) -> str:
    """Compose a message: where (what has a name), the rule, expected, found, way out. Also becomes ``get_last_error_string()``."""
    where = [f"node '{node}'" if node else "", f"tensor '{tensor}'" if tensor else ""]
    text = ", ".join(w for w in where if w)
    rule = rule.replace("node '': ", "")  # of a node that the user gave no name, and that has no number
    text = f"{text}: {rule}" if text else rule
    if expected is not None:
        text += f"; expected {expected}"
    if found is not None:
        text += f", found {found}"
    if fix:
        text += f". To fix: {fix}"
    global _last_error
    _last_error = text
    return text


def last_error_string() -> str:
    """The text of the newest composed error message; empty if there was none."""
    return _last_error
