"""Block scaling: types, axes, layouts and orders of the scales, special values, fusion with matmul, what is refused, JSON."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import graphdnn
from graphdnn import data_type
from graphdnn.errors import KindError, NotSupportedError, ValidationError
from tests.helpers import Data, built, check_graph, given

D = data_type
F32 = D.FLOAT
TILED = graphdnn.tensor_reordering.F8_128x4
FORMS = {
    "mxfp8": (D.FP8_E4M3, D.FP8_E8M0, 32, {}),
    "mxfp8, e5m2": (D.FP8_E5M2, D.FP8_E8M0, 32, {}),
    "nvfp4": (D.FP4_E2M1, D.FP8_E4M3, 16, {}),
    "mxfp4, tiled": (D.FP4_E2M1, D.FP8_E8M0, 32, {"reordering": TILED}),
    "mxfp8, tiled, first axis, transposed": (D.FP8_E4M3, D.FP8_E8M0, 4, {"axis": 1, "transpose": True, "reordering": TILED}),
    "int8, half scales": (D.INT8, D.HALF, 8, {"axis": -2}),
    "int4, first axis": (D.INT4, F32, 2, {"axis": 0}),
    "block of one": (D.FP8_E4M3, F32, 1, {}),
    "whole rows": (D.FP8_E4M3, D.BFLOAT16, 96, {}),
}


def quantized(g, x, form, name="q"):
    kind, scale_kind, block, more = form
    more = dict(more)
    order = more.pop("reordering", None)
    y, scale = g.block_scale_quantize(x, block, name=name, **more)
    y.set_data_type(kind)
    scale.set_data_type(scale_kind)
    if order is not None:
        scale.set_reordering_type(order)
    return y, scale


def around(form, dim=(2, 8, 96), dtype=F32, layout="row"):
    """Quantize, all of it stored, and dequantize again."""

    def build(g):
        x = g.tensor(dim=dim, layout=layout, data_type=dtype, name="x")
        y, scale = quantized(g, x, form)
        y.set_output(True).set_name("y")
        scale.set_output(True).set_name("scale")
        axis = form[3].get("axis", -1) % len(dim)
        back = g.block_scale_dequantize(y, scale, [form[2] if a == axis else 1 for a in range(len(dim))])
        back.set_output(True).set_name("back").set_data_type(F32)

    return build


@pytest.mark.parametrize("name", FORMS)
def test_forms(device, name):
    check_graph(around(FORMS[name]), device, runs=1)


@pytest.mark.parametrize(
    "dim, layout, dtype", [((64,), "row", D.HALF), ((3, 4, 2, 64), "channels_last", D.BFLOAT16), ((5, 32), "column", F32), ((0, 32), "row", F32)]
)
def test_ranks_and_layouts(device, dim, layout, dtype):
    check_graph(around(FORMS["mxfp8"], dim, dtype, layout), device, runs=1)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "int8, half scales", "block of one"])
def test_special_values(device, name):
    """Blocks of zeros, of infinities and NaN, of the largest and the smallest numbers."""
    x = np.random.default_rng(1).standard_normal((2, 8, 96))
    for i, v in enumerate([0.0, np.nan, np.inf, 3.4e38, 1e-45, 2.0**-140, -np.inf]):
        x[0, i, :32] = 0.0
        x[0, i, 5:8] = v
    check_graph(around(FORMS[name]), device, data={"x": given(x)}, runs=1, may_exclude=0.3)


def test_powers_of_two_need_no_larger_scale(device):
    """max |x| = 448 * 2**k is the last one that the scale 2**k takes."""
    x = np.zeros((1, 3, 32))
    x[0, :, 7] = 448.0 * 2.0 ** np.array([3, -9, 0])
    x[0, 2, 7] = 449.0
    outcome = check_graph(around(FORMS["mxfp8"], (1, 3, 32)), device, data={"x": given(x)}, runs=1)
    assert outcome.outputs["scale"].reshape(-1).tolist() == [2.0**3, 2.0**-9, 2.0]


def test_it_is_one_kernel(device):
    """Y and the scales from one walk over X, whatever the axis; the producer of X is in it."""

    def build(g):
        x = g.tensor(dim=(4, 8, 64), layout="row", data_type=F32, name="x")
        for n, axis in enumerate((2, 1)):
            y, scale = quantized(g, g.gelu(x), (D.FP8_E4M3, D.FP8_E8M0, 8, {"axis": axis}), str(n))
            y.set_output(True).set_name(f"y{axis}")
            scale.set_output(True).set_name(f"scale{axis}")

    assert check_graph(build, device, runs=1).graph.explain().kernels == 2


def test_quantize_in_the_middle_of_a_graph(device):
    """Neither result is stored; and a stored result that other ops read."""

    def build(g):
        x = g.tensor(dim=(2, 6, 32), layout="row", data_type=F32, name="x")
        for n, stored in enumerate((False, True)):
            y, scale = quantized(g, g.mul(x, 1.0 + n), FORMS["mxfp8"], str(n))
            y.set_output(stored).set_name(f"y{n}")
            scale.set_output(stored).set_name(f"scale{n}")
            g.relu(g.block_scale_dequantize(y, scale, [1, 32])).set_output(True).set_name(f"back{n}").set_data_type(F32)
            g.add(g.reduction(y, graphdnn.reduction_mode.ADD, axes=2), 1.0).set_output(True).set_name(f"sum{n}").set_data_type(F32)

    check_graph(build, device, runs=1)


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("set_dims", [False, True])
def test_a_scale_in_tiled_order_that_nobody_sees(device, axis, set_dims):
    """Padded dims, the user's or inferred, the values of a scale in plain order, and no kernel more; another op may read it."""
    found = []
    for order in (None, TILED):

        def build(g, order=order):
            x = g.tensor(dim=(2, 6, 64) if axis == 2 else (2, 64, 6), layout="row", data_type=F32, name="x")
            more = {"axis": axis} if order is None else {"axis": axis, "reordering": order}
            y, scale = quantized(g, g.relu(x), (D.FP8_E4M3, D.FP8_E8M0, 32, more))
            if order is not None and set_dims:
                dim = (2, 128, 4) if axis == 2 else (2, 4, 128)
                scale.set_dim(dim).set_stride((512, dim[2], 1))
            back = g.block_scale_dequantize(y, scale, [1, 32] if axis == 2 else [32, 1])
            g.matmul(back, g.transpose(x, [0, 2, 1])).set_output(True).set_name("product").set_data_type(F32)
            g.reduction(scale, graphdnn.reduction_mode.MAX, axes=(1, 2)).set_output(True).set_name("largest").set_data_type(F32)

        found.append(check_graph(build, device, runs=1))
    plain, tiled = found
    assert all(np.array_equal(plain.outputs[n], tiled.outputs[n]) for n in ("product", "largest"))
    assert tiled.graph.explain().kernels <= plain.graph.explain().kernels + 1


