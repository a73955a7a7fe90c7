"""Convolutions before any kernel: dims, strides, names, both forms of the methods, JSON text, errors."""

from __future__ import annotations

import json

import pytest

import graphdnn
from graphdnn import data_type
from graphdnn.errors import KindError, NotSupportedError, ValidationError
from graphdnn.frontend.names import convolution_mode
from graphdnn.ir.layout import by_name

F32 = data_type.FLOAT
ONE = {"padding": [1, 1], "stride": [1, 1], "dilation": [1, 1]}


def graph():
    return graphdnn.pygraph(device="cpu", io_data_type=F32, intermediate_data_type=F32, compute_data_type=F32)


def tensor(g, dim, name=""):
    return g.tensor(dim=dim, layout="row", name=name)


def operands(g, x=(2, 4, 7, 5), w=(6, 4, 3, 3)):
    return tensor(g, x, "x"), tensor(g, w, "w")


def said(caught):
    return str(caught.value)


# ------------------------------------------------------------------------------------------------------------------------------ dims and strides
@pytest.mark.parametrize(
    ("x", "w", "lists", "dim"),
    [
        ((2, 4, 7, 5), (6, 4, 3, 3), ([1, 1], [1, 1], [1, 1]), (2, 6, 7, 5)),
        ((2, 4, 7, 5), (6, 2, 3, 2), ([0, 0], [2, 3], [1, 2]), (2, 6, 3, 1)),  # two groups
        ((2, 4, 9), (4, 1, 3), ([2], [2], [2]), (2, 4, 5)),
        ((2, 3, 5, 6, 7), (8, 3, 1, 2, 3), ([0, 1, 0], [1, 1, 2], [1, 1, 1]), (2, 8, 5, 7, 3)),
        ((1, 3, 4, 5), (2, 3, 4, 5), ([0, 0], [1, 1], [1, 1]), (1, 2, 1, 1)),
        ((0, 3, 4, 5), (2, 3, 1, 1), ([0, 0], [1, 1], [1, 1]), (0, 2, 4, 5)),
    ],
)
def test_forward_dims_and_strides(x, w, lists, dim):
    """Strides in NHWC order, for row-major inputs too."""
    g = graph()
    y = g.conv_fprop(*operands(g, x, w), *lists)
    g.validate()
    assert tuple(y.get_dim()) == dim
    assert tuple(y.get_stride()) == by_name(dim, "channels_last")


def test_strides_of_gradients_and_what_the_user_sets():
    g = graph()
    x, w = operands(g)
    dy = tensor(g, (2, 6, 7, 5))
    dx, dw = g.conv_dgrad(dy, w, **ONE).set_dim((2, 4, 7, 5)), g.conv_wgrad(x, dy, **ONE).set_dim((6, 4, 3, 3))
    kept = g.conv_wgrad(x, dy, **ONE).set_dim((6, 4, 3, 3)).set_stride((36, 9, 3, 1))
    g.validate()
    assert tuple(dx.get_stride()) == by_name((2, 4, 7, 5), "channels_last")
    assert tuple(dw.get_stride()) == by_name((6, 4, 3, 3), "channels_last")
    assert tuple(kept.get_stride()) == (36, 9, 3, 1)


# ---------------------------------------------------------------------------------------------------------------------------------- forms and names
def attributes(g):
    (node,) = json.loads(str(g))["nodes"]
    return {n: node[n] for n in ("pre_padding", "post_padding", "stride", "dilation", "math_mode")}


FORMS = [
    ((), {"padding": [1, 2], "stride": [3, 4], "dilation": (5, 6)}, ([1, 2], [1, 2])),
    (([1, 2], [3, 4], [5, 6]), {}, ([1, 2], [1, 2])),
    (([1, 2], [3, 4], [5, 6], convolution_mode.CONVOLUTION), {}, ([1, 2], [1, 2])),
    ((), {"pre_padding": [1, 2], "post_padding": [7, 8], "stride": [3, 4], "dilation": [5, 6]}, ([1, 2], [7, 8])),
    (([1, 2], [7, 8], [3, 4], [5, 6]), {}, ([1, 2], [7, 8])),
    (([1, 2], [7, 8], [3, 4], [5, 6], convolution_mode.CONVOLUTION, F32, "named"), {}, ([1, 2], [7, 8])),
]


