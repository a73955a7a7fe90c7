"""Part 2.1: pointwise, scalars, matmul, convolution, reduction, movement, resampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphdnn import data_type, reduction_mode, reshape_mode, scalar_type
from graphdnn.errors import BuildError
from tests.api_page.row import F32, Row, breaks, fails, here, ours, runs, same, shapes, t

BF16 = data_type.BFLOAT16
NHWC = (60, 1, 12, 4)
IMAGE, WEIGHT = (2, 4, 5, 3), (6, 4, 3, 3)
PLAIN = {"padding": [1, 1], "stride": [1, 1], "dilation": [1, 1]}
ADD = reduction_mode.ADD


def _attributes(g: Any) -> None:
    """Defaults of relu, elu, softplus and swish, as numbers."""
    import numpy as np

    g = type(g)(device="cpu", io_data_type=F32, intermediate_data_type=F32, compute_data_type=F32)
    x = t(g, 3)
    made = [f(x).set_output(True) for f in (g.relu, g.elu, g.softplus, g.swish)]
    g.build_operation_graph()
    from graphdnn import reference

    og = g._opgraph
    found = reference.run(og, {og.inputs[0]: np.array([-1.0, 0.0, 2.0])})
    a = np.array([-1.0, 0.0, 2.0])
    wanted = [np.maximum(a, 0), np.where(a > 0, a, np.expm1(a)), np.log1p(np.exp(a)), a / (1 + np.exp(-a))]
    for y, want in zip(made, wanted, strict=True):
        np.testing.assert_allclose(next(found[i] for i in og.outputs if og.tensors[i].uid == y.get_uid()), want, rtol=1e-6)


POINTWISE = (
    same(
        "2.1",
        "pointwise",
        "broadcast; strides of the last operand with the output's dims",
        shapes(lambda g: g.add(t(g, 2, 3), t(g, 2, 3, stride=(1, 2))), ((2, 3), (1, 2))),
    ),
    same(
        "2.1",
        "pointwise",
        "strides of the first operand if the last is broadcast",
        shapes(lambda g: g.add(t(g, 2, 3, stride=(1, 2)), t(g, 3)), ((2, 3), (1, 2))),
    ),
    same("2.1", "pointwise", "ranks differ", shapes(lambda g: g.add(t(g, 5), t(g, 2, 3, 5, stride=(3, 1, 6))), ((2, 3, 5), (3, 1, 6)))),
    same(
        "2.1", "pointwise", "no operand has the dims, virtual: the first one's order, the earlier dim faster on ties", lambda g: _virtual_strides(g)
    ),
    same(
        "2.1",
        "pointwise",
        "no operand has the dims, not virtual",
        fails(lambda g: g.add(t(g, 2, 3, 1), t(g, 2, 1, 5)).set_output(True), "output strides could not be computed", "set_stride"),
    ),
    same(
        "2.1",
        "pointwise",
        "dims that do not fit",
        fails(lambda g: g.add(t(g, 2, 3, name="a"), t(g, 2, 4, name="b"), name="n"), "'n'", "'a'", "'b'", "axis 1", r"\[2, 4\]"),
    ),
    same(
        "2.1",
        "pointwise",
        "data types of comparisons are those of any output",
        runs(lambda g: g.cmp_gt(t(g, 2), t(g, 2)), lambda y: y.get_data_type() is F32),
    ),
    same("2.1", "pointwise", "defaults of attributes", _attributes),
    ours("2.1", "pointwise", "gen_index with an axis out of range", "accepted", fails(lambda g: g.gen_index(t(g, 2, 3), 2), "axis", "-2..1")),
    same("2.1", "scalars", "ones of the other operand's rank, FLOAT or INT32", lambda g: _scalars(g)),
)


def _virtual_strides(g: Any) -> None:
    y = g.add(t(g, 2, 3, 1), t(g, 2, 1, 5))
    g.validate()
    assert (y.get_dim(), y.get_stride()) == ([2, 3, 5], [15, 1, 3])


def _scalars(g: Any) -> None:
    a, b = g.tensor_scalar(1.5, scalar_type.RUNTIME_PARAM), g.tensor_scalar(2, scalar_type.COMPILE_TIME_CONST)
    x = t(g, 2, 3, 4, stride=(12, 1, 3))
    y = g.mul(a, g.add(x, b))
    g.validate()
    assert a.get_dim() == b.get_stride() == [1, 1, 1] and y.get_stride() == [12, 1, 3]
    assert (a.get_data_type(), b.get_data_type()) == (F32, data_type.INT32)


MATMUL = (
    same("2.1", "matmul", "dims, row-major", shapes(lambda g: g.matmul(t(g, 1, 3, 7), t(g, 4, 7, 5, stride=(35, 1, 7))), ((4, 3, 5), (15, 5, 1)))),
    same("2.1", "matmul", "rank below 2", fails(lambda g: g.matmul(t(g, 7, name="a"), t(g, 7, 5), name="m"), "'m'", "'a'", "rank >= 2")),
    same("2.1", "matmul", "no dims", fails(lambda g: g.matmul(_bare(g), t(g, 7, 5)), "dims not set")),
    ours(
        "2.1",
        "matmul",
        "K of A and B differ",
        "accepted, reads past the end",
        fails(lambda g: g.matmul(t(g, 3, 7, name="a"), t(g, 8, 5, name="b"), name="m"), "'m'", "'a'", "'b'", r"\[8, 5\]"),
    ),
    ours(
        "2.1",
        "matmul",
        "batches of 2 and 3",
        "accepted as 3, reads past the end",
        fails(lambda g: g.matmul(t(g, 2, 3, 7), t(g, 3, 7, 5)), "batch axis 0"),
    ),
    here(
        "2.1",
        "matmul",
        "A and B of two ranks",
        "dims without meaning",
        "batch dims broadcast from the right",
        shapes(lambda g: g.matmul(t(g, 3, 7), t(g, 4, 7, 5)), ((4, 3, 5), (15, 5, 1))),
    ),
    same("2.1", "matmul", "padding changes no dims", shapes(lambda g: g.matmul(t(g, 3, 7), t(g, 7, 5), padding=2.0), ((3, 5), (5, 1)))),
)


def _bare(g: Any) -> Any:
    x = t(g, 2, 3)
    x.dim = None
    return x


# ------------------------------------------------------------------------------------------------------------------------------------- convolution
def fprop(x: tuple[int, ...] = IMAGE, w: tuple[int, ...] = WEIGHT, without: str = "", **more: Any) -> Callable[[Any], Any]:
    """A convolution named c."""
    lists = {n: v for n, v in (PLAIN | more).items() if n != without}
    return lambda g: g.conv_fprop(t(g, *x, name="x"), t(g, *w, name="w"), **lists, name="c")


def dgrad(dim: tuple[int, ...] | None, **more: Any) -> Callable[[Any], Any]:
    """A data gradient whose dims are set, or not."""

    def declare(g: Any) -> Any:
        made = g.conv_dgrad(t(g, 2, 6, 5, 3, name="dy"), t(g, *WEIGHT, name="w"), **(PLAIN | more), name="c")
        return made if dim is None else made.set_dim(dim)

    return declare


def wgrad(dim: tuple[int, ...] | None) -> Callable[[Any], Any]:
    """A filter gradient whose dims are set, or not."""

    def declare(g: Any) -> Any:
        made = g.conv_wgrad(t(g, *IMAGE, name="x"), t(g, 2, 6, 5, 3, name="dy"), **PLAIN, name="c")
        return made if dim is None else made.set_dim(dim)

    return declare


CONVOLUTION = (
    same("2.1", "conv_fprop", "dims, NHWC order of an NCHW input", shapes(fprop(), ((2, 6, 5, 3), (90, 1, 18, 6)))),
    same(
        "2.1",
        "conv_fprop",
        "uneven padding, stride, dilation",
        shapes(lambda g: g.conv_fprop(t(g, *IMAGE), t(g, *WEIGHT), [1, 2], [0, 1], [2, 1], [1, 2]), ((2, 6, 2, 2), (24, 1, 12, 6))),
    ),
    same("2.1", "conv_fprop", "groups by the channels", shapes(fprop(w=(6, 2, 3, 3)), ((2, 6, 5, 3), (90, 1, 18, 6)))),
    same("2.1", "conv_fprop", "no padding", fails(fprop(without="padding"), "'c'", "Pre padding not set.")),
    same("2.1", "conv_fprop", "no stride", fails(fprop(without="stride"), "'c'", "strides not set.")),
    same("2.1", "conv_fprop", "no dilation", fails(fprop(without="dilation"), "'c'", "dilation not set.")),
    ours(
        "2.1",
        "conv_fprop",
        "channels that do not divide (8 and 7)",
        "accepted",
        fails(fprop((2, 8, 5, 3), (6, 7, 3, 3)), "'c'", "'x'", "multiple of 7", "C = 8"),
    ),
    ours(
        "2.1", "conv_fprop", "outputs that do not divide into the groups", "accepted", fails(fprop(w=(5, 2, 3, 3)), "'c'", "'w'", "2 groups", "K = 5")
    ),
    ours(
        "2.1",
        "conv_fprop",
        "a filter larger than the padded input",
        "accepted, extent -14",
        fails(fprop((2, 4, 16, 16), (6, 4, 33, 33), padding=[0, 0]), "'c'", "'w'", "larger than the padded input", "at most 16", "33"),
    ),
    ours("2.1", "conv_fprop", "lists of another length than the spatial rank", "reads past the list", fails(fprop(padding=[1]), "'c'", "2 entries")),
    ours("2.1", "conv_fprop", "a stride or dilation below 1", "accepted", fails(fprop(stride=[0, 1]), "'c'", "stride must be positive")),
    same("2.1", "conv_dgrad", "dims set on DX", shapes(dgrad(IMAGE), (IMAGE, NHWC))),
    same("2.1", "conv_dgrad", "no dims on DX", fails(dgrad(None), "'c'", "output dimension inferencing is not possible", "set_dim")),
    ours("2.1", "conv_dgrad", "dims whose forward convolution is not DY's", "accepted", fails(dgrad((2, 4, 7, 3)), "'c'", "not consistent", "'dy'")),
    same("2.1", "conv_wgrad", "dims set on DW", shapes(wgrad(WEIGHT), (WEIGHT, (36, 1, 12, 4)))),
    ours("2.1", "conv_wgrad", "no dims on DW", "crash", fails(wgrad(None), "'c'", "output dimension inferencing is not possible")),
    ours("2.1", "conv_wgrad", "dims whose forward convolution is not DY's", "accepted", fails(wgrad((6, 4, 5, 3)), "'c'", "not consistent", "'dy'")),
)


# -------------------------------------------------------------------------------------------------------------------------- reduction and movement
def reshaped(*dim: int, stride: Any = None, **more: Any) -> Callable[[Any], Any]:
    """A reshape of eight elements to dims, or to none."""

    def declare(g: Any) -> Any:
        y = g.reshape(t(g, 2, 4, name="x"), name="r", **more)
        if dim:
            y.set_dim(dim)
        return y if stride is None else y.set_stride(stride)

    return declare


def sliced(*parts: slice, dtype: data_type = data_type.NOT_SET) -> Callable[[Any], Any]:
    """A slice of (4, 6)."""
    return lambda g: g.slice(t(g, 4, 6, name="x", data_type=BF16), list(parts), name="s").set_data_type(dtype)


def joined(*dims: tuple[int, ...], axis: int = 0, place: int | None = None) -> Callable[[Any], Any]:
    """A concatenation."""
    return lambda g: g.concatenate([t(g, *d, name=f"x{i}") for i, d in enumerate(dims)], axis, place, name="j")


MOVEMENT = (
    same("2.1", "reduction", "no dims: those of X, NHWC order", shapes(lambda g: g.reduction(t(g, 2, 3, 4), ADD), ((2, 3, 4), (12, 1, 3)))),
    same(
        "2.1",
        "reduction",
        "axes where Y has 1; NHWC order of rank 3",
        shapes(lambda g: g.reduction(t(g, 2, 3, 4), ADD).set_dim([2, 1, 4]), ((2, 1, 4), (4, 1, 1))),
    ),
    same(
        "2.1",
        "reduction",
        "mode not set: found at the operation graph",
        fails(lambda g: g.reduction(t(g, 2, 3), reduction_mode.NOT_SET), "mode", error=BuildError, at="build"),
    ),
    ours(
        "2.1",
        "reduction",
        "dims that are neither X's nor 1",
        "accepted",
        fails(lambda g: g.reduction(t(g, 2, 4), ADD).set_dim([2, 2]), "1 where it reduces"),
    ),
    ours(
        "2.1",
        "reduction",
        "MAX, MIN or AVG of nothing in integers",
        "accepted",
        fails(
            lambda g: g.reduction(t(g, 2, 0, data_type=data_type.INT32), reduction_mode.MAX, data_type.INT32).set_dim([2, 1]),
            "no elements",
            at="build",
        ),
    ),
    same("2.1", "reshape", "dims set on Y, NHWC order", shapes(reshaped(2, 2, 2), ((2, 2, 2), (4, 1, 2)))),
    same("2.1", "reshape", "strides set on Y", shapes(reshaped(4, 2, stride=(2, 1)), ((4, 2), (2, 1)))),
    ours("2.1", "reshape", "no dims", "crash", fails(reshaped(), "'r'", "set_dim")),
    ours("2.1", "reshape", "another number of elements (8 to 15)", "accepted", fails(reshaped(3, 5), "'r'", "8 elements", "15")),
    ours(
        "2.1",
        "reshape",
        "VIEW_ONLY to a virtual tensor with strides of another order",
        "memory is read in another order",
        fails(lambda g: g.neg(reshaped(4, 2, stride=(1, 4))(g)), "'r'", "row-major order", at="build"),
    ),
    here(
        "2.1",
        "reshape",
        "LOGICAL between two data types",
        "`RuntimeError`",
        "elements are converted",
        runs(lambda g: reshaped(4, 2, reshape_mode=reshape_mode.LOGICAL)(g).set_data_type(BF16)),
    ),
    same(
        "2.1",
        "transpose",
        "a view: dims and strides permuted",
        shapes(lambda g: g.transpose(t(g, 2, 3, 4).set_data_type(F32), [2, 0, 1]), ((4, 2, 3), (1, 12, 4))),
    ),
    same("2.1", "transpose", "no permutation", breaks(lambda g: g.transpose(t(g, 2, 3, name="x"), [0, 0], name="p"), "'p'", "'x'", "permutation")),
    here(
        "2.1",
        "transpose",
        "between two data types",
        "`RuntimeError`",
        "elements are converted",
        runs(lambda g: g.transpose(t(g, 2, 3), [1, 0]).set_data_type(BF16)),
    ),
    same("2.1", "slice", "a view with Python's rules", shapes(sliced(slice(-3, None, 2), slice(1, 99)), ((2, 5), (12, 1)))),
    here(
        "2.1", "slice", "intermediate_data_type FLOAT, a BFLOAT16 input", "`RuntimeError`", "elements are converted", runs(sliced(slice(2), slice(2)))
    ),
    same("2.1", "slice", "a step below 1", fails(sliced(slice(0, 4, 0), slice(None)), "'s'", "step >= 1", "'x'")),
    same("2.1", "slice", "nothing", fails(sliced(slice(2, 2), slice(None)), "'s'", "empty", "'x'")),
    same("2.1", "slice", "too few slices", fails(sliced(slice(2)), "'s'", "one slice for every dim")),
    same(
        "2.1",
        "concatenate",
        "extents add up, packed in the first one's order",
        shapes(lambda g: g.concatenate([t(g, 2, 3, stride=(1, 2)), t(g, 2, 4)], 1), ((2, 7), (1, 2))),
    ),
    same("2.1", "concatenate", "axis out of range", breaks(joined((2, 3), (2, 3), axis=2), "'j'", "axis")),
    ours("2.1", "concatenate", "inputs that differ in another axis", "accepted", fails(joined((2, 3), (2, 4)), "'j'", "'x1'", r"\[2, 4\]")),
    ours("2.1", "concatenate", "in_place_index out of range", "accepted", fails(joined((2, 3), (2, 3), place=2), "'j'", "in_place_index")),
)
ROWS: tuple[Row, ...] = (*POINTWISE, *MATMUL, *CONVOLUTION, *MOVEMENT)
