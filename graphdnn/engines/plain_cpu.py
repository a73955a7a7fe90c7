"""Lowering of a contraction for a CPU without any memory of its own: one output after the other, its inputs read where they are.

Slow beside panels and register tiles, which copy what they read; it is there for plans that may need no workspace.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphdnn.codegen.spec import KernelSpec, Launch, Recipe
from graphdnn.engines.base import Knobs, entry_name
from graphdnn.engines.conv_thread import fields_of
from graphdnn.engines.matmul_parts import MatmulParts
from graphdnn.engines.strips import GRAIN

REACHED = 0.02
"""Share of the peak: a product at a time, mostly without vectors. Expected, not measured."""


@dataclass(frozen=True)
class PlainCpu(Knobs):
    """Has no workspace."""


def lower(parts: MatmulParts, words: str, title: list[str]) -> Recipe:
    """The kernel."""
    if parts.reduced == 0:
        return Recipe((), ())
    fields, signature = fields_of(parts, title)
    spec = KernelSpec("cpu/contraction_plain.py.j2", entry_name(words, fields, signature.params), signature.params, fields)
    return Recipe((spec,), (Launch(0, fields["items"], signature.args, max(1, GRAIN // max(fields["depth"], 1))),))
