"""Every row of the pointwise table on every data type, layout and target, and every conversion between data types."""

from __future__ import annotations

import pytest

from graphdnn import data_type
from graphdnn.dtypes import info, storable
from graphdnn.opspecs.pointwise import POINTWISE
from tests.helpers import Data, check_graph

F32 = data_type.FLOAT
ROWS = sorted(POINTWISE)
CHUNKS = [ROWS[i : i + 9] for i in range(0, len(ROWS), 9)]
TYPES = [d for d in storable() if info(d).bits >= 8 and d is not data_type.FP8_E8M0]
DIM = (2, 3, 5)
LAYOUTS = {
    "row": ((15, 5, 1), 0),
    "column": ((15, 1, 3), 0),
    "outermost fastest": ((1, 10, 2), 0),
    "padded": ((40, 12, 2), 3),
    "stride 0 inside": ((15, 5, 0), 0),
    "stride 0 outside": ((0, 5, 1), 1),
    "all stride 0": ((0, 0, 0), 5),
}


def operands(g, count, dtype, strides=((15, 5, 1),), dim=DIM):
    """Inputs x0, x1, x2 of one shape."""
    return [g.tensor(dim=dim, stride=strides[i % len(strides)], data_type=dtype, name=f"x{i}") for i in range(count)]


def apply(g, mode, inputs):
    """The op of ``mode`` on as many of ``inputs`` as it takes."""
    row = POINTWISE[mode]
    kwargs = {"axis": 1} if mode == "GEN_INDEX" else {}
    return getattr(g, row.method)(*inputs[: len(row.args)], **kwargs)


def chunk_graph(modes, dtype, strides=((15, 5, 1),), out=None):
    """A builder: every mode of ``modes`` on the same inputs, each an output."""

    def build(g):
        inputs = operands(g, 3, dtype, strides)
        for mode in modes:
            y = apply(g, mode, inputs).set_name(mode).set_output(True)
            y.set_data_type(out or dtype).set_dim(DIM).set_stride((15, 5, 1))

    return build


def data_for(dtype):
    """Positive values in x1, so that pow, mod and div have regular cases; x0 has both signs."""
    if info(dtype).kind != "f":
        return {}
    return {"x0": Data("uniform", -2.5, 2.5), "x1": Data("uniform", 0.3, 2.0), "x2": Data("grid", -1, 1)}


def types(all_of, quick):
    """``all_of`` as parameters, those that are not ``quick`` marked slow: they calculate in the same type as a quick one."""
    return [pytest.param(d, id=d.name, marks=() if d in quick else pytest.mark.slow) for d in all_of]


@pytest.mark.parametrize("dtype", types(TYPES, (F32, data_type.DOUBLE, data_type.INT32, data_type.BFLOAT16)))
@pytest.mark.parametrize("chunk", CHUNKS, ids="+".join)
def test_every_mode_on_every_type(device, chunk, dtype):
    check_graph(chunk_graph(chunk, dtype), device, data=data_for(dtype))


@pytest.mark.parametrize("dtype", TYPES, ids=lambda d: d.name)
def test_a_few_modes_on_every_type(device, dtype):
    """The share of the test above that every run does: how each type is read, converted and stored."""
    check_graph(chunk_graph(["ADD", "DIV", "RELU_FWD", "GELU_FWD", "CMP_LT", "MOD"], dtype), device, data=data_for(dtype))


@pytest.mark.parametrize("dtype", types((F32, data_type.DOUBLE, data_type.HALF), (F32,)))
@pytest.mark.parametrize("chunk", CHUNKS, ids="+".join)
def test_every_mode_on_nan_infinities_zeros_and_extremes(device, chunk, dtype):
    special = Data("special", -3, 3)
    check_graph(chunk_graph(chunk, dtype), device, data={"x0": special, "x1": special, "x2": special}, may_exclude=0.25)


@pytest.mark.parametrize("dtype", types((data_type.INT32, data_type.INT8, data_type.UINT8, data_type.INT64), (data_type.INT64,)))
@pytest.mark.parametrize("chunk", CHUNKS, ids="+".join)
def test_every_mode_on_the_whole_range_of_integers(device, chunk, dtype):
    """Wrap-around, division by zero, modulo of negative numbers."""
    full = Data("full") if dtype is not data_type.INT64 else Data("grid", -(2**40), 2**40)
    check_graph(chunk_graph(chunk, dtype), device, data={"x0": full, "x1": full}, may_exclude=0.25)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", [F32, data_type.BFLOAT16, data_type.FP8_E4M3, data_type.DOUBLE, data_type.INT8], ids=lambda d: d.name)
