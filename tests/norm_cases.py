"""Every normalization and softmax op as a function that declares it on small tensors and marks its outputs; shared by conformance tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from graphdnn import data_type, norm_forward_phase
from graphdnn.ir.layout import by_name
from tests.helpers import Data

F32 = data_type.FLOAT
TRAINING, INFERENCE = norm_forward_phase.TRAINING, norm_forward_phase.INFERENCE
DIM = (2, 6, 3, 5)


@dataclass
class Bench:
    """A graph in the making: tensors of X's type and layout, parameters and statistics in another type."""

    graph: Any
    dtype: data_type = F32
    parameters: data_type = F32
    layout: Any = "row"
    out: data_type | None = None

    def _tensor(self, name: str, dim: Sequence[int], dtype: data_type, layout: Any) -> Any:
        known = next((t for t in self.graph._tensors if t.name == name), None)
        if known is not None:
            assert tuple(known.dim) == tuple(dim), f"{name} is used with two shapes"
            return known
        stride = layout(tuple(dim)) if callable(layout) else by_name(tuple(dim), layout)
        return self.graph.tensor(dim=dim, stride=stride, data_type=dtype, name=name)

    def x(self, name: str, dim: Sequence[int]) -> Any:
        """A tensor like X."""
        return self._tensor(name, dim, self.dtype, self.layout)

    def p(self, name: str, dim: Sequence[int]) -> Any:
        """A parameter or statistics."""
        return self._tensor(f"{name}{list(dim)}", dim, self.parameters, "row")

    def number(self, name: str, rank: int = 1) -> Any:
        """A by-value tensor of one element."""
        known = next((t for t in self.graph._tensors if t.name == name), None)
        ones = [1] * rank
        return known or self.graph.tensor(dim=ones, stride=ones, data_type=F32, is_pass_by_value=True, name=name)

    def outputs(self, name: str, tensors: Sequence[Any], wide: Sequence[int] = ()) -> None:
        """Mark outputs; those at ``wide`` are statistics or gradients of parameters."""
        for i, t in enumerate(tensors):
            if t is not None:
                t.set_output(True).set_name(f"{name}.{i}").set_data_type(self.parameters if i in wide else self.out or self.dtype)


VALUES = {"epsilon": 1e-3, "momentum": 0.25, "count": 30.0}
Declare = Callable[[Bench, tuple[int, ...]], None]


def positive(names: Sequence[str]) -> dict[str, Data]:
    """Data of statistics: inverse deviations and variances are positive."""
    return {n: Data("uniform", 0.5, 1.5) for n in names if n.startswith(("inverse", "variance", "square"))}


def data_of(build: Callable[[Any], Any]) -> dict[str, Data]:
    """Input data of a builder's graph."""
    import graphdnn

    g = graphdnn.pygraph(device="cpu")
    build(g)
    return positive([t.name for t in g._tensors])


# ------------------------------------------------------------------------------------------------------------------------------------- the ops
def scale_dim(dim: tuple[int, ...], axes: Sequence[int] = (-1,)) -> list[int]:
    """Dims of a layernorm's scale over ``axes``."""
    chosen = {a % len(dim) for a in axes}
    return [d if a in chosen else 1 for a, d in enumerate(dim)]


def rest_dim(dim: tuple[int, ...], axes: Sequence[int] = (-1,)) -> list[int]:
    """Dims of its statistics."""
    chosen = {a % len(dim) for a in axes}
    return [1 if a in chosen else d for a, d in enumerate(dim)]


def channels(dim: tuple[int, ...]) -> list[int]:
    """[1, C, 1, ...]."""
    return [1, dim[1], *[1] * (len(dim) - 2)]


def layernorm(b: Bench, dim: tuple[int, ...], axes: Sequence[int] = (-1,)) -> None:
    x, s, t = b.x("x", dim), b.p("scale", scale_dim(dim, axes)), b.p("bias", scale_dim(dim, axes))
    b.outputs(f"layernorm{axes}", b.graph.layernorm(TRAINING, x, s, t, b.number("epsilon")), (1, 2))
    b.outputs(f"layernorm{axes}.inference", b.graph.layernorm(INFERENCE, x, s, t, 1e-5))