@pytest.mark.parametrize("method", ["conv_fprop", "conv_dgrad", "conv_wgrad"])
@pytest.mark.parametrize("form", FORMS, ids=lambda f: str(len(f[0])))
def test_both_forms(method, form):
    args, kwargs, (pre, post) = form
    g = graph()
    getattr(g, method)(*operands(g), *args, **kwargs)
    mode = "CONVOLUTION" if convolution_mode.CONVOLUTION in args else "CROSS_CORRELATION"
    assert attributes(g) == {"pre_padding": pre, "post_padding": post, "stride": [3, 4], "dilation": [5, 6], "math_mode": mode}


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {"padding": [1], "pre_padding": [1]}),
        ((), {"pad": [1]}),
        (([1, 1], [1, 1], [1, 1], "CONVOLUTION"), {}),
        (([1.5, 1], [1, 1], [1, 1]), {}),
        ((1, [1, 1], [1, 1]), {}),
        ((), {"convolution_mode": None}),
    ],
)
def test_wrong_kinds(args, kwargs):
    g = graph()
    with pytest.raises(KindError):
        g.conv_fprop(*operands(g), *args, **kwargs)
    with pytest.raises(TypeError, match="graph tensor"):
        g.conv_fprop(None, operands(g)[1], **ONE)


def test_names():
    g = graph()
    x, w = operands(g)
    dy = tensor(g, (2, 6, 7, 5))
    assert g.conv_fprop(x, w, **ONE).get_name() == "0::Y"
    assert g.conv_fprop(x, w, **ONE, name="c").get_name() == "c::Y"
    assert g.conv_dgrad(dy, w, **ONE).get_name() == "::DX"
    assert g.conv_wgrad(x, dy, **ONE, name="w").get_name() == "w::DW"


def test_ports_and_re_import():
    g = graph()
    x, w = operands(g)
    dy = tensor(g, (2, 6, 7, 5), "dy")
    y = g.conv_fprop(x, w, **ONE)
    g.conv_dgrad(dy, w, **ONE).set_dim((2, 4, 7, 5)).set_output(True)
    g.conv_wgrad(x, dy, [1, 0], [1, 2], [1, 1], [1, 1]).set_dim((6, 4, 3, 3)).set_output(True)
    y.set_output(True)
    g.validate()
    nodes = json.loads(str(g))["nodes"]
    assert [(n["tag"], n["inputs"], set(n["outputs"])) for n in nodes] == [
        ("CONV_FPROP", {"X": "x", "W": "w"}, {"Y"}),
        ("CONV_DGRAD", {"DY": "dy", "W": "w"}, {"DX"}),
        ("CONV_WGRAD", {"DY": "dy", "X": "x"}, {"DW"}),
    ]
    again = graphdnn.pygraph(device="cpu")
    again.deserialize(str(g))
    assert str(again) == str(g)
    again.validate()


# ---------------------------------------------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("missing", "rule"),
    [("padding", "Pre padding not set."), ("stride", "Conv strides not set."), ("dilation", "Conv dilation not set.")],
)
def test_missing_attributes(missing, rule):
    g = graph()
    g.conv_fprop(*operands(g), **{n: v for n, v in ONE.items() if n != missing}, name="c")
    with pytest.raises(ValidationError) as caught:
        g.validate()
    assert rule in said(caught) and "'c'" in said(caught)


def test_missing_post_padding():
    g = graph()
    g.conv_fprop(*operands(g), pre_padding=[1, 1], stride=[1, 1], dilation=[1, 1])
    with pytest.raises(ValidationError, match=r"Post padding not set\."):
        g.validate()


