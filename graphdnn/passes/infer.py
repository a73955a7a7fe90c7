"""infer: everything about tensors that can be known before data types are resolved, in the order of the cuDNN Frontend's ``validate``."""

from __future__ import annotations

import graphlib
import heapq
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from graphdnn.dtypes import data_type
from graphdnn.errors import BuildError, GraphError, ValidationError, explain
from graphdnn.ir.node import NodeDecl
from graphdnn.ir.tensor import TensorDecl
from graphdnn.opspecs.registry import spec
from graphdnn.opspecs.shapes import overlaps

LIMIT = 2**62
"""Elements of a tensor, and reach of its strides: beyond, an address does not fit in 64 bits."""


class Context(NamedTuple):
    """Default data types of a graph; NOT_SET leaves a tensor or node without."""

    io: data_type = data_type.NOT_SET
    intermediate: data_type = data_type.NOT_SET
    compute: data_type = data_type.NOT_SET


def infer(nodes: Sequence[NodeDecl], tensors: Sequence[TensorDecl], context: Context) -> None:
    """Check what the user declared and fill in what is missing: data types from ``context``, dims and strides of outputs, dims of stored scalars.

    What the user has set is never overwritten, so that a second call changes nothing. Raises ValidationError (shapes, missing dims, a cycle, a tensor
    of another graph, an output that overlaps itself), BuildError (bad permutation, bad concatenation axis, a uid given twice) and NotSupportedError
    (an op that is not known). Data types may still be NOT_SET afterwards: :func:`graphdnn.passes.check.check` decides them.
    """
    produced = _producers(nodes, tensors)
    for t in tensors:
        if t not in produced:
            check_tensor(t)
    ranks: dict[TensorDecl, int] = {}
    try:
        for n in in_order(nodes):
            _fill(n, context)
            _fit_scalars(n, ranks)
            spec(n.op).infer(n)
            for t in n.outputs.values():
                check_tensor(t, n)
    finally:
        for t, rank in ranks.items():
            t.dim = t.stride = (1,) * rank
    for t in tensors:
        _fill_tensor(t, context)
    _check_uids(tensors)


def inferable(nodes: Sequence[NodeDecl]) -> list[TensorDecl]:
    """Outputs whose dims and strides are what their ops infer where none are set: of a graph that was read from a text, which holds all of them,
    those that nobody need have set. Changes nothing."""
    found: list[TensorDecl] = []
    for n in nodes:
        used = [t for t in (*n.inputs.values(), *n.outputs.values()) if t is not None]
        held, attrs = [(t, t.dim, t.stride) for t in used], dict(n.attrs)
        if any(dim is None or stride is None for _, dim, stride in held):
            continue
        outputs = list(n.outputs.values())
        for t in outputs:
            t.dim = t.stride = None
        try:
            spec(n.op).infer(n)
            found += [t for t, dim, stride in held if t in outputs and (t.dim, t.stride) == (dim, stride)]
        except GraphError:  # an op whose outputs' dims are for the user to say
            continue
        finally:
            n.attrs = attrs
            for t, dim, stride in held:
                t.dim, t.stride = dim, stride
    return found


# ------------------------------------------------------------------------------------------------------------------------------------ the graph
def _producers(nodes: Sequence[NodeDecl], tensors: Sequence[TensorDecl]) -> dict[TensorDecl, NodeDecl]:
    """The node that writes each tensor. ValidationError for two writers, a foreign tensor, a virtual tensor that nobody writes."""
    produced: dict[TensorDecl, NodeDecl] = {}
    for n in nodes:
        for t in n.outputs.values():
            if t in produced:
                found = f"'{produced[t].name}' and '{n.name}'"
                expected = "one node that writes it"
                raise ValidationError(explain("a tensor has one producer", node=n.label, tensor=t.name, expected=expected, found=found))
            produced[t] = n
    known = {*tensors, *produced}
    for n in nodes:
        for t in n.inputs.values():
            if t is not None and t not in known:
                raise ValidationError(explain("the tensor belongs to another graph", node=n.label, tensor=t.name, expected="a tensor of this graph"))
            if t is not None and t.virtual and not t.by_value and t not in produced:
                fix = "set_is_virtual(False), and bind a buffer to it"
                raise ValidationError(explain("no node writes this virtual tensor", node=n.label, tensor=t.name, expected="an op's result", fix=fix))
    return produced


def in_order(nodes: Sequence[NodeDecl]) -> list[NodeDecl]:
    """The nodes, each after those it reads from; otherwise as they were added. ValidationError for a cycle."""
    writer = {t: i for i, n in enumerate(nodes) for t in n.outputs.values()}
    sorter = graphlib.TopologicalSorter({i: {writer[t] for t in n.inputs.values() if t in writer} for i, n in enumerate(nodes)})
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        names = " -> ".join(f"'{nodes[i].name}'" for i in error.args[1])
        raise ValidationError(explain("the graph has a cycle", expected="every node to come after the nodes it reads from", found=names)) from None
    ready, result = list(sorter.get_ready()), []
    heapq.heapify(ready)
    while ready:
        i = heapq.heappop(ready)
        result.append(nodes[i])
        sorter.done(i)
        for j in sorter.get_ready():
            heapq.heappush(ready, j)
    return result