def layernorm_backward(b: Bench, dim: tuple[int, ...], axes: Sequence[int] = (-1,)) -> None:
    s, rest = scale_dim(dim, axes), rest_dim(dim, axes)
    statistics = b.p("mean", rest), b.p("inverse", rest)
    made = b.graph.layernorm_backward(b.x("dy", dim), b.x("x", dim), b.p("scale", s), *statistics)
    for t in made[1:]:
        t.set_dim(s)
    b.outputs(f"layernorm_backward{axes}", made, (1, 2))


def rmsnorm(b: Bench, dim: tuple[int, ...]) -> None:
    x, s, t = b.x("x", dim), b.p("scale", scale_dim(dim)), b.p("bias", scale_dim(dim))
    b.outputs("rmsnorm", b.graph.rmsnorm(TRAINING, x, s, epsilon=b.number("epsilon")), (1,))
    b.outputs("rmsnorm.inference", b.graph.rmsnorm(INFERENCE, x, s, bias=t, epsilon=1e-5))


def rmsnorm_backward(b: Bench, dim: tuple[int, ...]) -> None:
    s, inverse = b.p("scale", scale_dim(dim)), b.p("inverse", rest_dim(dim))
    for has_dbias in (True, False):
        made = b.graph.rmsnorm_backward(b.x("dy", dim), b.x("x", dim), s, inverse, has_dbias)
        made[1].set_dim(s.dim)
        b.outputs(f"rmsnorm_backward.{has_dbias}", made, (1, 2))


def adalayernorm(b: Bench, dim: tuple[int, ...]) -> None:
    per_sample = [dim[0], *[1] * (len(dim) - 2), dim[-1]]
    x, s, t = b.x("x", dim), b.p("scale", per_sample), b.p("bias", per_sample)
    b.outputs("adalayernorm", b.graph.adalayernorm(TRAINING, x, s, t, b.number("epsilon")), (1, 2))
    b.outputs("adalayernorm.inference", b.graph.adalayernorm(INFERENCE, x, s, epsilon=1e-5))


def adalayernorm_backward(b: Bench, dim: tuple[int, ...]) -> None:
    per_sample = [dim[0], *[1] * (len(dim) - 2), dim[-1]]
    statistics = b.p("mean", rest_dim(dim)), b.p("inverse", rest_dim(dim))
    b.outputs("adalayernorm_backward", b.graph.adalayernorm_backward(b.x("dy", dim), b.x("x", dim), b.p("scale", per_sample), *statistics), (1, 2))


def instancenorm(b: Bench, dim: tuple[int, ...]) -> None:
    x, s, t = b.x("x", dim), b.p("scale", channels(dim)), b.p("bias", channels(dim))
    b.outputs("instancenorm", b.graph.instancenorm(TRAINING, x, s, t, b.number("epsilon")), (1, 2))
    b.outputs("instancenorm.inference", b.graph.instancenorm(INFERENCE, x, s, t, 1e-5))


def instancenorm_backward(b: Bench, dim: tuple[int, ...]) -> None:
    rest = [*dim[:2], *[1] * (len(dim) - 2)]
    mean, inverse = b.p("mean", rest), b.p("inverse", rest)
    for name, given in (("given", mean), ("calculated", None)):
        made = b.graph.instancenorm_backward(b.x("dy", dim), b.x("x", dim), b.p("scale", channels(dim)), given, inverse)
        b.outputs(f"instancenorm_backward.{name}", made, (1, 2))


def groupnorm(b: Bench, dim: tuple[int, ...]) -> None:
    x, s, t = b.x("x", dim), b.p("scale", channels(dim)), b.p("bias", channels(dim))
    b.outputs("groupnorm", b.graph.groupnorm(TRAINING, x, s, t, b.number("epsilon"), 2), (1, 2))
    b.outputs("groupnorm.inference", b.graph.groupnorm(INFERENCE, x, s, t, 1e-5, dim[1]))


def groupnorm_backward(b: Bench, dim: tuple[int, ...]) -> None:
    rest = [dim[0], 2, *[1] * (len(dim) - 2)]
    made = b.graph.groupnorm_backward(b.x("dy", dim), b.x("x", dim), b.p("scale", channels(dim)), b.p("mean", rest), b.p("inverse", rest))
    b.outputs("groupnorm_backward", made, (1, 2))