def test_layouts_of_inputs(device, name, dtype):
    """Each layout on x0, with the others row-major; the storage offset makes pointers unaligned."""
    stride, offset = LAYOUTS[name]
    build = chunk_graph(["ADD", "MUL", "MAX", "BINARY_SELECT", "GEN_INDEX"], dtype, (stride, (15, 5, 1)))
    check_graph(build, device, offsets={"x0": offset, "x1": offset // 2})


@pytest.mark.parametrize("name", [n for n in LAYOUTS if "0" not in n])
@pytest.mark.parametrize("dtype", [F32, data_type.HALF, data_type.FP8_E5M2, data_type.INT64], ids=lambda d: d.name)
def test_layouts_of_outputs(device, name, dtype):
    stride, offset = LAYOUTS[name]

    def build(g):
        a, b = operands(g, 2, dtype)
        g.sub(a, b).set_name("y").set_output(True).set_data_type(dtype).set_dim(DIM).set_stride(stride)
        g.neg(a).set_name("z").set_output(True).set_data_type(dtype)

    check_graph(build, device, offsets={"y": offset})


@pytest.mark.parametrize(
    "shapes", [((2, 1, 5), (3, 1)), ((1, 1, 1), (2, 3, 5)), ((2, 3, 1), (1, 3, 5)), ((5,), (2, 3, 1)), ((), (2, 3)), ((2, 3), ()), ((1,), (1, 1))]
)
def test_broadcasts(device, shapes):
    def build(g):
        a, b = (g.tensor(dim=d, layout="row", data_type=F32, name=n) for d, n in zip(shapes, "ab", strict=True))
        dim = _broadcast(*shapes)
        for name, y in (("sum", g.add(a, b)), ("difference", g.sub(b, a))):
            y.set_name(name).set_output(True).set_data_type(F32).set_dim(dim).set_stride(_row(dim))

    check_graph(build, device)


def _broadcast(*shapes):
    import numpy as np

    return tuple(np.broadcast_shapes(*shapes))


def _row(dim):
    from graphdnn.ir.layout import packed

    return packed(dim)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 31, 33, 127, 128, 129, 1000, 4099])
@pytest.mark.parametrize("dtype", [F32, data_type.BFLOAT16, data_type.INT8], ids=lambda d: d.name)
def test_tails(device, size, dtype):
    """Sizes around vectors, warps and blocks; nothing past the end is touched."""
    if device == "cudasim" and size > 200:
        size = size % 97 + 130

    def build(g):
        a = g.tensor(dim=[size], stride=[1], data_type=dtype, name="a")
        b = g.tensor(dim=[size], stride=[1], data_type=dtype, name="b")
        g.relu(g.add(a, b)).set_name("y").set_output(True).set_data_type(dtype)

    check_graph(build, device)


@pytest.mark.parametrize("offset", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("declared", [True, False], ids=["declared", "not declared"])
def test_unaligned_pointers(device, offset, declared):
    """A pointer less aligned than 16 bytes, said or not said with set_alignment."""

    def build(g):
        a = g.tensor(dim=[4, 64], stride=[64, 1], data_type=data_type.HALF, name="a")
        y = g.neg(a).set_name("y").set_output(True).set_data_type(data_type.HALF)
        if declared:
            a.set_alignment(2)
            y.set_alignment(2)

    check_graph(build, device, offsets={"a": offset, "y": offset})


# ------------------------------------------------------------------------------------------------------------------------------ conversions
def _source_data(dtype):
    row = info(dtype)
    if row.kind == "f":
        return Data("special", -300, 300)
    return Data("full") if row.bits <= 32 else Data("grid", -(2**45), 2**45)


@pytest.mark.parametrize("source", storable(), ids=lambda d: d.name)
def test_conversion_to_every_type(device, source):
    """identity from ``source`` to every data type as an output, and through every data type as a virtual tensor."""
    names = [d for d in storable() if d is not source]

    def build(g):
        x = g.tensor(dim=[4, 16], stride=[16, 1], data_type=source, name="x")
        for d in names:
            g.identity(x).set_name(f"to {d.name}").set_output(True).set_data_type(d)

    def through(g):
        x = g.tensor(dim=[4, 16], stride=[16, 1], data_type=source, name="x")
        for d in names:
            wide = data_type.DOUBLE if info(d).kind == "f" else data_type.INT64
            g.identity(g.identity(x).set_data_type(d)).set_name(f"through {d.name}").set_output(True).set_data_type(wide)

    data = {"x": _source_data(source)}
    check_graph(build, device, data=data)
    check_graph(through, device, data=data)


@pytest.mark.parametrize("compute", [data_type.DOUBLE, data_type.FLOAT], ids=lambda d: d.name)
def test_roundings_to_narrow_types_are_half_to_even(device, compute):
    """Ties and overflow of every narrow type, from float32 and float64 values."""
    ties = [
        0.5,
        1.5,
        2.5,
        -0.5,
        -1.5,
        126.5,
        127.5,
        128.0,
        -128.5,
        254.5,
        255.5,
        256.0,
        447.9,
        464.0,
        480.0,
        1e6,
        -1e6,
        1.0625,
        1.1875,
        2.0**-10,
        1.5 * 2.0**-10,
        3e38,
    ]
    types = [d for d in storable() if info(d).bits <= 16]

    def build(g):
        x = g.tensor(dim=[len(ties)], stride=[1], data_type=compute, name="x")
        for d in types:
            g.identity(x, compute_data_type=compute).set_name(d.name).set_output(True).set_data_type(d)

    check_graph(build, device, data={"x": Data("values", values=ties)})
