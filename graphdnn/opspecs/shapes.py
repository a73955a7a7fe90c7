"""Rules that ops share: required ports, broadcasting, filling in dims and strides, strides that overlap themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graphdnn.errors import NotSupportedError, ValidationError, explain
from graphdnn.ir import layout
from graphdnn.ir.node import NodeDecl
from graphdnn.ir.tensor import Dims, TensorDecl

_SEARCH_LIMIT = 20_000
"""Steps of the search for two elements in one place, after which strides count as overlapping."""


def require(node: NodeDecl, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Every named port is there and every input has dims. ValidationError otherwise."""
    for kind, ports, found in (("input", inputs, node.inputs), ("output", outputs, node.outputs)):
        for p in ports:
            if found.get(p) is None:
                have = ", ".join(found) or "none"
                raise ValidationError(explain(f"{node.op.lower()} needs {kind} {p}", node=node.label, expected=", ".join(ports), found=have))
    for t in node.inputs.values():
        if t.dim is None or t.stride is None:
            raise ValidationError(
                explain(
                    "the input has no dims and strides",
                    node=node.label,
                    tensor=t.name,
                    fix="call set_dim and set_stride, or make it with graph.tensor(dim=, stride=)",
                )
            )


def dims(t: TensorDecl) -> Dims:
    """Dims of an input; :func:`require` has made sure of them."""
    assert t.dim is not None, "checked by require"
    return tuple(t.dim)


def strides(t: TensorDecl) -> Dims:
    """Strides of an input; :func:`require` has made sure of them."""
    assert t.stride is not None, "checked by require"
    return tuple(t.stride)


def axis(node: NodeDecl, what: str, value: object, of: TensorDecl, error: type[Exception] = ValidationError) -> int:
    """An axis of ``of``, counted from the front. Raises ``error`` where it is out of range (negative ones count from the end)."""
    rank = len(dims(of))
    if isinstance(value, int) and not isinstance(value, bool) and -rank <= value < rank:
        return value % rank
    allowed = f"an axis in {-rank}..{rank - 1}" if rank else "a tensor with at least one dim"
    raise error(explain(f"{what} is out of range", node=node.label, tensor=of.name, expected=f"{allowed} for dims {list(dims(of))}", found=value))


def broadcast_dims(shapes: Sequence[Dims]) -> Dims | int:
    """NumPy's broadcast shape, right-aligned; or, where there is none, the offending axis of the result."""
    rank = max((len(d) for d in shapes), default=0)
    result = []
    for a in range(rank):
        extents = {d[a - rank + len(d)] for d in shapes if a - rank + len(d) >= 0} - {1}
        if len(extents) > 1:
            return a
        result.append(extents.pop() if extents else 1)
    return tuple(result)


def broadcast(node: NodeDecl, operands: Sequence[TensorDecl]) -> Dims:
    """Dims to which the operands broadcast. ValidationError that names the first two that do not fit, and the axis."""
    for n in range(2, len(operands) + 1):
        found = broadcast_dims([dims(t) for t in operands[:n]])
        if isinstance(found, int):
            new = operands[n - 1]
            first = next(t for t in operands[:n] if isinstance(broadcast_dims([dims(t), dims(new)]), int))
            rank = max(len(dims(t)) for t in operands[:n])
            raise ValidationError(
                explain(
                    f"'{first.name}' and '{new.name}' cannot be broadcast together: axis {found} (of {rank}) differs",
                    node=node.label,
                    expected=f"equal extents, or 1, at every axis from the right; '{first.name}' has dims {list(dims(first))}",
                    found=f"'{new.name}' with dims {list(dims(new))}",
                )
            )
    result = broadcast_dims([dims(t) for t in operands])
    assert not isinstance(result, int), "checked operand by operand"
    return result