def _check_uids(tensors: Sequence[TensorDecl]) -> None:
    seen: dict[int, TensorDecl] = {}
    for t in tensors:
        if t.uid is None or seen.setdefault(t.uid, t) is t:
            continue
        expected, found = "a different uid for every tensor", f"also '{seen[t.uid].name}'"
        raise BuildError(explain(f"uid {t.uid} already assigned", tensor=t.name, expected=expected, found=found))


# ---------------------------------------------------------------------------------------------------------------------------------- one tensor
def check_tensor(t: TensorDecl, node: NodeDecl | None = None) -> None:
    """Rules of a single tensor; ``node`` is the one that writes it. Raises ValidationError."""
    where = node.name if node else None

    def refuse(rule: str, expected: object = None, found: object = None, fix: str | None = None) -> ValidationError:
        return ValidationError(explain(rule, node=where, tensor=t.name, expected=expected, found=found, fix=fix))

    if t.dim is None:
        raise refuse("dims not set", fix="call set_dim")
    if t.stride is None:
        raise refuse("strides not set", fix="call set_stride")
    dim, stride = tuple(t.dim), tuple(t.stride)
    if len(dim) != len(stride):
        raise refuse("dims and strides differ in rank", f"{len(dim)} strides for dims {list(dim)}", list(stride))
    if any(d < 0 for d in dim):
        raise refuse("dims must not be negative", "extents >= 0", list(dim))
    if math.prod(max(d, 1) for d in dim) > LIMIT or sum((d - 1) * abs(s) for d, s in zip(dim, stride, strict=True) if d > 1) > LIMIT:
        raise refuse("the tensor is too large", "offsets that fit in 62 bits", f"dims {list(dim)} strides {list(stride)}")
    if t.by_value and (t.virtual or node is not None):
        raise refuse("a tensor that is passed by value cannot be virtual or the result of an op", "set_is_virtual(False), or not by value")
    if t.by_value and math.prod(dim) != 1:
        raise refuse("a tensor that is passed by value has one element", "dims of ones", list(dim))
    _check_layout(t, refuse)
    if node is not None and not t.virtual:
        if any(s < 0 and d > 1 for d, s in zip(dim, stride, strict=True)):
            raise refuse("strides of an output must not be negative", "strides >= 0", list(stride), "write it forward")
        if overlaps(dim, stride) if t.ragged_offset is None else overlaps(dim[1:], stride[1:]):
            found = f"dims {list(dim)} strides {list(stride)}"
            raise refuse("the output overlaps itself", "strides that give every element a place of its own", found)


def _check_layout(t: TensorDecl, refuse: Callable[..., ValidationError]) -> None:
    """Consistency of ragged offsets and vectorized dims."""
    assert t.dim is not None, "called by check_tensor"
    offset = t.ragged_offset
    if offset is not None:
        if t.virtual:
            raise refuse("a virtual tensor has no ragged offset", "a non-virtual tensor")
        if offset.dtype not in (data_type.NOT_SET, data_type.INT32, data_type.INT64):
            raise refuse(f"ragged offset '{offset.name}' must be integers", "INT32 or INT64", offset.dtype.name)
        if offset.dim is not None and t.dim and math.prod(offset.dim) != t.dim[0] + 1:
            raise refuse(f"ragged offset '{offset.name}' needs one entry a batch and one more", f"{t.dim[0] + 1} elements", list(offset.dim))
    if t.vector_count != 1 and not 0 <= t.vector_dimension < len(t.dim):
        raise refuse("the vectorized dim is out of range", f"0..{len(t.dim) - 1}", t.vector_dimension)


# ------------------------------------------------------------------------------------------------------------------------------------- filling
def _fill_tensor(t: TensorDecl, context: Context) -> None:
    if t.dtype is data_type.NOT_SET:
        t.dtype = context.intermediate if t.virtual else context.io


def _fill(n: NodeDecl, context: Context) -> None:
    for t in (*n.inputs.values(), *n.outputs.values()):
        if t is not None:
            _fill_tensor(t, context)
    if n.compute is data_type.NOT_SET:
        n.compute = context.compute


def _fit_scalars(n: NodeDecl, ranks: dict[TensorDecl, int]) -> None:
    """A stored scalar (``tensor_scalar``, a number) broadcasts to anything: it counts as rank 0 beside tensors, so that it never adds a dim.
    ``ranks`` collects the rank that it gets in the end: that of the first tensor beside it, the smallest over all its readers."""
    if spec(n.op).role not in ("pointwise", "composite", "random", "attention"):
        return
    operands = [t for t in n.inputs.values() if t is not None]
    scalars = [t for t in operands if t.value is not None and math.prod(t.dim or ()) == 1]
    rank = next((len(t.dim or ()) for t in operands if t not in scalars), None)
    for t in scalars:
        t.dim = t.stride = (1,) if rank is None else ()
        ranks[t] = min(ranks.get(t, 64), 1 if rank is None else rank)
