"""Reductions of a contraction's results, of all of them, of columns (channels) or of rows, in the kernel that makes them: one region, and at most one
more kernel for each reduction that combines partial results in a fixed order."""

from __future__ import annotations

import numpy as np
import pytest

from graphdnn import data_type, reduction_mode
from graphdnn.ir.layout import by_name
from tests.helpers import Data, check_graph

F32, F16, BF16, F64, I8, I32 = (data_type[n] for n in ("FLOAT", "HALF", "BFLOAT16", "DOUBLE", "INT8", "INT32"))
IN_FLOAT = {"io_data_type": F32, "intermediate_data_type": F32, "compute_data_type": F32}
BATCH, M, N, K = 2, 150, 13, 9
KEPT = {
    "columns": (BATCH, 1, N),
    "columns of all": (1, 1, N),
    "rows": (BATCH, M, 1),
    "rows of all": (1, M, 1),
    "all": (1, 1, 1),
}


def tensor(g, name, *dim, dtype=F32, layout="row"):
    return g.tensor(dim=dim, layout=layout, data_type=dtype, name=name)


def done(t, name, dtype=F32):
    return t.set_output(True).set_name(name).set_data_type(dtype)


def reduced(g, x, mode, dim, name, dtype=F32):
    return done(g.reduction(x, reduction_mode[mode]).set_dim(dim), name, dtype)


def fewest_regions(outcome):
    return min(len(p.partition.regions) for p in outcome.graph._plans)


def run(build, device, regions=1, graph=IN_FLOAT, **kwargs):
    outcome = check_graph(build, device, graph=graph, **kwargs)
    assert fewest_regions(outcome) == regions
    return outcome


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=lambda d: d.name)
def test_matmul(device, kept, dtype):
    """Two reductions of one kind, of the value that is stored and of another, with an epilogue in front."""
    m = 21 if device == "cudasim" else M
    dim = tuple(m if d == M else d for d in KEPT[kept])

    def build(g):
        c = g.matmul(tensor(g, "x", BATCH, m, K, dtype=dtype), tensor(g, "w", 1, K, N, dtype=dtype))
        y = g.relu(g.add(c, tensor(g, "bias", 1, 1, N)))
        reduced(g, y, "ADD", dim, "sums")
        reduced(g, g.mul(y, y), "AVG", dim, "squares")
        done(y, "y", dtype)

    run(build, device)


@pytest.mark.parametrize("layout", ["row", "column"])
@pytest.mark.parametrize("kinds", [("columns", "all"), ("rows", "all"), ("columns", "columns of all"), ("rows", "columns")], ids=str)
def test_several_kinds(device, kinds, layout):
    """Sums of rows and of columns do not meet in one kernel of a GPU: there a second one reads the result."""
    m = 21 if device == "cudasim" else M

    def build(g):
        y = g.tanh(g.matmul(tensor(g, "x", BATCH, m, K), tensor(g, "w", BATCH, K, N)))
        for kind, mode in zip(kinds, ("NORM2", "AMAX"), strict=True):
            reduced(g, y, mode, tuple(m if d == M else d for d in KEPT[kind]), kind)
        done(y, "y", F16)
        y.set_stride(by_name((BATCH, m, N), layout))

    crossed = kinds == ("rows", "columns") and device != "cpu"
    run(build, device, 3 if crossed else 1)


def test_more_rows_than_a_panel(device):
    """Panels and blocks of rows that do not divide the rows."""
    m = 40 if device == "cudasim" else 1333

    def build(g):
        c = g.matmul(tensor(g, "x", 1, m, 16), tensor(g, "w", 1, 16, 24))
        reduced(g, c, "ADD", (1, 1, 24), "columns")
        reduced(g, c, "AMAX", (1, 1, 1), "amax")

    run(build, device)


@pytest.mark.parametrize("kind", ["rows", "all"])
def test_integers(device, kind):
    def build(g):
        c = g.matmul(tensor(g, "x", 2, 11, 6, dtype=I8), tensor(g, "w", 1, 6, 7, dtype=I8))
        reduced(g, c, "ADD", (2, 11, 1) if kind == "rows" else (1, 1, 1), "sums", I32)
        done(c, "c", I32)

    run(build, device, graph={"compute_data_type": I32, "intermediate_data_type": I32})


def test_columns_of_integers_follow(device):
    def build(g):
        c = g.matmul(tensor(g, "x", 2, 11, 6, dtype=I8), tensor(g, "w", 1, 6, 7, dtype=I8))
        reduced(g, c, "MAX", (2, 1, 7), "most", I32)

    run(build, device, 2 if device == "cpu" else 1, graph={"compute_data_type": I32, "intermediate_data_type": I32})


