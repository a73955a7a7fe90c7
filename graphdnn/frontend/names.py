"""Every name of the API in one module, with those that the top level does not export; scripts know it as ``cudnn._compiled_module``."""

from __future__ import annotations

from typing import Any

import graphdnn
from graphdnn import _public
from graphdnn.frontend.enums import convolution_mode

__all__ = [*(n for n in _public.NAMES if n != "__version__"), "convolution_mode"]


def __getattr__(name: str) -> Any:
    """A public name of graphdnn."""
    if name in __all__ and name != "convolution_mode":
        return getattr(graphdnn, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