@pytest.mark.parametrize(
    ("x", "w", "more", "words"),
    [
        ((2, 8, 7, 5), (6, 7, 3, 3), {}, ["channels of 'x'", "multiple of 7", "C = 8"]),
        ((2, 8, 7, 5), (6, 2, 3, 3), {}, ["groups", "multiple of the 4 groups", "K = 6"]),
        ((2, 4, 16, 16), (6, 4, 33, 33), {"padding": [0, 0]}, ["larger than the padded input", "spatial dim 0", "at most 16", "33"]),
        ((2, 4, 7, 5), (6, 4, 3, 3), {"padding": [1, 0], "dilation": [1, 3]}, ["spatial dim 1", "at most 5", "dilation 3: 7"]),
        ((2, 4, 7, 5), (6, 4, 3), {}, ["one rank", "'w'"]),
        ((2, 4), (6, 4), {"padding": [1], "stride": [1], "dilation": [1]}, ["spatial dim"]),
        ((2, 4, 7, 5), (6, 4, 3, 3), {"padding": [1]}, ["pre_padding", "2 entries"]),
        ((2, 4, 7, 5), (6, 4, 3, 3), {"stride": [1, 1, 1]}, ["stride", "2 entries"]),
        ((2, 4, 7, 5), (6, 4, 3, 3), {"stride": [0, 1]}, ["stride must be positive"]),
        ((2, 4, 7, 5), (6, 4, 3, 3), {"dilation": [1, -1]}, ["dilation must be positive"]),
        ((2, 4, 7, 5), (6, 4, 0, 3), {}, ["the filter is empty"]),
    ],
)
def test_inputs_without_meaning(x, w, more, words):
    g = graph()
    g.conv_fprop(*operands(g, x, w), **(ONE | more), name="c")
    with pytest.raises(ValidationError) as caught:
        g.validate()
    assert all(word in said(caught) for word in ["'c'", *words]), said(caught)


@pytest.mark.parametrize(
    ("method", "given", "words"),
    [
        ("conv_dgrad", None, ["output dimension inferencing is not possible", "set_dim"]),
        ("conv_wgrad", None, ["output dimension inferencing is not possible", "set_dim"]),
        ("conv_dgrad", (2, 4, 9, 5), ["not consistent", "[2, 6, 7, 5]", "[2, 6, 9, 5]"]),
        ("conv_dgrad", (3, 4, 7, 5), ["not consistent"]),
        ("conv_dgrad", (2, 5, 7, 5), ["channels"]),
        ("conv_dgrad", (2, 4, 7), ["one rank"]),
        ("conv_wgrad", (6, 4, 5, 3), ["not consistent"]),
        ("conv_wgrad", (5, 4, 3, 3), ["not consistent"]),
        ("conv_wgrad", (6, 3, 3, 3), ["channels"]),
    ],
)
def test_gradients_need_consistent_dims(method, given, words):
    g = graph()
    x, w = operands(g)
    dy = tensor(g, (2, 6, 7, 5), "dy")
    result = g.conv_dgrad(dy, w, **ONE, name="c") if method == "conv_dgrad" else g.conv_wgrad(x, dy, **ONE, name="c")
    if given:
        result.set_dim(given)
    with pytest.raises(ValidationError) as caught:
        g.validate()
    assert all(word in said(caught) for word in ["'c'", *words]), said(caught)


def test_dims_set_on_a_forward_output_must_fit():
    g = graph()
    g.conv_fprop(*operands(g), **ONE).set_dim((2, 6, 7, 6))
    with pytest.raises(ValidationError, match="contradict"):
        g.validate()


def test_vectorized_tensors_are_refused():
    g = graph()
    x, w = operands(g)
    x.set_vector_count_and_dimension(4, 1)
    g.conv_fprop(x, w, **ONE).set_output(True)
    g.validate()
    with pytest.raises(NotSupportedError, match="vectors of 4"):
        g.build_operation_graph()


def test_text_with_a_wrong_attribute():
    g = graph()
    g.conv_fprop(*operands(g), **ONE).set_output(True)
    text = str(g).replace('"dilation":[1,1]', '"dilation":[1,"1"]')
    with pytest.raises(ValidationError, match="dilation"):
        graphdnn.pygraph(device="cpu").deserialize(text)


def test_signature_and_help():
    import inspect

    names = list(inspect.signature(graphdnn.pygraph.conv_fprop).parameters)
    assert names == ["self", "image", "weight", "padding", "stride", "dilation", "convolution_mode", "compute_data_type", "name"]
    assert "CONVOLUTION" in (graphdnn.pygraph.conv_fprop.__doc__ or "")
