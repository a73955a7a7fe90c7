"""Ops that move elements and calculate nothing: RESHAPE, TRANSPOSE, SLICE, CONCATENATE.

Their result may have another data type than the input: the cuDNN Frontend refuses that, it runs here, and the elements are converted by the rules
of the numerics contract, from the input's data type straight to the output's (the node's compute type plays no part). RESHAPE keeps the row-major
order of the elements, in both modes and whatever the strides.

``infer`` normalizes attributes: axes and permutations count from the front, slices are (start, end) within the extent.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from graphdnn.errors import BuildError, ValidationError, explain
from graphdnn.ir import layout
from graphdnn.ir.node import Node, NodeDecl
from graphdnn.ir.tensor import Dims, TensorDecl
from graphdnn.opspecs import shapes
from graphdnn.opspecs.spec import OpSpec


# --------------------------------------------------------------------------------------------------------------------------------------- RESHAPE
def _reshape_infer(node: NodeDecl) -> None:
    shapes.require(node, ("X",), ("Y",))
    mode = node.attrs.get("reshape_mode")
    if mode not in (None, "VIEW_ONLY", "LOGICAL"):
        raise ValidationError(explain("reshape_mode not known", node=node.label, expected="VIEW_ONLY or LOGICAL", found=mode))
    x, y = node.inputs["X"], node.outputs["Y"]
    source = shapes.dims(x)
    wanted = node.attrs.get("dim") or y.dim
    if wanted is None:
        raise ValidationError(
            explain(
                "the dims of a reshape cannot be inferred",
                node=node.label,
                tensor=y.name,
                expected=f"dims with {math.prod(source)} elements",
                fix="call set_dim on the output",
            )
        )
    dim = _filled(node, tuple(wanted), source, y)
    if y.dim is not None and tuple(y.dim) == tuple(wanted):
        y.dim = dim
    given = tuple(node.attrs.get("stride") or ())
    order = layout.channels_last_order(len(dim))
    shapes.give(node, "Y", dim, lambda: given if given else layout.packed(dim, order))


def _filled(node: NodeDecl, dim: Dims, source: Dims, y: TensorDecl) -> Dims:
    """``dim`` with one -1 replaced by what makes the element count fit."""
    count, known = math.prod(source), math.prod(d for d in dim if d != -1)
    if dim.count(-1) == 1 and known and count % known == 0:
        dim = tuple(count // known if d == -1 else d for d in dim)
    if any(d < 0 for d in dim) or math.prod(dim) != count:
        raise ValidationError(
            explain(
                "a reshape keeps the number of elements",
                node=node.label,
                tensor=y.name,
                expected=f"dims with {count} elements, like {list(source)}",
                found=f"{list(dim)} with {math.prod(dim)}" if all(d >= 0 for d in dim) else list(dim),
            )
        )
    return dim


def _reshape_check(node: NodeDecl) -> None:
    """Refuses a VIEW_ONLY reshape into a virtual tensor whose strides were set to another order: cuDNN would reinterpret memory there (a transpose
    in disguise), which the row-major rule would silently answer with other numbers."""
    shapes.check_plain(node)
    y = node.outputs["Y"]
    if not y.virtual or node.attrs.get("reshape_mode") == "LOGICAL":
        return
    dim, stride = shapes.dims(y), tuple(y.stride or ())
    rows, last = layout.packed(dim), layout.packed(dim, layout.channels_last_order(len(dim)))
    moving = [a for a, d in enumerate(dim) if d > 1]
    if all(any(stride[a] != known[a] for a in moving) for known in (rows, last)):
        raise ValidationError(
            explain(
                "a reshape keeps the row-major order of the elements and cannot reorder memory by its strides",
                node=node.label,
                tensor=y.name,
                expected=f"strides {list(rows)}, or none set",
                found=list(stride),
                fix="use transpose() to swap dims, or reshape_mode.LOGICAL if the row-major order is what you mean",
            )
        )


def _reshape_reference(node: Node, dims: list[Dims], arrays: list[Any]) -> list[Any]:
    return [np.reshape(arrays[0], dims[0])]


# ------------------------------------------------------------------------------------------------------------------------------------- TRANSPOSE
def _transpose_infer(node: NodeDecl) -> None:
    shapes.require(node, ("X",), ("Y",))
    x = node.inputs["X"]
    dim, stride, given = shapes.dims(x), shapes.strides(x), node.attrs.get("permutation")
    rank = len(dim)
    order = tuple(p % rank for p in given or () if isinstance(p, int) and -rank <= p < rank)
    if given is None or len(given) != rank or set(order) != set(range(rank)):
        expected, found = f"each of 0..{rank - 1} once", None if given is None else list(given)
        raise BuildError(explain("not a permutation of the input's dims", node=node.label, tensor=x.name, expected=expected, found=found))
    node.attrs["permutation"] = order
    shapes.give(node, "Y", tuple(dim[p] for p in order), lambda: tuple(stride[p] for p in order))


def _transpose_reference(node: Node, dims: list[Dims], arrays: list[Any]) -> list[Any]:
    return [np.transpose(arrays[0], node.attr("permutation"))]


# ----------------------------------------------------------------------------------------------------------------------------------------- SLICE
def _slice_infer(node: NodeDecl) -> None:
    shapes.require(node, ("X",), ("Y",))
    x = node.inputs["X"]
    dim, stride = shapes.dims(x), shapes.strides(x)
    slices = tuple(node.attrs.get("slices") or ())
    steps = tuple(node.attrs.get("slice_strides") or (1,) * len(slices))
    if len(slices) != len(dim) or len(steps) != len(dim):
        expected, found = f"{len(dim)} slices", f"{len(slices)} slices with {len(steps)} steps"
        raise ValidationError(explain("slice needs one slice for every dim", node=node.label, tensor=x.name, expected=expected, found=found))
    bounds = []
    for a, ((start, end), step, d) in enumerate(zip(slices, steps, dim, strict=True)):
        if step < 1:
            rule = f"the slice of axis {a} must go forward"
            raise ValidationError(explain(rule, node=node.label, tensor=x.name, expected="a step >= 1", found=step))
        first, last, _ = slice(start, end, step).indices(d)
        if first >= last and d:
            rule, found = f"the slice of axis {a} is empty", f"[{start}:{end}] of an extent of {d}"
            raise ValidationError(explain(rule, node=node.label, tensor=x.name, expected="at least one element", found=found))
        bounds.append((first, max(first, last)))
    node.attrs |= {"slices": tuple(bounds), "slice_strides": steps}
    extents = tuple(len(range(*b, step)) for b, step in zip(bounds, steps, strict=True))
    shapes.give(node, "Y", extents, lambda: tuple(s * step for s, step in zip(stride, steps, strict=True)))


def _slice_reference(node: Node, dims: list[Dims], arrays: list[Any]) -> list[Any]:
    bounds = zip(node.attr("slices"), node.attr("slice_strides"), strict=True)
    return [arrays[0][tuple(slice(start, end, step) for (start, end), step in bounds)]]


# ----------------------------------------------------------------------------------------------------------------------------------- CONCATENATE
def _concatenate_infer(node: NodeDecl) -> None:
    if not node.inputs:
        raise ValidationError(explain("concatenate needs inputs", node=node.label, expected="at least one tensor", found="none"))
    ports = tuple(str(i) for i in range(len(node.inputs)))
    shapes.require(node, ports, ("Y",))
    parts = [node.inputs[p] for p in ports]
    first = shapes.dims(parts[0])
    axis = shapes.axis(node, "axis", node.attrs.get("axis"), parts[0], error=BuildError)
    place = node.attrs.get("in_place_index")
    if place is not None and not 0 <= place < len(parts):
        raise ValidationError(explain("in_place_index is out of range", node=node.label, expected=f"0..{len(parts) - 1}", found=place))
    for t in parts[1:]:
        other = shapes.dims(t)
        if len(other) != len(first) or any(a != axis and m != n for a, (n, m) in enumerate(zip(first, other, strict=True))):
            raise ValidationError(
                explain(
                    f"the inputs differ in another axis than axis {axis}",
                    node=node.label,
                    tensor=t.name,
                    expected=f"dims like those of '{parts[0].name}', {list(first)}, but for axis {axis}",
                    found=list(other),
                )
            )
    node.attrs["axis"] = axis
    node.inputs = {p: node.inputs[p] for p in ports}
    dim = tuple(sum(shapes.dims(t)[a] for t in parts) if a == axis else d for a, d in enumerate(first))
    shapes.give(node, "Y", dim, lambda: layout.like(dim, [abs(s) for s in shapes.strides(parts[0])]))


def _concatenate_reference(node: Node, dims: list[Dims], arrays: list[Any]) -> list[Any]:
    return [np.concatenate(arrays, axis=node.attr("axis"))]


SPECS = (
    OpSpec("RESHAPE", "movement", ("X",), ("Y",), _reshape_infer, _reshape_check, _reshape_reference, attrs=("dim", "stride", "reshape_mode")),
    OpSpec("TRANSPOSE", "movement", ("X",), ("Y",), _transpose_infer, shapes.check_plain, _transpose_reference, attrs=("permutation",)),
    OpSpec("SLICE", "movement", ("X",), ("Y",), _slice_infer, shapes.check_plain, _slice_reference, attrs=("slices", "slice_strides")),
    # no named inputs: any number of them, "0", "1", ...
    OpSpec("CONCATENATE", "movement", (), ("Y",), _concatenate_infer, shapes.check_plain, _concatenate_reference, attrs=("axis", "in_place_index")),
)
