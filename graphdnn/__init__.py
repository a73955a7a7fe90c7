"""graphdnn: a graph-building fusion compiler with the API of the cuDNN Frontend. ``import graphdnn as cudnn`` runs scripts written for it.

Names are resolved when they are first used: importing graphdnn imports no numba, jinja2, networkx, torch or CUDA. Layers, each importing only those
before it::

    errors status dtypes device env log   leaves
    ir                                    tensors, nodes, the operation graph, its JSON text
    opspecs                               what every op means
    passes                                infer, check, canonicalize, regions, collapse
    codegen                               tapes, access maps, kernel specs, templates
    engines                               one file per kernel family
    intrinsics targets                    CPU, CUDA, simulator
    plans                                 candidates, cache, serialization
    inspection                            explain, draw
    frontend                              this API
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from graphdnn._version import __version__

_PUBLIC: dict[str, tuple[str, ...]] = {
    "graphdnn.dtypes": ("data_type",),
    "graphdnn.errors": ("BuildError", "ExecutionError", "GraphError", "KindError", "NotSupportedError", "SerializationError", "ValidationError")
    + ("cudnnGraphNotSupportedError",),
    "graphdnn.frontend.decorators": ("graph", "graph_cache", "jit"),
    "graphdnn.frontend.enums": ("attention_implementation", "behavior_note", "build_plan_policy", "diagonal_alignment", "heur_mode", "knob_type")
    + ("moe_grouped_matmul_mode", "norm_forward_phase", "numerical_note", "reduction_mode", "reshape_mode", "scalar_type", "tensor_reordering"),
    "graphdnn.frontend.handle": ("backend_version", "backend_version_string", "create_handle", "destroy_handle", "get_stream", "set_stream"),
    "graphdnn.frontend.planning": ("knob",),
    "graphdnn.frontend.properties": ("create_device_properties", "create_kernel_cache"),
    "graphdnn.frontend.pygraph": ("pygraph",),
    "graphdnn.frontend.tensor": ("tensor",),
    "graphdnn.frontend.wrapper": ("Graph",),
}
_RENAMED = {"get_last_error_string": ("graphdnn.errors", "last_error_string")}
_SUBMODULES = ("datatypes",)
_ALIASES = ("_compiled_module", "_pybind_module")
"""Where scripts reach for names that the cuDNN Frontend does not export: here its other names."""

_WHERE: dict[str, tuple[str, str]] = {name: (module, name) for module, names in _PUBLIC.items() for name in names} | _RENAMED
__all__ = ["__version__", *sorted(_WHERE), *_SUBMODULES]


def __getattr__(name: str) -> Any:
    """Import the module of a public name on first use."""
    if name in _WHERE:
        module, attribute = _WHERE[name]
        value = getattr(import_module(module), attribute)
    elif name in _SUBMODULES:
        value = import_module(f"{__name__}.{name}")
    elif name in _ALIASES:
        value = import_module("graphdnn.frontend.names")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Public names, resolved or not."""
    return sorted({*globals(), *__all__})
