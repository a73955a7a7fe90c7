"""Anchors of random graphs: one op, or a few that belong together, of each family beside pointwise, reduction, matmul and movement.

A function draws its operands from the generator's pool or declares them, so that an anchor stands behind and before other ops. Extents stay small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from graphdnn.ir import layout
from tests.fuzz.program import Dims, Op
from tests.fuzz.shapes import Value
from tests.helpers import Data, given

if TYPE_CHECKING:
    from tests.fuzz.generator import Generator

PARAMETERS = ("FLOAT", "FLOAT", "FLOAT", "HALF", "BFLOAT16", "DOUBLE")
POSITIVE = Data("uniform", 0.5, 1.5)
Values = dict[str, Any]
"""Arguments by keyword."""
DRESSING = ("relu", "tanh", "neg", "sigmoid", "gelu", "identity")


# ---------------------------------------------------------------------------------------------------------------------------------------- operands
def parameter(g: Generator, dim: Sequence[int], data: Data | None = None) -> str:
    """A buffer of a float type."""
    return g.buffer(tuple(dim), g.r.choice(PARAMETERS), data).name


def operand(g: Generator, dim: Sequence[int], dtype: str | None = None) -> Value:
    """A buffer, sometimes behind a pointwise op."""
    made = g.buffer(tuple(dim), dtype)
    if g.r.random() < 0.6:
        return made
    op = Op(g.r.choice(DRESSING), (made.name,), g.name())
    g.ops.append(op)
    held = g.intermediate or ("FLOAT" if g.kind([made], "") == "f" else "INT32")
    return g.add(Value(op.out, made.dim, None, "i" if "INT" in held else "f", held))


def integers(g: Generator, dim: Dims, values: Any, dtype: str = "INT32") -> str:
    """A buffer of these integers, each in a place of its own."""
    return g.buffer(dim, dtype, given(values), g.strides(dim, repeat=False)).name


def number(g: Generator, value: float) -> str | float:
    """A number, or the name of a by-value tensor."""
    return value if g.r.random() < 0.6 else g.held(value)


def image(g: Generator, least: int = 3) -> Value:
    """Something of a rank from ``least`` to 5 with no empty dim: from the pool, or new."""
    r, bound = g.r, g.limits.elements // 4

    def fits(v: Value) -> bool:
        return least <= len(v.dim) <= 5 and 0 < math.prod(v.dim) <= bound and v.dtype != "BOOLEAN"

    if r.random() < 0.6 and any(fits(v) for v in g.pool):
        return g.pick(fits)
    while True:
        rank = r.choice([n for n in (2, 3, 4, 4, 4, 5) if n >= least])
        dim = (r.choice((1, 2, 3)), r.choice((1, 2, 3, 4, 6, 8)), *(r.choice((1, 2, 3, 5, 7)) for _ in range(rank - 2)))
        if math.prod(dim) <= bound:
            return operand(g, dim)


def channels_last(dim: Dims) -> Dims:
    """Packed strides of an inferred convolution result."""
    return layout.packed(dim, layout.channels_last_order(len(dim)))


# ------------------------------------------------------------------------------------------------------------------------------------- convolution
def convolution(g: Generator) -> None:
    """fprop, dgrad or wgrad: groups, strides, dilation, uneven and negative padding, both modes."""
    r, x = g.r, image(g)
    n, c, *space = x.dim
    divisors = [d for d in range(1, c + 1) if c % d == 0]
    groups = r.choice(divisors[1:-1] or divisors) if r.random() < 0.4 else r.choice(divisors)
    k = groups * r.choice((1, 2, 3))
    motion: dict[str, list[int]] = {"pre_padding": [], "post_padding": [], "stride": [], "dilation": []}
    taps, out = [], []
    for s in space:
        pre, post = (r.choice((0, 0, 1, 2) if s < 3 else (0, 0, 1, 2, -1)) for _ in range(2))
        step, dil = r.choice((1, 1, 2, 3)), r.choice((1, 1, 2))
        most = (s + pre + post - 1) // dil + 1
        taps.append(r.randint(1, max(1, min(3, most))))
        out.append((s + pre + post - dil * (taps[-1] - 1) - 1) // step + 1)
        for name, v in zip(motion, (pre, post, step, dil), strict=True):
            motion[name].append(v)
    w, y = (k, c // groups, *taps), (n, k, *out)
    if min(out) < 1 or math.prod(y) * math.prod(w[1:]) > g.limits.work or math.prod(y) > g.limits.elements:
        return
    own = dict(motion) | {"convolution_mode": r.choice(("CROSS_CORRELATION", "CROSS_CORRELATION", "CONVOLUTION"))}
    method = r.choice(("conv_fprop", "conv_dgrad", "conv_wgrad"))
    if method == "conv_fprop":
        operands, dim = [x, operand(g, w, _partner(g, x))], y
    elif method == "conv_dgrad":
        loss = operand(g, y)
        operands, dim = [loss, operand(g, w, _partner(g, loss))], x.dim
    else:
        operands, dim = [x, operand(g, y, _partner(g, x))], w
    op = Op(method, tuple(v.name for v in operands), g.name(), own, g.node_compute(), out_dim=None if method == "conv_fprop" else dim)
    op = replace(op, tags=_kinds_of_convolution(motion, groups, c))
    g.emit(op, dim, channels_last(dim), g.kind(operands, ""))


def _kinds_of_convolution(motion: dict[str, list[int]], groups: int, channels: int) -> tuple[str, ...]:
    """What it is an example of."""
    padding = motion["pre_padding"], motion["post_padding"]
    has = {
        f"{len(motion['stride'])}-D": True,
        "groups": 1 < groups < channels,
        "depthwise": 1 < groups == channels,
        "strided": max(motion["stride"]) > 1,
        "dilated": max(motion["dilation"]) > 1,
        "uneven padding": padding[0] != padding[1],
        "negative padding": min(map(min, padding)) < 0,
    }
    return tuple(name for name, found in has.items() if found)


def _partner(g: Generator, x: Value) -> str | None:
    """The data type of a contraction's other operand: often the same."""
    return x.dtype if g.r.random() < 0.5 and x.dtype != "BOOLEAN" else None


