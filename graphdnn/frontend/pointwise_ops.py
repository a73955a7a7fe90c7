"""Pointwise op methods: one for every method name in the rows of ``opspecs.pointwise``. Nothing is listed here; adding a row adds the method.

``pointwise_ops.pyi`` is this class as it is after the rows have been read, for editors and mypy; ``stubgen.py`` prints it.
"""

from __future__ import annotations

from graphdnn.frontend.declare import Declarations
from graphdnn.frontend.methods import add_methods


class PointwiseOps(Declarations):
    """Element by element, with broadcasting as in NumPy. Every method takes ``name=``, makes one node and returns its output, a new virtual tensor.
    A number may stand for any operand but the first tensor: it becomes a constant of the kernel."""


add_methods(PointwiseOps)
