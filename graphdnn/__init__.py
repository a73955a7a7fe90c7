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

from graphdnn import _public
from graphdnn._version import __version__ as __version__

__all__ = list(_public.NAMES)


def __getattr__(name: str) -> Any:
    """Import the module of a public name on first use."""
    if name in _public.WHERE:
        module, attribute = _public.WHERE[name]
        value = getattr(import_module(module), attribute)
    elif name in _public.SUBMODULES:
        value = import_module(f"{__name__}.{name}")
    elif name in _public.ALIASES:
        value = import_module("graphdnn.frontend.names")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Public names, resolved or not."""
    return sorted({*globals(), *__all__})