# ----------------------------------------------------------------------------------------------------------------------------------- normalization
def normalization(g: Generator) -> None:
    """A normalization by a sample or by a batch, one of its phases, statistics as outputs or not."""
    method = g.r.choice(("layernorm", "rmsnorm", "adalayernorm", "instancenorm", "groupnorm", "batchnorm", "batchnorm_inference"))
    x = image(g, 2 if method in ("layernorm", "rmsnorm") else 3)
    scale, rest, groups = _shares(g, method, x.dim)
    tensors = {"input": x.name, "scale": parameter(g, scale), "bias": parameter(g, scale)}
    own: dict[str, Any] = {"epsilon": number(g, 1e-2)} | ({"num_groups": groups} if method == "groupnorm" else {})
    extra: list[tuple[int, str, bool]] = []
    tags: tuple[str, ...] = ()
    if method == "batchnorm_inference":
        own, given = {}, {"mean": parameter(g, scale), "inv_variance": parameter(g, scale, POSITIVE)}
        tensors |= given
    elif method == "batchnorm":
        running = g.r.random() < 0.5
        pair = {"in_running_mean": parameter(g, scale), "in_running_var": parameter(g, scale, POSITIVE)} if running else {}
        tensors |= pair
        tags = ("running",) if running else ()
        own |= {"momentum": number(g, 0.25)} if running else dict.fromkeys(("in_running_mean", "in_running_var", "momentum"))
        extra = _some(g, range(1, 5 if running else 3))
    else:
        phase = g.r.choice(("TRAINING", "TRAINING", "INFERENCE"))
        own["norm_forward_phase"] = phase
        extra = _some(g, range(1, 2 if method == "rmsnorm" else 3)) if phase == "TRAINING" else []
        if method in ("rmsnorm", "adalayernorm") and g.r.random() < 0.5:
            tensors.pop("bias")
    g.emit(replace(call(g, method, tensors, own, extra), tags=tags), x.dim, x.stride, "f")