def batchnorm(b: Bench, dim: tuple[int, ...]) -> None:
    c = channels(dim)
    x, s, t = b.x("x", dim), b.p("scale", c), b.p("bias", c)
    running = b.p("mean", c), b.p("variance", c)
    b.outputs("batchnorm", b.graph.batchnorm(x, s, t, *running, b.number("epsilon"), b.number("momentum")), (1, 2, 3, 4))
    b.outputs("batchnorm.stateless", b.graph.batchnorm(x, s, t, None, None, 1e-5, None), (1, 2))


def batchnorm_backward(b: Bench, dim: tuple[int, ...]) -> None:
    c = channels(dim)
    made = b.graph.batchnorm_backward(b.x("dy", dim), b.x("x", dim), b.p("scale", c), b.p("mean", c), b.p("inverse", c))
    b.outputs("batchnorm_backward", made, (1, 2))


def batchnorm_inference(b: Bench, dim: tuple[int, ...]) -> None:
    c = channels(dim)
    b.outputs("batchnorm_inference", [b.graph.batchnorm_inference(b.x("x", dim), *(b.p(n, c) for n in ("mean", "inverse", "scale", "bias")))])


def genstats(b: Bench, dim: tuple[int, ...]) -> None:
    b.outputs("genstats", b.graph.genstats(b.x("x", dim)), (0, 1))


def bn_finalize(b: Bench, dim: tuple[int, ...]) -> None:
    c = channels(dim)
    sums = b.p("sum", c), b.p("square of more", c)
    affine = b.p("scale", c), b.p("bias", c)
    running = b.p("mean", c), b.p("variance", c), b.number("momentum")
    every = range(6)
    b.outputs("bn_finalize", b.graph.bn_finalize(*sums, *affine, b.number("epsilon"), 24, *running), every)
    b.outputs("bn_finalize.stateless", b.graph.bn_finalize(*sums, *affine, 1e-5, b.number("count")), every)


def dbn_weight(b: Bench, dim: tuple[int, ...]) -> None:
    c = channels(dim)
    made = b.graph.dbn_weight(b.x("dy", dim), b.x("x", dim), b.p("mean", c), b.p("inverse", c), b.p("scale", c))
    b.outputs("dbn_weight", made, range(5))


def softmax(b: Bench, dim: tuple[int, ...]) -> None:
    for axis in (-1, 1):
        b.outputs(f"softmax{axis}", [b.graph.softmax(b.x("x", dim), axis), b.graph.log_softmax(b.x("x", dim), axis)])


def softmax_backward(b: Bench, dim: tuple[int, ...]) -> None:
    dy, y = b.x("dy", dim), b.x("x", dim)
    for axis in (-1, 1):
        b.outputs(f"softmax_backward{axis}", [b.graph.softmax_backward(dy, y, axis), b.graph.log_softmax_backward(dy, y, axis)])


def logsumexp(b: Bench, dim: tuple[int, ...]) -> None:
    x = b.x("x", dim)
    b.outputs("logsumexp", [b.graph.logsumexp(x, 1), b.graph.logsumexp(x, -1, keepdim=True)])


def logsumexp_backward(b: Bench, dim: tuple[int, ...]) -> None:
    x, kept, dropped = b.x("x", dim), [*dim[:-1], 1], [*dim[:-1]]
    made = [b.graph.logsumexp_backward(b.p(f"dy {n}", d), x, b.p(f"square {n}", d), -1) for n, d in (("kept", kept), ("dropped", dropped))]
    b.outputs("logsumexp_backward", made)


OPS: dict[str, Declare] = {
    f.__name__: f
    for f in (
        layernorm, layernorm_backward, rmsnorm, rmsnorm_backward, adalayernorm, adalayernorm_backward, instancenorm, instancenorm_backward,
        groupnorm, groupnorm_backward, batchnorm, batchnorm_backward, batchnorm_inference, genstats, bn_finalize, dbn_weight,
        softmax, softmax_backward, logsumexp, logsumexp_backward,
    )
}  # fmt: skip
"""Method (or pair of methods) -> what declares it in its forms."""


def declared(names: Sequence[str], dim: tuple[int, ...] = DIM, **bench: Any) -> Callable[[Any], None]:
    """A builder of one graph with these ops."""

    def build(g: Any) -> None:
        b = Bench(g, **bench)
        for n in names:
            OPS[n](b, dim)

    return build