def pointwise_strides(node: NodeDecl, operands: Sequence[TensorDecl], dim: Dims) -> Dims:
    """The API's rule: strides of the last operand that has the result's dims; else, for a virtual result, packed in the stride order of the first
    operand (that is no stored scalar). ValidationError for a non-virtual result that no operand decides."""
    for t in reversed(operands):
        if dims(t) == dim:
            return strides(t)
    if not node.outputs["OUT_0"].virtual:
        raise ValidationError(
            explain(
                "output strides could not be computed",
                node=node.label,
                tensor=node.outputs["OUT_0"].name,
                expected=f"an operand with the output's dims {list(dim)}",
                found=", ".join(f"'{t.name}' {list(dims(t))}" for t in operands),
                fix="call set_stride on the output",
            )
        )
    first = next((t for t in operands if t.value is None), operands[0])
    lead = 1 + max((abs(x) for x in strides(first)), default=0)
    missing = len(dim) - len(dims(first))
    return layout.like(dim, [lead + missing - a for a in range(missing)] + [abs(x) for x in strides(first)])


def give(node: NodeDecl, port: str, dim: Dims, stride: Callable[[], Dims]) -> None:
    """Set the dims and strides of an output where the user has not; ValidationError where the user's dims contradict ``dim``.

    Strides that a non-virtual output would take over from a repeated or mirrored operand (stride 0 or negative) cannot be written to: it gets
    packed strides in the same order.
    """
    t = node.outputs[port]
    if t.dim is None:
        t.dim = dim
    elif tuple(t.dim) != dim:
        rule, found_dim = "the dims set on the output contradict the op", list(t.dim)
        raise ValidationError(explain(rule, node=node.label, tensor=t.name, expected=list(dim), found=found_dim, fix="leave them unset"))
    if t.stride is None:
        found = stride()
        if not t.virtual and (overlaps(dim, found) or any(x < 0 for x in found)):
            found = layout.like(dim, [abs(x) for x in found])
        t.stride = found


def overlaps(dim: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether two logical elements lie in one place: whether sum(d_i * s_i) = 0 for some d with |d_i| < dim_i that are not all 0.

    A search over the differences, largest stride first, bounded by what the smaller strides can still make up for; one step a dim for ordinary
    strides. Strides so entangled that _SEARCH_LIMIT steps do not decide count as overlapping.
    """
    if any(d == 0 for d in dim):
        return False
    pairs = sorted(((abs(s), d) for d, s in zip(dim, stride, strict=True) if d > 1), reverse=True)
    reach = [0] * (len(pairs) + 1)
    for i in range(len(pairs) - 1, -1, -1):
        reach[i] = reach[i + 1] + pairs[i][0] * (pairs[i][1] - 1)
    todo, steps = [(0, 0, False)], 0
    while todo:
        i, total, moved = todo.pop()
        if i == len(pairs):
            if total == 0 and moved:
                return True
            continue
        s, d = pairs[i]
        lo, hi = 1 - d, d - 1
        if s:
            lo, hi = max(lo, -((total + reach[i + 1]) // s)), min(hi, (reach[i + 1] - total) // s)
        elif total == 0:
            return True
        steps += max(hi - lo + 1, 0)
        if steps > _SEARCH_LIMIT:
            return True
        todo.extend((i + 1, total + k * s, moved or k != 0) for k in range(lo, hi + 1))
    return False


def check_plain(node: NodeDecl) -> None:
    """The op reads and writes every tensor by its strides alone. NotSupportedError for ragged, reordered and vectorized tensors. The order of a
    virtual one means nothing: nobody sees its memory."""
    for t in (*node.inputs.values(), *node.outputs.values()):
        found = "a ragged offset" if t.ragged_offset is not None else f"reordering {t.reordering}" if t.reordering != "NONE" and not t.virtual else ""
        found = found or (f"vectors of {t.vector_count}" if t.vector_count != 1 else "")
        if found:
            rule = f"{node.op.lower()} takes tensors that dims and strides describe"
            raise NotSupportedError(explain(rule, node=node.label, tensor=t.name, expected="dims and strides alone", found=found))