def normalization_backward(g: Generator) -> None:
    """The gradient of a normalization from given statistics."""
    method = g.r.choice(("layernorm", "rmsnorm", "adalayernorm", "instancenorm", "groupnorm", "batchnorm"))
    x = image(g, 2 if method in ("layernorm", "rmsnorm") else 3)
    scale, rest, _ = _shares(g, method, x.dim)
    dy = operand(g, x.dim)
    tensors = {"grad": dy.name, "input": x.name, "scale": parameter(g, scale), "inv_variance": parameter(g, rest, POSITIVE)}
    own: dict[str, Any] = {}
    if method == "rmsnorm":
        own["has_dbias"] = g.r.random() < 0.5
    elif method != "instancenorm" or g.r.random() < 0.5:
        tensors["mean"] = parameter(g, rest)
    op = call(g, f"{method}_backward", tensors, own, _some(g, range(1, 3 if own.get("has_dbias", True) else 2)))
    g.emit(op, x.dim, layout.packed(x.dim) if method == "adalayernorm" else channels_last(x.dim), "f")


def _shares(g: Generator, method: str, dim: Dims) -> tuple[Dims, Dims, int]:
    """Dims of scale and of the statistics, and the number of groups."""
    ones = (1,) * (len(dim) - 2)
    if method in ("layernorm", "rmsnorm"):
        wide = [a for a, d in enumerate(dim) if d > 1] or [len(dim) - 1]
        chosen = {a for a in wide if g.r.random() < 0.5} | {g.r.choice(wide)}
        return tuple(d if a in chosen else 1 for a, d in enumerate(dim)), tuple(1 if a in chosen else d for a, d in enumerate(dim)), 1
    if method == "adalayernorm":
        return (dim[0], *(1,) * (len(dim) - 2), dim[-1]), (*dim[:-1], 1), 1
    channels = (1, dim[1], *ones)
    if method == "groupnorm":
        groups = g.r.choice([d for d in range(1, dim[1] + 1) if dim[1] % d == 0])
        return channels, (dim[0], groups, *ones), groups
    return channels, channels if method.startswith("batchnorm") else (*dim[:2], *ones), 1


def _some(g: Generator, indices: Sequence[int]) -> list[tuple[int, str, bool]]:
    """Further results that are outputs, often none."""
    return [(i, "", True) for i in indices] if g.r.random() < 0.4 else []


def call(g: Generator, method: str, tensors: dict[str, str], own: dict[str, Any], extra: Sequence[tuple[int, str, bool]] = ()) -> Op:
    """A call with everything by keyword; names of by-value numbers count as tensors."""
    named = {k: v for k, v in own.items() if isinstance(v, str) and v.startswith("x")}
    names = tensors | named | {f"{k}.{i}": x for k, v in own.items() if k == "dropout" for i, x in enumerate(v) if isinstance(x, str)}
    plain = {k: v for k, v in own.items() if k not in names and k != "dropout"}
    plain |= {"dropout": [x for x in own["dropout"] if not isinstance(x, str)]} if "dropout" in own else {}
    op = Op(method, (), g.name(), plain, g.node_compute(), tensors=names)
    return replace(op, extra=tuple((i, name or f"{op.out}_{i}", output) for i, name, output in extra))


