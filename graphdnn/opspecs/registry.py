"""Every op by its JSON tag."""

from __future__ import annotations

import importlib

from graphdnn.errors import NotSupportedError, explain
from graphdnn.opspecs.spec import OpSpec

MODULES = ("pointwise", "reduction", "matmul", "movement")
"""Modules of this package whose ``SPECS`` are registered."""


def _collect() -> dict[str, OpSpec]:
    found: dict[str, OpSpec] = {}
    for name in MODULES:
        for one in importlib.import_module(f"graphdnn.opspecs.{name}").SPECS:
            assert one.tag not in found, f"op {one.tag} is registered twice"
            found[one.tag] = one
    return found


SPECS: dict[str, OpSpec] = _collect()
"""JSON tag -> op."""


def spec(tag: str) -> OpSpec:
    """The op with the JSON tag ``tag``. NotSupportedError for an unknown one."""
    found = SPECS.get(tag)
    if found is None:
        raise NotSupportedError(explain("the op is not known", expected="one of " + ", ".join(SPECS), found=repr(tag)))
    return found
