"""check: data types and compute types resolved, and the rules that need them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from graphdnn.dtypes import compute_carrier, data_type, info, storable
from graphdnn.errors import BuildError, NotSupportedError, explain
from graphdnn.ir.node import NodeDecl
from graphdnn.ir.tensor import TensorDecl
from graphdnn.opspecs import registry
from graphdnn.passes.infer import in_order


def check(nodes: Sequence[NodeDecl]) -> None:
    """Resolve every data type and compute type of a graph that has passed infer, then ask every op for its own rules.

    A compute type that is not set is DOUBLE if an input is, INT32 where all inputs are integers (INT64 if one is), else FLOAT. A virtual tensor
    without a data type takes the type that its node calculates in. Raises BuildError for a non-virtual tensor without a data type, NotSupportedError
    for types that cannot be stored or calculated with, ValidationError for ops without meaning in their types.
    """
    for n in in_order(nodes):
        for t in n.inputs.values():
            _check_dtype(n, t)
        if n.compute is data_type.NOT_SET:
            n.compute = default_compute(t.dtype for t in n.inputs.values())
        found = carrier(n)
        for t in n.outputs.values():
            if t.dtype is data_type.NOT_SET and t.virtual:
                own = n.compute in storable() and found is compute_carrier(n.compute)
                t.dtype = n.compute if own else found
            _check_dtype(n, t)
        registry.spec(n.op).check(n)


def default_compute(dtypes: Iterable[data_type]) -> data_type:
    """The compute type for inputs of these data types where none is set."""
    found = set(dtypes)
    if data_type.DOUBLE in found:
        return data_type.DOUBLE
    if found and all(info(d).kind != "f" for d in found):
        return data_type.INT64 if data_type.INT64 in found else data_type.INT32
    return data_type.FLOAT


def carrier(node: NodeDecl) -> data_type:
    """The one of dtypes.COMPUTE_TYPES in which a node with a resolved compute type is calculated.

    That of the compute type, but a float type where the row of the op has no meaning in integers, and for BOOLEAN beside float operands, which
    are true where they are not 0, not where they round to 1. NotSupportedError for a compute type that cannot be calculated with.
    """
    try:
        found = compute_carrier(node.compute)
    except NotSupportedError:
        expected = "FLOAT, DOUBLE, INT32, INT64 or a type that is calculated in one of them"
        raise NotSupportedError(explain("compute data type", node=node.label, expected=expected, found=node.compute.name)) from None
    if node.compute is data_type.BOOLEAN:
        kinds = [t.dtype for t in node.inputs.values()]
        found = default_compute(kinds) if any(info(d).kind == "f" for d in kinds) else found
    return registry.carrier(node.op, node.attrs, found)


def _check_dtype(node: NodeDecl, t: TensorDecl) -> None:
    if t.dtype is data_type.NOT_SET:
        fix = "set_data_type, or give the graph io_data_type and intermediate_data_type"
        raise BuildError(explain("data type not set", node=node.label, tensor=t.name, expected="a data type", fix=fix))
    if t.dtype not in storable():
        expected = ", ".join(d.name for d in storable())
        raise NotSupportedError(explain("a tensor cannot have this data type", node=node.label, tensor=t.name, expected=expected, found=t.dtype.name))