def test_double(device):
    def build(g):
        c = g.matmul(tensor(g, "x", 2, 11, 6, dtype=F64), tensor(g, "w", 1, 6, 7, dtype=F64))
        reduced(g, c, "ADD", (2, 11, 1), "rows", F64)
        reduced(g, c, "MUL", (1, 1, 1), "product", F64)

    run(build, device, graph={"compute_data_type": F64, "intermediate_data_type": F64})


@pytest.mark.parametrize("kept", ["columns", "rows"])
def test_nan_and_infinities(device, kept):
    """They stay in their row and column."""
    values = np.ones((1, 20, 8))
    values[0, 3, 0], values[0, 7, 0] = np.nan, np.inf

    def build(g):
        c = g.mul(g.matmul(tensor(g, "x", 1, 20, 8), tensor(g, "w", 1, 8, 12)), tensor(g, "mask", 1, 20, 1))
        dim = (1, 1, 12) if kept == "columns" else (1, 20, 1)
        reduced(g, c, "MAX", dim, "most")
        reduced(g, c, "ADD", dim, "sums")

    data = {"x": Data("values", values=values), "w": Data("uniform", 0.5, 1.0), "mask": Data("uniform", 0.5, 1.5)}
    found = run(build, device, data=data, may_exclude=1.0).outputs
    assert (np.isnan(found["sums"]).sum(), np.isnan(found["most"]).sum()) == ((12, 12) if kept == "columns" else (1, 1))


def conv(g, kind, layout, groups=1, stride=1, dtype=F32):
    x, w, y = (2, 4, 7, 6), (6, 4 // groups, 3, 3), (2, 6, (7 + 1) // stride - (stride == 1), 6 // stride)
    more = {"padding": [1, 1], "stride": [stride, stride], "dilation": [1, 1]}
    if kind == "fprop":
        return g.conv_fprop(tensor(g, "x", *x, dtype=dtype, layout=layout), tensor(g, "w", *w, dtype=dtype, layout=layout), **more), y
    if kind == "dgrad":
        made = g.conv_dgrad(tensor(g, "dy", *y, dtype=dtype, layout=layout), tensor(g, "w", *w, dtype=dtype, layout=layout), **more)
        return made.set_dim(x), x
    made = g.conv_wgrad(tensor(g, "x", *x, dtype=dtype, layout=layout), tensor(g, "dy", *y, dtype=dtype, layout=layout), **more)
    return made.set_dim(w), w


@pytest.mark.parametrize("layout", ["row", "channels_last"])
@pytest.mark.parametrize(("kind", "groups", "stride"), [("fprop", 1, 1), ("fprop", 2, 1), ("dgrad", 1, 1), ("dgrad", 2, 2), ("wgrad", 1, 1)], ids=str)
def test_channels(device, kind, groups, stride, layout):
    """Statistics of channels (of filters, for the gradient of weights) with bias, relu and an AMAX beside them."""

    def build(g):
        made, dim = conv(g, kind, layout, groups, stride)
        channels = (dim[0], 1, 1, 1) if kind == "wgrad" else (1, dim[1], 1, 1)
        y = g.relu(g.add(made, tensor(g, "bias", *channels)))
        reduced(g, y, "ADD", channels, "sums")
        reduced(g, g.mul(y, y), "ADD", channels, "squares")
        reduced(g, y, "AMAX", (1, 1, 1, 1), "amax")
        done(y, "y", BF16).set_dim(dim).set_stride(by_name(dim, layout))

    run(build, device)


def test_every_plan(device):
    """All engines that keep sums of channels, and the reduction behind."""

    def build(g):
        y, dim = conv(g, "fprop", "channels_last", 2)
        reduced(g, y, "ADD", (1, dim[1], 1, 1), "sums")
        reduced(g, y, "MIN", (1, 1, 1, 1), "least")
        done(y, "y")

    run(build, device, every_plan=True, runs=1)


def test_norm_over_channels(device):
    """A sum over the channels of every pixel."""

    def build(g):
        made, dim = conv(g, "fprop", "channels_last")
        reduced(g, made, "NORM2", (dim[0], 1, *dim[2:]), "norms")

    run(build, device)


def test_genstats(device):
    def build(g):
        made, dim = conv(g, "fprop", "channels_last", dtype=F16)
        for t, name in zip(g.genstats(made), ("sum", "square"), strict=True):
            done(t, name)
        done(made, "y", F16)

    run(build, device)


def test_part_of_the_spatial_dims(device):
    """Neither rows nor columns: it runs behind."""

    def build(g):
        made, dim = conv(g, "fprop", "row")
        reduced(g, made, "ADD", (1, dim[1], dim[2], 1), "sums")

    run(build, device, 2)


def test_empty_sum(device):
    """K = 0: results are 0, and so are their sums."""

    def build(g):
        c = g.matmul(tensor(g, "x", 1, 5, 0), tensor(g, "w", 1, 0, 6))
        reduced(g, g.add(c, 1.0), "ADD", (1, 1, 6), "sums")

    run(build, device)