def test_quantize_after_a_matmul(device):
    def build(g):
        a, b = (g.tensor(dim=d, layout="row", data_type=D.HALF, name=n) for n, d in (("a", (2, 6, 20)), ("b", (1, 20, 64))))
        y, scale = quantized(g, g.relu(g.matmul(a, b)), FORMS["nvfp4"])
        y.set_output(True).set_name("y")
        scale.set_output(True).set_name("scale")

    check_graph(build, device, runs=1)


MATMULS = {
    "mxfp8": (D.FP8_E4M3, D.FP8_E8M0, 32, None),
    "mxfp8, tiled": (D.FP8_E4M3, D.FP8_E8M0, 32, TILED),
    "nvfp4": (D.FP4_E2M1, D.FP8_E4M3, 16, None),
    "nvfp4, tiled": (D.FP4_E2M1, D.FP8_E4M3, 16, TILED),
}


def product(form, m=6, n=10, k=64):
    kind, scale_kind, block, order = form
    tiled = order is not None

    def up(value, multiple):
        return -(-value // multiple) * multiple if tiled else value

    def build(g):
        a = g.tensor(dim=(2, m, k), layout="row", data_type=kind, name="a")
        b = g.tensor(dim=(2, k, n), layout="column", data_type=kind, name="b")
        scales = ("sa", (2, up(m, 128), up(k // block, 4)), "row"), ("sb", (2, up(k // block, 4), up(n, 128)), "column")
        sa, sb = (g.tensor(dim=d, layout=how, data_type=scale_kind, name=s) for s, d, how in scales)
        if tiled:
            sa.set_reordering_type(order)
            sb.set_reordering_type(order)
        c = g.matmul(g.block_scale_dequantize(a, sa, [1, block]), g.block_scale_dequantize(b, sb, [block, 1]))
        g.relu(c).set_output(True).set_name("c").set_data_type(F32)

    return build


@pytest.mark.parametrize("name", MATMULS)
def test_dequantize_in_front_of_a_matmul_is_one_kernel(device, name):
    data = {n: Data("grid", 0.5, 4, 0.5) for n in ("sa", "sb")}
    assert check_graph(product(MATMULS[name]), device, data=data, runs=1).graph.explain().kernels == 1


def test_blocks_of_several_axes_and_division(device):
    def build(g):
        x = g.tensor(dim=(2, 12, 16), layout="row", data_type=D.INT8, name="x")
        for name, blocks, dim, negative in (("tiles", [4, 8], (2, 3, 2), False), ("all", [2, 3, 1], (1, 4, 16), True), ("one", 8, (2, 12, 2), False)):
            s = g.tensor(dim=dim, layout="row", data_type=D.FP8_E8M0, name=f"s_{name}")
            y = g.block_scale_dequantize(x, s, blocks, is_negative_scale=negative)
            y.set_output(True).set_name(name).set_data_type(F32)

    check_graph(build, device, runs=1)


@pytest.mark.parametrize("tiled", [False, True])
def test_the_last_block_of_a_dequantized_tensor_need_not_be_full(device, tiled):
    """Along the last axis, along the one before, along two at once, and one block that is larger than the tensor."""
    forms = (("last", [1, 32], (2, 40, 3)), ("rows", [32, 1], (2, 2, 70)), ("large", [64, 1], (2, 1, 70)), ("one size", 32, (2, 40, 3)))
    forms += () if tiled else (("two", [7, 16], (2, 6, 5)),)

    def build(g):
        x = g.tensor(dim=(2, 40, 70), layout="row", data_type=D.FP8_E4M3, name="x")
        for name, blocks, counts in forms:
            column = 1 if isinstance(blocks, list) and blocks[1] == 1 else 2
            up = [(n + m - 1) // m * m for n, m in zip(counts[1:], (128, 4) if column == 2 else (4, 128), strict=True)]
            dim = (2, *up) if tiled else counts
            s = g.tensor(dim=dim, layout="row", data_type=D.FP8_E8M0, name=f"s_{name}")
            y = g.block_scale_dequantize(x, s.set_reordering_type(TILED) if tiled else s, blocks)
            g.relu(y).set_output(True).set_name(name).set_data_type(F32)

    check_graph(build, device, runs=1)


@pytest.mark.parametrize("columns", [2, 1])
def test_the_order_of_tiled_scales(columns):
    """Byte by byte, by the formula of the order; the scaled axis is the last one or the one before."""
    rng = np.random.default_rng(5)
    rows_of, blocks, block = 150, 6, 2
    dim = (2, rows_of, blocks * block) if columns == 2 else (2, blocks * block, rows_of)
    logical = rng.integers(100, 140, (2, rows_of, blocks)).astype(np.uint8)
    memory = np.zeros((2, 256 * 8), np.uint8)
    for b in range(2):
        for r in range(rows_of):
            for c in range(blocks):
                memory[b, (r // 128 * 2 + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = logical[b, r, c]
    x = rng.standard_normal(dim).astype(np.float32)
    padded = (2, 256, 8) if columns == 2 else (2, 8, 256)

    g = graphdnn.pygraph(device="cpu", io_data_type=F32, intermediate_data_type=F32, compute_data_type=F32)
    tx = g.tensor(dim=dim, layout="row")
    ts = g.tensor(dim=padded, layout="row", data_type=D.FP8_E8M0, reordering_type=TILED)
    ty = g.block_scale_dequantize(tx, ts, [1, block] if columns == 2 else [block, 1]).set_output(True)
    built(g)
    y = np.zeros(dim, np.float32)
    g.execute({tx: x, ts: memory.view(ml_dtypes.float8_e8m0fnu).reshape(padded), ty: y}, np.zeros(g.get_workspace_size(), np.uint8))
    scales = 2.0 ** (logical.astype(np.float64) - 127)
    scales = scales if columns == 2 else np.swapaxes(scales, 1, 2)
    assert np.array_equal(y, (x * np.repeat(scales, block, axis=columns)).astype(np.float32))


def test_names_dims_and_strides():
    g = graphdnn.pygraph(device="cpu", io_data_type=D.FP8_E4M3)
    x = g.tensor(dim=(2, 70, 64), stride=(8960, 128, 2), data_type=F32)
    y, scale = g.block_scale_quantize(x, 32, name="q")
    t, tiled = g.block_scale_quantize(x, 35, axis=1, transpose=True, name="t")
    tiled.set_reordering_type(TILED)
    for one in (y, scale, t, tiled):
        one.set_output(True)
    g.validate()
    assert [one.get_name() for one in (y, scale)] == ["q::Y", "q::scale"]
    assert (y.get_dim(), y.get_stride(), scale.get_dim(), scale.get_stride()) == ([2, 70, 64], [8960, 128, 2], [2, 70, 2], [140, 2, 1])
    assert (t.get_stride(), tiled.get_dim(), tiled.get_stride()) == ([4480, 1, 70], [2, 4, 128], [512, 1, 4])


def test_json_round_trip():
    g = graphdnn.pygraph(device="cpu", io_data_type=F32, intermediate_data_type=F32, compute_data_type=F32)
    around(FORMS["mxfp8, tiled, first axis, transposed"])(g)
    text = str(g)
    assert all(word in text for word in ('"tag":"BLOCK_SCALE_QUANTIZE"', '"tag":"BLOCK_SCALE_DEQUANTIZE"', '"block_size":4', '"block_size":[1,4,1]'))
    again = graphdnn.pygraph(device="cpu")
    again.deserialize(text)
    assert str(again) == text
    built(again)


def refused(kind, words, call):
    return kind, words, call


def tensor(g, dim=(2, 4, 64), dtype=F32, **more):
    return g.tensor(dim=dim, layout="row", data_type=dtype, **more)


ERRORS = {
    "does not divide": (ValidationError, "70 // 32 scales, and none for the last 6", lambda g: g.block_scale_quantize(tensor(g, (2, 70)), 32)),
    "block of 0": (ValidationError, "block_size", lambda g: g.block_scale_quantize(tensor(g), 0)),
    "axis": (ValidationError, "axis is out of range", lambda g: g.block_scale_quantize(tensor(g), 32, axis=3)),
    "kind of block": (KindError, "block_size", lambda g: g.block_scale_quantize(tensor(g), 32.0)),
    "no block sizes": (ValidationError, "block_size", lambda g: g.block_scale_dequantize(tensor(g), tensor(g, (2, 4, 2)), [])),
    "a descale too many": (ValidationError, "does not fit", lambda g: g.block_scale_dequantize(tensor(g), tensor(g, (2, 4, 3)), [1, 48])),
    "descale does not fit": (ValidationError, "does not fit", lambda g: g.block_scale_dequantize(tensor(g), tensor(g, (2, 4, 3)), [1, 32])),
    "descale of another rank": (ValidationError, "follow the dims", lambda g: g.block_scale_dequantize(tensor(g), tensor(g, (4, 2)), [1, 32])),
    "integer scales": (ValidationError, "a scale is a float", lambda g: g.block_scale_dequantize(tensor(g), tensor(g, (2, 4, 2), D.INT8), [1, 32])),
    "other order": (
        NotSupportedError, "reordering",
        lambda g: g.block_scale_dequantize(tensor(g), tensor(g, (2, 4, 2), reordering_type=graphdnn.tensor_reordering.F16x16), [1, 32]),
    ),
    "tiles of an outer axis": (
        NotSupportedError, "last two axes", lambda g: g.block_scale_dequantize(tensor(g), tensor(g, (1, 4, 64), reordering_type=TILED), [2, 1, 1])
    ),
    "tiles of floats": (
        NotSupportedError, "order of bytes", lambda g: g.block_scale_dequantize(tensor(g), tensor(g, (2, 128, 4), reordering_type=TILED), [1, 32])
    ),
    "large result": (ValidationError, "small type", lambda g: g.block_scale_quantize(tensor(g), 32)),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    kind, words, call = ERRORS[name]
    g = graphdnn.pygraph(device="cpu", io_data_type=F32)
    with pytest.raises(kind, match=words):
        made = call(g)
        for t in made if isinstance(made, list) else [made]:
            t.set_output(True)
        g.build_operation_graph()
