"""Every op by its JSON tag."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol

from graphdnn.dtypes import data_type, info
from graphdnn.errors import NotSupportedError, explain
from graphdnn.opspecs.spec import OpSpec

MODULES = {
    "pointwise": "POINTWISE",
    "reduction": "REDUCTION",
    "matmul": "MATMUL",
    "conv": "CONV_FPROP CONV_DGRAD CONV_WGRAD",
    "movement": "RESHAPE TRANSPOSE SLICE CONCATENATE",
    "window": "WINDOW",
    "resample": "RESAMPLE RESAMPLE_BPROP",
    "norm": "LAYER_NORM LAYER_NORM_BPROP RMS_NORM RMS_NORM_BPROP ADA_LAYER_NORM ADA_LAYER_NORM_BPROP "
    "INSTANCE_NORM INSTANCE_NORM_BPROP GROUP_NORM GROUP_NORM_BPROP",
    "batchnorm": "BATCHNORM DBN BATCHNORM_INFERENCE GENSTATS BN_FINALIZE DBN_WEIGHT",
    "softmax": "SOFTMAX LOG_SOFTMAX LOGSUMEXP SOFTMAX_BPROP LOG_SOFTMAX_BPROP LOGSUMEXP_BPROP",
    "rng": "RNG",
    "block_scale": "BLOCK_SCALE_QUANTIZE BLOCK_SCALE_DEQUANTIZE",
    "moe": "MOE_GROUPED_MATMUL MOE_GROUPED_MATMUL_BWD",
    "attention": "SDPA SDPA_BWD",
    "attention_fp8": "SDPA_FP8_FWD SDPA_FP8_BWD",
    "attention_mxfp8": "SDPA_MXFP8_FWD SDPA_MXFP8_BWD",
}
"""Modules of this package, and the tags of their ``SPECS``. A module is imported when one of its tags is first asked for, and registers them all, and
its ``ROWS``, where an op has a table of modes: a build from the cache should not wait for ops that its graph does not have."""


class Row(Protocol):
    """A row of a table of modes."""

    def carrier(self, compute: data_type, attrs: Mapping[str, Any]) -> data_type:
        """The type it is calculated in when ``compute`` (a carrier) is asked for."""


SPECS: dict[str, OpSpec] = {}
"""JSON tag -> op, of the modules imported so far; :func:`every` has all of them."""
ROWS: dict[str, Mapping[str, Row]] = {}
"""JSON tag -> table of modes, likewise."""
_HOMES: dict[str, str] = {}
for _name, _tags in MODULES.items():
    for _tag in _tags.split():
        assert _tag not in _HOMES, f"op {_tag} is registered twice"
        _HOMES[_tag] = _name


def _register(name: str) -> None:
    module = importlib.import_module(f"graphdnn.opspecs.{name}")
    tags = " ".join(s.tag for s in module.SPECS)
    assert tags == MODULES[name], f"module {name} has the ops {tags}, registry.MODULES says {MODULES[name]}"
    SPECS.update((s.tag, s) for s in module.SPECS)
    ROWS.update(getattr(module, "ROWS", {}))


def every() -> dict[str, OpSpec]:
    """All ops by JSON tag."""
    for name, tags in MODULES.items():
        if tags.split()[0] not in SPECS:
            _register(name)
    return SPECS


def spec(tag: str) -> OpSpec:
    """The op with the JSON tag ``tag``. NotSupportedError for an unknown one."""
    if tag not in SPECS and tag in _HOMES:
        _register(_HOMES[tag])
    found = SPECS.get(tag)
    if found is None:
        raise NotSupportedError(explain("the op is not known", expected="one of " + ", ".join({**_HOMES, **SPECS}), found=repr(tag)))
    return found


def declared(tag: str) -> OpSpec:
    """The op with the JSON tag ``tag``, if users may declare it. NotSupportedError for an unknown one and for one that only expansions make."""
    found = spec(tag)
    if found.internal:
        rule, expected = "the op is internal: it stands in no text", ", ".join(t for t, s in every().items() if not s.internal)
        raise NotSupportedError(explain(rule, expected=f"one of {expected}", found=repr(tag)))
    return found


def carrier(tag: str, attrs: Mapping[str, Any], compute: data_type) -> data_type:
    """The type in which an op is calculated when ``compute`` (a carrier) is asked for: FLOAT instead of integers where it needs that."""
    op = spec(tag)
    row = ROWS.get(tag, {}).get(attrs.get("mode", ""))
    if row is not None:
        return row.carrier(compute, attrs)
    return data_type.FLOAT if op.domain == "float" and info(compute).kind != "f" else compute
