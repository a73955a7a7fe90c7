"""Prints the .pyi files of what is not written out in the sources: the pointwise methods and the reduction modes,
which come from the op tables, and the lazy public names.

    python -m graphdnn.frontend.stubgen

writes them; a test compares them with what this module prints.
"""

from __future__ import annotations

import inspect
from pathlib import Path

from graphdnn import _public
from graphdnn.frontend.methods import Method, methods
from graphdnn.frontend.pointwise_ops import PointwiseOps
from graphdnn.frontend.reduction_modes import reduction_mode

ROOT = Path(__file__).parent.parent
WIDTH = 150
_HEADER = "# Printed by graphdnn/frontend/stubgen.py; do not edit.\n"


def _default(value: object) -> str:
    if value is inspect.Parameter.empty:
        return ""
    return f" = {value}" if not isinstance(value, str) else f' = "{value}"'


def _signature(method: Method) -> list[str]:
    parameters = ["self", *(f"{name}: {hint}{_default(default)}" for name, hint, default in method.parameters())]
    line = f"    def {method.name}({', '.join(parameters)}) -> Tensor:"
    if len(line) <= WIDTH:
        return [line]
    return [f"    def {method.name}(", *(f"        {p}," for p in parameters), "    ) -> Tensor:"]


def pointwise_stub() -> str:
    """Text of frontend/pointwise_ops.pyi."""
    lines = [
        _HEADER + "from abc import ABCMeta",
        "from typing import Any",
        "",
        "from graphdnn.dtypes import data_type",
        "from graphdnn.frontend.declare import Declarations",
    ]
    lines += ["from graphdnn.frontend.tensor import tensor as Tensor", "", "class PointwiseOps(Declarations, metaclass=ABCMeta):"]
    lines += [f'    """{inspect.cleandoc(PointwiseOps.__doc__ or "")}"""'.replace("\n", "\n    ")]
    for m in methods():
        lines += ["", *_signature(m), f'        """{m.doc}"""']
    return "\n".join(lines) + "\n"


def modes_stub() -> str:
    """Text of frontend/reduction_modes.pyi."""
    lines = [_HEADER + "from graphdnn._enum import ApiEnum", "", "class reduction_mode(ApiEnum):", f'    """{reduction_mode.__doc__}"""', ""]
    return "\n".join([*lines, *(f"    {m.name} = {m.value}" for m in reduction_mode)]) + "\n"


def names_stub() -> str:
    """Text of graphdnn/__init__.pyi."""
    lines = [
        _HEADER + "# ruff: noqa: F401, I001\nfrom graphdnn import datatypes as datatypes",
        "from graphdnn._version import __version__ as __version__",
    ]
    lines += [
        f"from {module} import {attribute} as {name}" for name, (module, attribute) in sorted(_public.WHERE.items(), key=lambda w: (w[1], w[0]))
    ]
    lines += [f"from graphdnn.frontend import names as {alias}" for alias in _public.ALIASES]
    lines += ["", "__all__ = [", *(f'    "{name}",' for name in _public.NAMES), "]"]
    return "\n".join(lines) + "\n"


STUBS = {"frontend/pointwise_ops.pyi": pointwise_stub, "frontend/reduction_modes.pyi": modes_stub, "__init__.pyi": names_stub}


def main() -> None:
    """Write every stub file."""
    for name, make in STUBS.items():
        (ROOT / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
