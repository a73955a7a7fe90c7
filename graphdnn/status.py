"""Outcome of a support check: fine, or one reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Status:
    """``ok``, or a rejection that says which rule of which engine failed on what, and what would help.

    ``cut`` names a tensor (by id in the operation graph) that, if stored to memory, would let the engine in.
    """

    ok: bool
    reason: str = ""
    cut: int | None = None

    def __bool__(self) -> bool:
        return self.ok


OK = Status(True)


def reject(reason: str, cut: int | None = None) -> Status:
    """A negative status with its reason."""
    return Status(False, reason, cut)