def statistics(g: Generator) -> None:
    """genstats and bn_finalize of its sums; or dbn_weight."""
    x = image(g, 3)
    channels = (1, x.dim[1], *(1,) * (len(x.dim) - 2))
    if g.r.random() < 0.3:
        given = {"mean": parameter(g, channels), "inv_variance": parameter(g, channels, POSITIVE), "scale": parameter(g, channels)}
        op = call(g, "dbn_weight", {"grad": operand(g, x.dim).name, "input": x.name, **given}, {}, _some(g, range(1, 5)))
        g.emit(op, channels, channels_last(channels), "f")
        return
    sums = call(g, "genstats", {"input": x.name}, {}, [(1, "", g.r.random() < 0.3)])
    g.emit(sums, channels, channels_last(channels), "f")
    if g.r.random() < 0.6:
        tensors = {"sum": sums.out, "sq_sum": sums.extra[0][1], "scale": parameter(g, channels), "bias": parameter(g, channels)}
        own = {"epsilon": 1e-2, "accum_count": math.prod(x.dim) // x.dim[1]}
        g.emit(call(g, "bn_finalize", tensors, own, _some(g, range(1, 4))), channels, channels_last(channels), "f")


# ---------------------------------------------------------------------------------------------------------------------------- softmax, resampling
def softmax(g: Generator) -> None:
    """softmax, log_softmax, logsumexp, or a gradient."""
    r, x = g.r, image(g, 2)
    axis, name = r.randrange(len(x.dim)), r.choice(("softmax", "log_softmax", "logsumexp"))
    own: dict[str, Any] = {"axis": axis - (len(x.dim) if r.random() < 0.3 else 0)}
    kept = tuple(1 if a == axis else d for a, d in enumerate(x.dim))
    if r.random() < 0.5:
        if name == "logsumexp":
            own["keepdim"] = r.random() < 0.5
            dim = kept if own["keepdim"] else tuple(d for a, d in enumerate(x.dim) if a != axis)
            g.emit(call(g, name, {"input": x.name}, own), dim, None, "f")
        else:
            g.emit(call(g, name, {"input": x.name}, own), x.dim, x.stride, "f")
        return
    if name == "logsumexp":
        tensors = {"grad": parameter(g, kept), "output": parameter(g, kept, Data("uniform", 1, 3)), "input": x.name}
    else:
        bounds = (0.0, 1.0) if name == "softmax" else (-3.0, 0.0)
        tensors = {"grad": x.name, "output": parameter(g, x.dim, Data("uniform", *bounds))}
    g.emit(call(g, f"{name}_backward", tensors, own), x.dim, None, "f")


def resampling(g: Generator) -> None:
    """Pooling or interpolation, then perhaps its gradient."""
    r, x = g.r, image(g)
    space = x.dim[2:]
    mode = r.choice(("MAXPOOL", "AVGPOOL_INCLUDE_PADDING", "AVGPOOL_EXCLUDE_PADDING", "BILINEAR", "NEAREST"))
    own: dict[str, Any] = {"mode": mode}
    if mode in ("BILINEAR", "NEAREST"):
        own["stride"] = [r.choice((0.5, 1.0, 1.5, 2.0)) for _ in space]
        out = [int(s / ratio) for s, ratio in zip(space, own["stride"], strict=True)]
    else:
        window = [r.randint(1, min(3, s)) for s in space]
        pads = [[r.randint(0, w - 1) for w in window] for _ in range(2)]
        own |= {"window": window, "stride": [r.choice((1, 1, 2)) for _ in space], "pre_padding": pads[0], "post_padding": pads[1]}
        parts = zip(space, window, *pads, own["stride"], strict=True)
        out = [(s + a + b - w) // step + 1 for s, w, a, b, step in parts]
    dim = (*x.dim[:2], *out)
    if min(out) < 1 or math.prod(dim) > g.limits.elements:
        return
    index = mode == "MAXPOOL" and r.random() < 0.5
    pooled = call(g, "resample", {"input": x.name}, own | ({"generate_index": True} if index else {}), [(1, "", r.random() < 0.5)] if index else [])
    g.emit(pooled, dim, channels_last(dim), g.kind([x], ""))
    if r.random() < 0.5 and (index or mode != "MAXPOOL"):
        tensors = {"loss": operand(g, dim).name} | ({"index": pooled.extra[0][1]} if index else {})
        g.emit(replace(call(g, "resample_backward", tensors, own), out_dim=x.dim), x.dim, channels_last(x.dim), "f")


FAMILIES: dict[str, Callable[[Generator], None]] = {
    "convolution": convolution,
    "normalization": normalization,
    "normalization backward": normalization_backward,
    "statistics": statistics,
    "softmax": softmax,
    "resampling": resampling,
}
"""Family -> what draws one of it."""
_PREFIXES = {
    "sdpa": "attention",
    "moe_": "grouped matmul",
    "block_scale": "block scaling",
    "rng": "random numbers",
    "conv_": "convolution",
    "resample": "resampling",
    "genstats": "statistics",
    "bn_finalize": "statistics",
    "dbn_weight": "statistics",
    "softmax": "softmax",
    "log_softmax": "softmax",
    "logsumexp": "softmax",
    "matmul": "matmul",
    "reduction": "reduction",
    "slice": "movement",
    "transpose": "movement",
    "reshape": "movement",
    "concatenate": "movement",
}


def family(method: str) -> str:
    """The family of an op."""
    if "norm" in method:
        return "normalization backward" if method.endswith("_backward") else "normalization"
    return next((f for p, f in _PREFIXES.items() if method.startswith(p)), "pointwise")


def families(ops: Sequence[Op]) -> Iterator[str]:
    """The family of each op."""
    return (family(o.method) for o in ops)
