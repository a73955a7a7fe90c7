"""Every op by its JSON tag."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol

from graphdnn.dtypes import data_type, info
from graphdnn.errors import NotSupportedError, explain
from graphdnn.opspecs.spec import OpSpec

MODULES = (
    "pointwise",
    "reduction",
    "matmul",
    "conv",
    "movement",
    "window",
    "resample",
    "norm",
    "batchnorm",
    "softmax",
    "rng",
    "block_scale",
    "moe",
    "attention",
    "attention_fp8",
    "attention_mxfp8",
)
"""Modules of this package whose ``SPECS`` are registered, and whose ``ROWS``, where an op has a table of modes."""


class Row(Protocol):
    """A row of a table of modes."""

    def carrier(self, compute: data_type, attrs: Mapping[str, Any]) -> data_type:
        """The type it is calculated in when ``compute`` (a carrier) is asked for."""


SPECS: dict[str, OpSpec] = {}
"""JSON tag -> op."""
ROWS: dict[str, Mapping[str, Row]] = {}
"""JSON tag -> table of modes."""
for _name in MODULES:
    _module = importlib.import_module(f"graphdnn.opspecs.{_name}")
    for _one in _module.SPECS:
        assert _one.tag not in SPECS, f"op {_one.tag} is registered twice"
        SPECS[_one.tag] = _one
    ROWS.update(getattr(_module, "ROWS", {}))


def spec(tag: str) -> OpSpec:
    """The op with the JSON tag ``tag``. NotSupportedError for an unknown one."""
    found = SPECS.get(tag)
    if found is None:
        raise NotSupportedError(explain("the op is not known", expected="one of " + ", ".join(SPECS), found=repr(tag)))
    return found


def carrier(tag: str, attrs: Mapping[str, Any], compute: data_type) -> data_type:
    """The type in which an op is calculated when ``compute`` (a carrier) is asked for: FLOAT instead of integers where it needs that."""
    row = ROWS.get(tag, {}).get(attrs.get("mode", ""))
    if row is not None:
        return row.carrier(compute, attrs)
    return data_type.FLOAT if spec(tag).domain == "float" and info(compute).kind != "f" else compute
