"""What an op is, in one record. Knows no target: shapes, attributes, NumPy reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from graphdnn.ir.node import Node, NodeDecl

if TYPE_CHECKING:
    import numpy as np

    from graphdnn.opspecs.expansion import Expansion
    from graphdnn.opspecs.spans import Arithmetic, Span

Role = Literal["pointwise", "movement", "random", "reduction", "matmul", "composite", "attention", "grouped"]
Reference = Callable[..., "list[np.ndarray[Any, Any]]"]


@dataclass(frozen=True)
class MatmulForm:
    """An op of role "matmul" as a product of stacks of matrices, on arrays: ``result(left(a) @ right(b))`` of its two inputs in port order."""

    left: Callable[[Any], Any]
    right: Callable[[Any], Any]
    result: Callable[[Any], Any]


@dataclass(frozen=True)
class OpSpec:
    """One op family (JSON tag).

    ``tag``: JSON tag. ``role``: how regions treat it. ``inputs`` / ``outputs``: ports in order; ports in ``optional`` may be missing.
    ``infer(node)``: fill unset dims and strides of the outputs, raise ValidationError where the shapes have no meaning.
    ``check(node)``: rules that need the resolved dtypes; may raise ValidationError, BuildError or NotSupportedError as the API page says.
    ``reference(node, dims, arrays)``: NumPy result. ``dims``: dims of each output; ``arrays``: logical input arrays in input port order, already in
    the reference compute type (float64 for FLOAT and DOUBLE, int64 holding int32-wrapped values for INT32, int64 for INT64; movement ops get them
    rounded to the output's dtype); returns one array per output.
    ``integers``: ports whose values the reference and the bounds get as they are, not in the compute type.
    ``drawn(node, dims of the inputs, generator)``: random values by port, for inputs of which not every number has a meaning (places, offsets).
    ``domain``: "float" where the op means something only on floats; with an integer compute type it is calculated in FLOAT.
    ``typed``: the reference takes the data types of the outputs as a fourth argument: rounding to them is part of what the op calculates.
    ``expand(expansion)``: a composite op as simpler nodes (role "composite"); its reference is written independently of that.
    ``spans(node, dims, arrays, spans of the arrays, arithmetic)``: where a kernel's results may lie, one span per output; None: the role's analysis.
    ``work(input dims, output dims)``: arithmetic operations, where they are not one an element of the output (or none).
    ``as_matmul(node, input dims, output dims)``: a contraction as a matrix product, from which error bounds follow; None: it is one.
    ``internal``: only expansions make it; a text that has it is refused.
    ``columns``: of such a contraction, the dim of its output that the columns are: an epilogue can keep sums of them, or over them.
    """

    tag: str
    role: Role
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    infer: Callable[[NodeDecl], None]
    check: Callable[[NodeDecl], None]
    reference: Callable[..., list[Any]]
    optional: tuple[str, ...] = ()
    attrs: tuple[str, ...] = ()
    domain: Literal["any", "float"] = "any"
    typed: bool = False
    integers: tuple[str, ...] = ()
    drawn: Callable[[Node, dict[str, tuple[int, ...]], np.random.Generator], dict[str, np.ndarray[Any, Any]]] | None = None
    expand: Callable[[Expansion], None] | None = None
    spans: Callable[[Node, list[tuple[int, ...]], list[Any], list[Span], Arithmetic], list[Span]] | None = None
    work: Callable[[list[tuple[int, ...]], list[tuple[int, ...]]], int] | None = None
    as_matmul: Callable[[Node, list[tuple[int, ...]], tuple[int, ...]], MatmulForm] | None = None
    columns: int | None = None
    internal: bool = False
