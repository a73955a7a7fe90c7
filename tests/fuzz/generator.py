"""Seeded random graphs.

:func:`generate` draws a program; :func:`tests.fuzz.repair.tame` then replaces ops whose reference is mostly NaN, infinite or too ill-conditioned to
compare. Everything is decided by ``random.Random(seed)``, so a seed names a program as long as these files do not change.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np

from graphdnn.ir import layout
from graphdnn.opspecs.pointwise import POINTWISE
from graphdnn.opspecs.reduction import REDUCTION
from tests.fuzz.anchors import FAMILIES
from tests.fuzz.blocks import MORE
from tests.fuzz.program import Dims, Input, Op, Program, needed
from tests.fuzz.shapes import USUAL, Limits, Shapes, Value, overlaps
from tests.helpers import Data

FLOATS = ("FLOAT", "FLOAT", "FLOAT", "HALF", "BFLOAT16", "DOUBLE", "FP8_E4M3", "FP8_E5M2")
INTS = ("INT32", "INT32", "INT8", "UINT8", "INT64", "BOOLEAN")
POSITIVE = {"log", "sqrt", "rsqrt", "pow"}
"""Methods whose first operand is mostly made positive."""
NONZERO = {"div", "mod", "reciprocal"}
"""Methods whose last operand is mostly made non-zero."""
METHODS = {m.method: (m.args, m.params) for row in POINTWISE.values() for m in (row, *row.aliases)}
"""Method -> (operands, other keywords)."""
MANY = {"attention": 2.9, "convolution": 1.7, "normalization": 1.3, "resampling": 1.2}
"""Families that are drawn oftener, for their many options."""
NUMBERS = {"negative_slope": (0.0, 0.1, -0.5), "lower_clip": (0.0, -0.5, 0.25), "upper_clip": (6.0, 1.0, 0.75), "swish_beta": (0.5, 1.5, -1.0)}
"""Values of keywords; a new keyword in the table needs a line here."""


class Generator(Shapes):
    """State while one program is drawn."""

    def __init__(self, seed: int, limits: Limits) -> None:
        super().__init__(random.Random(seed), limits)
        self.seed = seed
        self.inputs: list[Input] = []
        self.ops: list[Op] = []
        self.pool: list[Value] = []
        self.expect: dict[str, tuple[Dims, Dims]] = {}
        self.unmatched: set[str] = set()
        self.intermediate = self.r.choice((None, None, "FLOAT", "FLOAT", "DOUBLE", "HALF", "BFLOAT16"))
        self.compute = self.r.choice((None, None, None, "FLOAT", "DOUBLE"))

    # ------------------------------------------------------------------------------------------------------------------------- inputs
    def buffer(self, dim: Dims, dtype: str | None = None, data: Data | None = None, stride: Dims | None = None, ragged: str = "") -> Value:
        """A new input tensor."""
        r, name = self.r, f"x{len(self.inputs)}"
        dtype = dtype or r.choice(FLOATS if r.random() < 0.75 else INTS)
        stride = self.strides(dim, repeat=True) if stride is None else stride
        offset = r.choice((0, 0, 0, 1, 2, 3, 4, 8))
        alignment = r.choice((0, 1)) if offset else r.choice((0, 0, 1, 4))
        self.inputs.append(Input(name, dim, stride, dtype, "buffer", offset, alignment, data=data or self.data(dtype), ragged=ragged))
        return self.add(Value(name, dim, stride, _kind(dtype), dtype))

    def input_of(self, name: str) -> Input:
        """The input of this name."""
        return next(i for i in self.inputs if i.name == name)

    def data(self, dtype: str) -> Data:
        """Values for an input: normal, a grid that low precision holds exactly, or a narrow range."""
        r = self.r
        if _kind(dtype) == "f":
            return r.choice((Data("normal"), Data("normal", hi=3), Data("grid", -4, 4, 0.25), Data("uniform", 0.25, 2), Data("uniform", -1, 1)))
        if dtype == "BOOLEAN":
            return Data("grid", 0, 1)
        low = 0 if dtype == "UINT8" else -9
        return r.choice((Data("grid", low, 9), Data("grid", low, 9), Data("full") if dtype in ("INT8", "UINT8", "INT32") else Data("grid", low, 100)))

    def scalar(self, rank: int) -> str | float | int:
        """A number, a by-value tensor, a runtime scalar or a compile-time constant."""
        r = self.r
        value: float | int = r.choice((0.5, 2.0, -1.5, 0.25, 3, -2, 1))
        mode = r.choice(("number", "by_value", "runtime", "constant"))
        return value if mode == "number" else self.held(value, mode, rank if mode == "by_value" else 1)

    def held(self, value: float | int, mode: str = "by_value", rank: int = 1) -> str:
        """A scalar as a tensor."""
        name = f"x{len(self.inputs)}"
        self.inputs.append(Input(name, (1,) * rank, (1,) * rank, "FLOAT" if isinstance(value, float) else "INT32", mode, value=value))
        return name

    # --------------------------------------------------------------------------------------------------------------------------- pool
    def add(self, value: Value) -> Value:
        self.pool.append(value)
        return value

    def pick(self, want: object = None) -> Value:
        """A value, newer ones likelier, that ``want`` accepts; a new input if there is none."""
        options = [v for v in self.pool if want is None or want(v)]  # type: ignore[operator]
        if not options or self.r.random() < 0.05 and want is None:
            return self.buffer(self.dims())
        made = [v for v in options if v.name.startswith("t")]
        options = made if made and self.r.random() < 0.75 else options
        return self.r.choice(options[-3:] if self.r.random() < 0.6 else options)

    def partner(self, a: Value) -> Value:
        """A second operand: a pool value that broadcasts with ``a`` within the limits, or a new input."""

        def fits(v: Value) -> bool:
            try:
                return math.prod(np.broadcast_shapes(v.dim, a.dim)) <= self.limits.elements
            except ValueError:
                return False

        if self.r.random() < 0.5 and any(fits(v) for v in self.pool):
            return self.pick(fits)
        if self.r.random() < 0.3 and 1 in a.dim:
            wider = tuple(d if d != 1 else self.r.choice((1, 2, 3, 5)) for d in a.dim)
            if math.prod(wider) <= self.limits.elements:
                return self.buffer(wider)
        return self.buffer(self.narrowed(a.dim))

    # ----------------------------------------------------------------------------------------------------------------------------- ops
    def emit(self, op: Op, dim: Dims, stride: Dims | None, kind: str, keep_dtype: str | None = None) -> Value:
        """Append ``op`` with a random setting of its result; ``keep_dtype``: the result must have this dtype (movement ops)."""
        r = self.r
        output = r.random() < 0.25
        dtype = (
            keep_dtype
            if keep_dtype and r.random() < 0.8
            else (r.choice(FLOATS if kind == "f" or r.random() < 0.4 else INTS) if output or r.random() < 0.2 else None)
        )
        op = replace(op, output=output, out_dtype=dtype)
        if op.out_dim is None and output and r.random() < 0.5:
            stride = self.strides(dim, repeat=False)
            op = replace(op, out_dim=dim, out_stride=stride, out_offset=r.choice((0, 0, 1, 2, 4)))
        op, stride = self.storable(op, dim, stride) if output else (op, stride)
        if op.out_dim is None and op.out_stride is None and stride is not None:
            self.expect[op.out] = (dim, stride)
        self.ops.append(op)
        resolved = dtype or self.intermediate or {"f": "FLOAT", "i": "INT32"}[kind]
        return self.add(Value(op.out, dim, stride, _kind(resolved), resolved))

    def storable(self, op: Op, dim: Dims, stride: Dims | None) -> tuple[Op, Dims | None]:
        """Give an output explicit strides where there are none to inherit, or unknown or overlapping ones."""
        if stride is None or op.out in self.unmatched or overlaps(dim, stride):
            stride = self.strides(dim, repeat=False)
            while overlaps(dim, stride):
                stride = self.strides(dim, repeat=False)
            return replace(op, out_dim=dim, out_stride=stride), stride
        return op, stride

    def pointwise(self) -> None:
        r = self.r
        method = r.choice(sorted(METHODS))
        count = len(METHODS[method][0])
        operands = [self.pick()]
        if method in POSITIVE and r.random() < 0.8:
            operands = [self.positive(operands[0])]
        args: list[str | float | int] = [operands[0].name]
        for i in range(1, count):
            if i == 1 and r.random() < 0.15:
                args.append(self.scalar(len(operands[0].dim)))
                continue
            other = self.partner(replace(operands[0], dim=np.broadcast_shapes(*(v.dim for v in operands))))
            if i == count - 1 and method in NONZERO and r.random() < 0.8:
                other = self.positive(other)
            operands.append(other)
            args.append(other.name)
        if r.random() < 0.1 and count == 2 and len(operands) == 2:
            args.reverse()
            operands.reverse()
        dim = tuple(np.broadcast_shapes(*(v.dim for v in operands)))
        if method == "gen_index" and not dim:
            return
        op = Op(method, tuple(args), self.name(), self.options(method, len(dim)), self.node_compute())
        if all(v.dim != dim for v in operands):
            self.unmatched.add(op.out)
        self.emit(op, dim, self.inherited(operands, dim, scalars=len(args) != len(operands)), self.kind(operands, method))

    def positive(self, value: Value) -> Value:
        """``abs(value) + 0.25`` as two more ops."""
        a = Op("abs", (value.name,), self.name())
        self.ops.append(a)
        kind = self.kind([value], "abs")
        held = self.intermediate or ("FLOAT" if kind == "f" else "INT32")
        b = Op("add", (a.out, 0.25 if kind == "f" else 1), self.name())
        self.ops.append(b)
        return self.add(Value(b.out, value.dim, None, _kind(held), held))

    def options(self, method: str, rank: int) -> dict[str, float | int]:
        """Values of the method's own arguments: required ones always, others mostly."""
        r = self.r
        named = {p.keyword: p for p in METHODS[method][1]}
        return {k: r.randrange(rank) if k == "axis" else r.choice(NUMBERS[k]) for k, p in named.items() if p.required or r.random() < 0.6}

    def reduction(self) -> None:
        r, x = self.r, self.pick()
        mode = r.choice(sorted(REDUCTION))
        axes = [a for a in range(len(x.dim)) if r.random() < 0.5]
        if mode == "MUL" and math.prod(x.dim[a] for a in axes) > 40:
            mode = "AVG"
        kind = self.kind([x], "")
        op = Op("reduction", (x.name,), self.name(), {"mode": mode}, "FLOAT" if 0 in x.dim else self.node_compute())
        kept = tuple(1 if a in axes else d for a, d in enumerate(x.dim))
        if r.random() < 0.6 and axes:
            op = replace(op, out_dim=kept)
            stride = layout.packed(kept, layout.channels_last_order(len(kept)))
            if r.random() < 0.5:
                stride = self.strides(kept, repeat=False)
            self.emit(replace(op, out_stride=stride), kept, stride, kind)
            return
        keep = r.random() < 0.5
        op = replace(op, kwargs=op.kwargs | {"axes": axes, "keepdim": keep})
        dim = kept if keep else tuple(d for a, d in enumerate(x.dim) if a not in axes)
        self.emit(op, dim, None, kind)

    def matmul(self) -> None:
        r = self.r
        a = self.pick(lambda v: len(v.dim) >= 2) if r.random() < 0.7 else self.matrix()
        if len(a.dim) < 2:
            a = self.matrix()
        *batch, m, k = a.dim
        n = r.choice((1, 2, 3, 5, 8, 17, 33))
        if (
            0 in a.dim
            and r.random() < 0.5
            or math.prod(batch) * m * n * max(k, 1) > self.limits.work
            or math.prod(batch) * m * n > self.limits.elements
        ):
            return
        other = [1 if r.random() < 0.3 else d for d in batch]
        b = self.buffer((*other, k, n), None if r.random() < 0.5 or a.dtype == "BOOLEAN" else a.dtype)
        tags = (f"{a.dtype} x {b.dtype}", *(["mixed"] if a.dtype != b.dtype else []))
        op = Op("matmul", (a.name, b.name), self.name(), {}, self.node_compute(), tags=tags)
        dim = (*np.broadcast_shapes(tuple(batch), tuple(other)), m, n)
        self.emit(op, dim, layout.packed(dim), self.kind([a, b], ""))

    def matrix(self) -> Value:
        r, small = self.r, not self.limits.long
        batch = [r.choice((1, 2, 3)) for _ in range(r.choice((0, 1, 1, 2)))]
        m, k = (r.choice((1, 2, 3, 4)) if small else r.choice((1, 5, 16, 17, 33)) for _ in range(2))
        return self.buffer((*batch, m, k))

    def anchor(self) -> None:
        """An op of one of the families."""
        draw = FAMILIES | MORE
        names = sorted(draw)
        draw[self.r.choices(names, [MANY.get(n, 1.0) for n in names])[0]](self)

    def movement(self) -> None:
        r = self.r
        getattr(self, "_" + r.choice(("slice", "transpose", "reshape", "concatenate")))(self.pick())

    def _slice(self, x: Value) -> None:
        if not x.dim or 0 in x.dim:
            return
        r, slices, dim, stride = self.r, [], [], []
        for axis, d in enumerate(x.dim):
            start = r.randrange(d)
            stop, step = r.randint(start + 1, d), r.choice((1, 1, 1, 2, 3))
            picked = range(d)[start:stop:step]
            if r.random() < 0.2:
                start -= d
            slices.append([None, None, None] if r.random() < 0.3 else [start, stop, step])
            picked = range(d) if slices[-1][0] is None else picked
            dim.append(len(picked))
            stride.append((x.stride[axis] if x.stride else 0) * picked.step)
        self.emit(Op("slice", (x.name,), self.name(), {"slices": slices}), tuple(dim), tuple(stride) if x.stride else None, x.kind, x.dtype)

    def _transpose(self, x: Value) -> None:
        order = list(range(len(x.dim)))
        self.r.shuffle(order)
        stride = tuple(x.stride[a] for a in order) if x.stride else None
        self.emit(Op("transpose", (x.name,), self.name(), {"permutation": order}), tuple(x.dim[a] for a in order), stride, x.kind, x.dtype)

    def _reshape(self, x: Value) -> None:
        r, left, dim = self.r, math.prod(x.dim), []
        if not left:
            return
        for p in (2, 3, 5, 7, 11, 13, 17):
            while left % p == 0 and r.random() < 0.7:
                left //= p
                dim.append(p)
        dim = [left, *dim, *([1] if r.random() < 0.2 else [])]
        r.shuffle(dim)
        while len(dim) > 5:
            dim = [dim[0] * dim[1], *dim[2:]]
        shape = tuple(dim)
        mode = r.choice(("VIEW_ONLY", "LOGICAL"))
        # strides in another order are refused for a virtual VIEW_ONLY result: cuDNN would reinterpret memory by them
        stride = self.strides(shape, repeat=False) if mode == "LOGICAL" and r.random() < 0.6 else layout.packed(shape)
        op = Op("reshape", (x.name,), self.name(), {"reshape_mode": mode}, out_dim=shape, out_stride=stride)
        self.emit(op, shape, stride, x.kind, x.dtype)

    def _concatenate(self, x: Value) -> None:
        if not x.dim:
            return
        r, axis, parts = self.r, self.r.randrange(len(x.dim)), [x]
        for _ in range(r.choice((1, 1, 2))):
            dim = list(x.dim)
            dim[axis] = r.choice((1, 2, 3))
            parts.append(x if r.random() < 0.2 else self.buffer(tuple(dim), x.dtype))
        r.shuffle(parts)
        out = list(x.dim)
        out[axis] = sum(p.dim[axis] for p in parts)
        op = Op("concatenate", tuple(p.name for p in parts), self.name(), {"axis": axis})
        known = parts[0].stride
        self.emit(op, tuple(out), layout.like(out, known) if known else None, x.kind, x.dtype)

    # ------------------------------------------------------------------------------------------------------------------------ little rules
    def name(self) -> str:
        return f"t{len(self.ops)}"

    def node_compute(self) -> str | None:
        return self.r.choice((None, None, None, None, None, "FLOAT", "DOUBLE"))

    def kind(self, operands: list[Value], method: str) -> str:
        """ "i" if the node will calculate in integers."""
        return "i" if all(v.kind == "i" for v in operands) and self.compute is None and method not in POSITIVE else "f"

    def inherited(self, operands: list[Value], dim: Dims, *, scalars: bool) -> Dims | None:
        """Strides by the API page's rule, where the generator models it (no scalar operands of unknown rank)."""
        if scalars:
            return None
        for v in reversed(operands):
            if v.dim == dim:
                return v.stride
        first = operands[0]
        return layout.like(dim, first.stride) if first.stride is not None and len(first.dim) == len(dim) else None

    def program(self) -> Program:
        """Draw ops until there are enough; what nobody reads becomes an output."""
        r = self.r
        self.buffer(self.dims())
        steps = r.randint(1, self.limits.ops)
        for _ in range(50):
            if len(self.ops) >= steps:
                break
            r.choices((self.pointwise, self.reduction, self.matmul, self.movement, self.anchor), (38, 11, 11, 10, 30))[0]()
        read = {a for o in self.ops for a in o.reads}
        made = {v.name: v for v in self.pool}
        for i, op in enumerate(self.ops):
            if op.out not in read and not op.output:
                value = made[op.out]
                op, _ = self.storable(replace(op, output=True), value.dim, op.out_stride or value.stride)
                self.expect.pop(op.out, None) if op.out_dim else None
                self.ops[i] = replace(op, out_dtype=op.out_dtype or r.choice(FLOATS))
        inputs = needed(tuple(self.inputs), self.ops)
        binding = r.choice(("numpy", "pointer", "torch"))
        return Program(inputs, tuple(self.ops), None, self.intermediate, self.compute, self.seed, binding, self.expect)


def _kind(dtype: str) -> str:
    return "i" if dtype.startswith(("INT", "UINT", "BOOL")) else "f"


def generate(seed: int, limits: Limits = USUAL) -> Program:
    """The program of ``seed``, before repair."""
    return Generator(seed, limits).program()
