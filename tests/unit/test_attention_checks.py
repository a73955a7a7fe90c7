"""What attention's op specs check of a node however it was made: through the methods, or read from text that may be damaged."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

import graphdnn
from graphdnn import data_type as D
from graphdnn.errors import BuildError, NotSupportedError, ValidationError
from graphdnn.ir.node import Node
from graphdnn.opspecs import score_grad
from graphdnn.opspecs.attention_reference import modified
from graphdnn.opspecs.pointwise import POINTWISE
from tests.attention_cases import Case, arguments, backward, feeds, forward, results, with_results
from tests.unit.test_attention_errors import Built, fp8, seeds


def test_a_node_without_a_name_is_called_by_its_op():
    with pytest.raises(ValidationError, match="node 'sdpa'.*lengths"):
        Built().forward(use_padding_mask=True)
    assert {n.name.split(".")[0] for n in fp8()._opgraph.nodes} == {"sdpa_fp8_fwd"}


# ---------------------------------------------------------------------------------------------------------------------------- text that is damaged
def text_of(case, declare=forward):
    """The JSON object of a graph."""
    values = with_results(case, feeds(case))
    g = graphdnn.pygraph(device="cpu", **arguments(case))
    declare(case, values)(g)
    return json.loads(str(g))


def read(text):
    """The graph of a JSON object, through the checks."""
    g = graphdnn.pygraph(device="cpu")
    g.deserialize(json.dumps(text))
    g.build_operation_graph()
    return g


SMALL = Case(5, 6, 4, b=2, h=2)
DAMAGED = {
    "no such mode": ([["SMUL", ["S", "S"], []]], "SMUL"),
    "too few inputs": ([["MUL", ["S"], []]], "expected 2, found 1"),
    "too many inputs": ([["NEG", ["S", 1.0], []]], "expected 1, found 2"),
    "a later step": ([["MUL", ["#1", "S"], []], ["NEG", ["S"], []]], "#1"),
    "its own result": ([["MUL", ["#0", "S"], []]], "#0"),
    "a negative step": ([["NEG", ["S"], []], ["NEG", ["#-1"], []]], "#-1"),
    "no step": ([["NEG", ["S"], []], ["NEG", ["#"], []]], "found #"),
    "a step with zeros before it": ([["NEG", ["S"], []], ["NEG", ["#00"], []]], "#00"),
    "other digits": ([["NEG", ["S"], []], ["NEG", ["#\u0660"], []]], "#"),
    "no such tensor": ([["ADD", ["S", "T:0"], []]], "T:0"),
    "a tensor out of range": ([["ADD", ["S", "T:99"], []]], "T:99"),
    "a word": ([["ADD", ["S", "scale"], []]], "scale"),
    "the score of a gradient": ([["ADD", ["S", "P"], []]], "found P"),
    "an attribute of another mode": ([["NEG", ["S"], [["swish_beta", 1.0]]]], "swish_beta"),
    "an attribute twice": ([["SWISH_FWD", ["S"], [["swish_beta", 1.0], ["swish_beta", 2.0]]]], "twice"),
    "an axis out of range": ([["GEN_INDEX", ["S"], [["axis", 4]]]], "axis"),
    "an axis that is no integer": ([["GEN_INDEX", ["S"], [["axis", 0.5]]]], "axis"),
    "an attribute without meaning": ([["SOFTPLUS_FWD", ["S"], [["softplus_beta", 0.0]]]], "softplus_beta"),
}


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.parametrize("declare", [forward, backward])
def test_damaged_steps(name, declare):
    steps, words = DAMAGED[name]
    text = text_of(replace(SMALL, score_mod="square"), declare)
    text["nodes"][0]["score_mod"] = steps
    with pytest.raises(ValidationError, match=re.escape(words)):
        read(text)


def test_damaged_steps_of_a_gradient():
    text = text_of(replace(SMALL, score_mod="square"), backward)
    text["nodes"][0]["score_mod_bprop"] = [["MUL", ["S", "P"], []]]
    read(text)
    text["nodes"][0]["score_mod_bprop"] = [["MUL", ["S", "Q"], []]]
    with pytest.raises(ValidationError, match="score_mod_bprop"):
        read(text)


# ----------------------------------------------------------------------------------------------------------------------------------------- dropout
SETS = [
    (forward, {"dropout": 0.25}, ("Seed", "Offset", "dropout_probability")),
    (backward, {"dropout": 0.25}, ("Seed", "Offset", "dropout_probability")),
    (forward, {"dropout_mask": True}, ("Dropout_mask", "Dropout_scale")),
    (backward, {"dropout_mask": True}, ("Dropout_mask", "Dropout_scale", "Dropout_scale_inv")),
]


@pytest.mark.parametrize("number", [np.float32(0.25), Fraction(1, 4), np.float64(0.25), Decimal("0.25")], ids=repr)
def test_probability_and_scale_may_be_any_real_number(number):
    def built():
        b = Built()
        b.forward(dropout=(number, *seeds(b)), attn_scale=number)
        return b.g._nodes[-1].attrs

    assert (built()["dropout_probability"], built()["attn_scale_value"]) == (0.25, 0.25)


@pytest.mark.parametrize(("value", "error"), [(10**400, ValidationError), *((v, BuildError) for v in (True, "0.5", 1j, None))])
def test_what_is_no_probability(value, error):
    b = Built()
    with pytest.raises(error, match="dropout"):
        b.forward(dropout=(value, *seeds(b)))


def test_a_scale_that_no_float_holds():
    with pytest.raises(ValidationError, match="attn_scale.*out of range"):
        Built().forward(attn_scale=Fraction(10**400))


def without(node, names):
    """``node`` of a text without these ports or attributes."""
    node["inputs"] = {p: t for p, t in node["inputs"].items() if p not in names}
    node["outputs"].pop("RNG_DUMP", None)
    return node | {n: None for n in names if n in node}


@pytest.mark.parametrize(("declare", "options", "parts"), SETS)
def test_dropout_is_a_whole_set(declare, options, parts):
    case = replace(SMALL, **options)
    for name in parts:
        text = text_of(case, declare)
        text["nodes"][0] = without(text["nodes"][0], [name])
        with pytest.raises(ValidationError, match=f"lacks {name};"):
            read(text)
    text = text_of(case, declare)
    text["nodes"][0] = without(text["nodes"][0], parts)
    read(text)


def test_dropout_in_two_ways():
    text = text_of(replace(SMALL, dropout=0.25, dropout_mask=False))
    extra = text_of(replace(SMALL, dropout_mask=True))
    for port in ("Dropout_mask", "Dropout_scale"):
        key = extra["nodes"][0]["inputs"][port]
        text["tensors"][str(key) + "x"] = extra["tensors"][str(key)]
        text["nodes"][0]["inputs"][port] = str(key) + "x"
    with pytest.raises(ValidationError, match="two ways"):
        read(text)


@pytest.mark.parametrize("p", [1 - 2.0**-25, 1 - 2.0**-53, 1.0, 1.5, float("inf"), float("nan"), -1e-50, -0.25, 1e300])
def test_a_probability_out_of_range(p):
    for call in (Built().forward, Built().backward):
        built = call.__self__
        with pytest.raises(ValidationError, match="probability"):
            call(dropout=(p, *seeds(built)))


@pytest.mark.parametrize("compute", [D.FLOAT, D.DOUBLE])
@pytest.mark.parametrize("p", [0.0, 1e-50, 2.0**-149, 1e-30, 0.1, 1 - 2.0**-23, 1 - 2.0**-24])
def test_a_probability_is_that_of_float32(p, compute):
    """What is left is scaled by what was dropped: both by the float32 next to ``p``; the text has the same number."""
    case = replace(SMALL, dropout=p or 1e-60, dtype=compute, compute=compute)
    values = feeds(case)
    g = graphdnn.pygraph(device="cpu", **arguments(case))
    forward(case, values)(g)
    g.build_operation_graph()
    assert g._opgraph.nodes[0].attr("dropout_probability") == np.float32(p)
    again = graphdnn.pygraph(device="cpu")
    again.deserialize(str(g))
    again.build_operation_graph()
    assert again._opgraph.key == g._opgraph.key
    whole = replace(case, dropout=0.0)
    found, plain = results(case, values, forward(case, values)), results(whole, values, forward(whole, values))
    if p < 2.0**-24:
        np.testing.assert_array_equal(found["dump"], 1.0)
        np.testing.assert_allclose(found["o"], plain["o"], rtol=1e-15)
    elif p > 0.5:
        assert not found["dump"].any() and not found["o"].any()


# ------------------------------------------------------------------------------------------------------------------------------------- data types
@pytest.mark.parametrize("dtype", [D.INT32, D.INT64, D.BOOLEAN, D.UINT8, D.INT8])
def test_results_of_rows_are_floats(dtype):
    for argument in ("score_max", "score_sum_exp"):
        built = Built()
        with pytest.raises(NotSupportedError, match="wrong data type"):
            built.forward(**{argument: built.t("rows", (2, 4, 32, 1), dtype)})
    with pytest.raises(NotSupportedError, match="Amax_S has the wrong data type"):
        fp8(amax=dtype)


# --------------------------------------------------------------------------------------------------------------------------------- pointwise modes
NODE = Node("SDPA", "a", (), (), (), D.DOUBLE)


@pytest.mark.parametrize("mode", POINTWISE)
def test_every_mode_has_a_derivative_or_is_refused(mode):
    """A new row of the table is refused by name, and fails here until it is listed; the derivative of others is that of central differences."""
    row = POINTWISE[mode]
    attrs = tuple((n, 3 if n == "axis" else 0.75) for n in row.attrs if n not in ("relu_upper_clip", "relu_lower_clip"))
    for at in range(len(row.args)):
        inputs = tuple("S" if i == at else 1.0 if i == 2 else 1.375 for i in range(len(row.args)))
        steps = ((mode, inputs, attrs),)
        if mode in score_grad.REFUSED or (mode == "MOD" and at == 1):
            with pytest.raises(NotSupportedError, match=mode):
                score_grad.derived(steps)
            continue
        s = np.random.default_rng(at).uniform(0.15, 0.85, (2, 3, 4, 5))  # away from the corners of every mode
        s += (np.arange(5) % 2) * (1.5 if mode in ("SQRT", "RSQRT", "LOG", "POW", "RECIPROCAL", "DIV") else -1.5 if mode != "TAN" else 0.25)
        ds, h = np.random.default_rng(9).standard_normal(s.shape), 2.0**-20
        up, down = (modified(steps, {"S": s + x}, {}, NODE) for x in (h, -h))
        found = modified(score_grad.derived(steps), {"S": ds, "P": s}, {}, NODE)
        np.testing.assert_allclose(found, ds * (up - down) / (2 * h), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("mode", POINTWISE)
def test_every_mode_in_integers_is_the_same_or_refused(mode):
    """A score_mod is calculated in the compute type of the attention: where a step says integers, they give the same numbers, or it is refused."""
    row = POINTWISE[mode]
    n = len(row.args)
    attrs = {"axis": 3} if "axis" in row.attrs else {}

    def scores(g, s):
        whole = g.gen_index(s, 3)
        made = getattr(g, row.method)(*[whole] * n, **attrs)
        return g.add(made.set_data_type(D.INT32), s)

    try:
        Built().forward(score_mod=scores)
    except NotSupportedError as error:
        assert mode in str(error)
        return
    if mode == "GEN_INDEX":
        return  # an index is whole
    rng = np.random.default_rng(3)
    operands = [rng.integers(-9, 9, (4, 50)) for _ in range(n)]
    operands = [np.where(x == 0, 5, x) for x in operands] if mode == "MOD" else operands
    expected = row.reference(*(x.astype(np.float64) for x in operands), **row.values(attrs, D.DOUBLE))
    np.testing.assert_array_equal(row.reference(*operands, **row.values(attrs, D.INT64)), expected)
