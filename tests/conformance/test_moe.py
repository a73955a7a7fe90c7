"""Grouped matmuls: modes, groups of every size, types, layouts, fusion, wrong offsets and indices, gradients, what is refused, JSON."""

from __future__ import annotations

import numpy as np
import pytest

import graphdnn
from graphdnn import data_type
from graphdnn import moe_grouped_matmul_mode as mode
from graphdnn.errors import ExecutionError, KindError, NotSupportedError, ValidationError
from graphdnn.inspection.check import check
from tests.helpers import built, check_graph, given

D = data_type
F32 = D.FLOAT
M, K, N, E = 23, 13, 11, 5
OFFSETS = {
    "uneven": [0, 4, 4, 5, 20],
    "empty first and last": [0, 0, 9, 20, M],
    "rows before the first": [3, 3, 9, 9, 14],
    "all in one": [0, M, M, M, M],
    "all in the last": [0, 0, 0, 0, 0],
    "none": [M, M, M, M, M],
}


def listed(g, name, count, dtype=D.INT32, stride=1):
    return g.tensor(dim=(1, count, 1), stride=(count * stride, stride, 1), data_type=dtype, name=name)


def matrices(g, dtype=F32, layouts=("row", "column"), rows=M):
    token = g.tensor(dim=(1, rows, K), layout=layouts[0], data_type=dtype, name="token")
    weight = g.tensor(dim=(E, K, N), layout=layouts[1], data_type=dtype, name="weight")
    return token, weight, g.tensor(dim=(E, 1, 1), layout="row", data_type=D.INT32, name="offsets")


def done(t, name="y", dtype=F32):
    return t.set_output(True).set_name(name).set_data_type(dtype)


def both(dtype=F32, layouts=("row", "column"), out=F32, compute=F32):
    """The product and the gradient of its weights."""

    def build(g):
        token, weight, offsets = matrices(g, dtype, layouts)
        done(g.moe_grouped_matmul(token, weight, offsets, compute_data_type=compute), "y", out)
        dy = g.tensor(dim=(1, M, N), layout=layouts[0], data_type=dtype, name="dy")
        done(g.moe_grouped_matmul_bwd(dy, token, offsets, compute_data_type=compute), "dw", out)

    return build


def starts(values):
    return {"offsets": given(np.array(values).reshape(-1, 1, 1))}


@pytest.mark.parametrize("name", OFFSETS)
def test_groups(device, name):
    check_graph(both(), device, data=starts(OFFSETS[name]), runs=1)


@pytest.mark.parametrize(
    "dtype, layouts, out, compute",
    [
        (D.HALF, ("row", "column"), D.HALF, F32),
        (D.BFLOAT16, ("column", "row"), F32, F32),
        (D.FP8_E4M3, ("row", "column"), D.BFLOAT16, F32),
        (D.DOUBLE, ("column", "column"), D.DOUBLE, D.DOUBLE),
        (D.INT8, ("row", "row"), D.INT32, D.INT32),
        (F32, ("row", "row"), D.INT8, F32),
    ],
)
def test_types_and_layouts(device, dtype, layouts, out, compute):
    check_graph(both(dtype, layouts, out, compute), device, data=starts(OFFSETS["uneven"]), runs=1)


def routed(kind, rows, top_k=0, slots=False, index=D.INT32, stride=1):
    def build(g):
        token, weight, offsets = matrices(g, D.BFLOAT16)
        more = {"token_ks": listed(g, "slots", rows, index, stride)} if slots else {}
        y = g.moe_grouped_matmul(token, weight, offsets, listed(g, "index", rows, index, stride), mode=kind, top_k=top_k, **more)
        done(y)

    return build


@pytest.mark.parametrize("rows", [M, 1, 40])
def test_gather(device, rows):
    """Fewer and more rows than tokens, some read several times; an index with gaps in memory."""
    index = np.random.default_rng(rows).integers(0, M, (1, rows, 1))
    data = starts([min(v, rows) for v in OFFSETS["uneven"]]) | {"index": given(index)}
    check_graph(routed(mode.GATHER, rows, top_k=2, index=D.INT64, stride=3), device, data=data)


def test_scatter(device):
    data = starts(OFFSETS["uneven"]) | {"index": given(np.random.default_rng(1).permutation(M).reshape(1, M, 1))}
    check_graph(routed(mode.SCATTER, M), device, data=data, every_plan=True)


def test_scatter_to_the_choices_of_a_token(device):
    """23 rows are 11 tokens with two choices each, and one more; the rows are in the order of their experts."""
    places = np.random.default_rng(2).permutation(M)
    data = starts(OFFSETS["rows before the first"])
    data |= {"index": given((places // 2).reshape(1, M, 1)), "slots": given((places % 2).reshape(1, M, 1))}
    check_graph(routed(mode.SCATTER, M, top_k=2, slots=True), device, data=data)


ROUTES = {
    "none": both(),
    "gather": routed(mode.GATHER, 40, stride=2),
    "scatter": routed(mode.SCATTER, M),
    "choices": routed(mode.SCATTER, M, top_k=2, slots=True),
}


@pytest.mark.parametrize("name", ROUTES)
def test_check_draws_offsets_and_indices_that_have_a_meaning(device, name):
    """``graphdnn run`` on random inputs: offsets in order, rows that exist, no place twice, of several seeds."""
    g = graphdnn.pygraph(device=device, io_data_type=F32, compute_data_type=F32)
    ROUTES[name](g)
    plan = built(g).plan
    for seed in range(3):
        assert check(plan, seed, repeat=0).right


@pytest.mark.parametrize("kind", [mode.NONE, mode.GATHER, mode.SCATTER])
def test_fusion_is_one_kernel(device, kind):
    """Block scales in front of the tokens, bias and activation behind."""

    def build(g):
        token = g.tensor(dim=(1, M, 16), layout="row", data_type=D.FP8_E4M3, name="token")
        scale = g.tensor(dim=(1, M, 2), layout="row", data_type=D.FP8_E8M0, name="scale")
        weight = g.tensor(dim=(E, 16, N), layout="column", data_type=D.BFLOAT16, name="weight")
        offsets = g.tensor(dim=(E, 1, 1), layout="row", data_type=D.INT32, name="offsets")
        index = () if kind is mode.NONE else (listed(g, "index", M),)
        y = g.moe_grouped_matmul(g.block_scale_dequantize(token, scale, [1, 8]), weight, offsets, *index, mode=kind)
        bias = g.tensor(dim=(1, M, N), layout="row", data_type=F32, name="bias")
        done(g.gelu(g.add(y, bias)))

    data = starts(OFFSETS["uneven"]) | {"index": given(np.random.default_rng(3).permutation(M).reshape(1, M, 1))}
    assert check_graph(build, device, data=data).graph.explain().kernels == 1


def test_offsets_and_indices_that_the_graph_calculates(device):
    """They are stored first."""

    def build(g):
        token, weight, offsets = matrices(g)
        one = g.tensor(dim=(1, 1, 1), layout="row", data_type=D.INT32, name="one")
        moved = g.sub(g.add(offsets, one), one, compute_data_type=D.INT32).set_data_type(D.INT32)
        index = g.neg(listed(g, "index", M), compute_data_type=D.INT32).set_data_type(D.INT32)
        done(g.moe_grouped_matmul(token, weight, moved, index, mode=mode.GATHER))

    data = starts(OFFSETS["uneven"]) | {"index": given(-np.random.default_rng(4).integers(0, M, (1, M, 1)))}
    check_graph(build, device, data=data)


@pytest.mark.parametrize("m, experts", [(0, 3), (1, 1), (2, 9), (70, 1)])
def test_sizes(device, m, experts):
    def build(g):
        token = g.tensor(dim=(1, m, K), layout="row", data_type=F32, name="token")
        weight = g.tensor(dim=(experts, K, N), layout="row", data_type=F32, name="weight")
        offsets = g.tensor(dim=(experts, 1, 1), layout="row", data_type=D.INT64, name="offsets")
        done(g.moe_grouped_matmul(token, weight, offsets))
        done(g.moe_grouped_matmul_bwd(g.tensor(dim=(1, m, N), layout="row", data_type=F32, name="dy"), token, offsets), "dw")

    check_graph(build, device, data=starts(sorted(np.random.default_rng(m).integers(0, m + 1, experts))), runs=1)


# --------------------------------------------------------------------------------------------------------------------- wrong offsets and indices
WRONG = {
    "negative": ([-7, 4, 4, 5, 20], None, "group 0 is out of range"),
    "too large": ([0, 4, 9, 2**31 - 1, 20], None, "group 3 is out of range"),
    "decreasing": ([0, 9, 4, 12, 20], None, "group 2 is out of order"),
    "negative index": (OFFSETS["uneven"], -1, "row index is out of range, entry 5"),
    "large index": (OFFSETS["uneven"], 2**31 - 1, "row index is out of range, entry 5"),
}


@pytest.mark.parametrize("kind", [mode.GATHER, mode.SCATTER])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_numbers_touch_nothing_outside(device, name, kind):
    """A CPU reports them; elsewhere they are clamped, as the reference has it, and the guards around every buffer stay whole."""
    offsets, index, words = WRONG[name]
    places = np.random.default_rng(5).permutation(M)
    if index is not None:
        # the row that had the place to which this one is clamped gets its place
        places[places == min(max(index, 0), M - 1)] = places[5]
        places[5] = index
    data = starts(offsets) | {"index": given(places.reshape(1, M, 1))}

    def run():
        check_graph(routed(kind, M), device, data=data, runs=1)

    if device != "cpu":
        run()
        return
    with pytest.raises(ExecutionError, match=words):
        run()


@pytest.mark.parametrize("calculated", [False, True])
def test_two_rows_for_one_place(device, calculated, monkeypatch):
    """Always reported by a CPU, by a GPU where the switch asks for it; also where the graph calculates the index."""
    monkeypatch.setenv("GRAPHDNN_CHECK_VALUES", "1")
    places = np.random.default_rng(1).permutation(M)
    places[7] = places[3]

    def build(g):
        token, weight, offsets = matrices(g)
        index = listed(g, "index", M)
        index = g.neg(index, compute_data_type=D.INT32).set_data_type(D.INT32) if calculated else index
        done(g.moe_grouped_matmul(token, weight, offsets, index, mode=mode.SCATTER))

    data = starts(OFFSETS["uneven"]) | {"index": given(places.reshape(1, M, 1) * (-1 if calculated else 1))}
    with pytest.raises(ExecutionError, match=f"two rows have one place.*found {places[3]}"):
        check_graph(build, device, data=data, runs=1)


@pytest.mark.parametrize("name", WRONG)
def test_the_switch_has_wrong_numbers_reported(device, name, monkeypatch):
    monkeypatch.setenv("GRAPHDNN_CHECK_VALUES", "1")
    offsets, index, words = WRONG[name]
    places = np.random.default_rng(5).permutation(M)
    places[5] = places[5] if index is None else index
    with pytest.raises(ExecutionError, match=words):
        check_graph(routed(mode.GATHER, M), device, data=starts(offsets) | {"index": given(places.reshape(1, M, 1))}, runs=1)


def test_a_choice_out_of_range():
    data = starts(OFFSETS["uneven"]) | {"index": given(np.zeros((1, M, 1), int)), "slots": given(np.full((1, M, 1), 2))}
    with pytest.raises(ExecutionError, match="choice of a token"):
        check_graph(routed(mode.SCATTER, M, top_k=2, slots=True), "cpu", data=data, runs=1)


# ---------------------------------------------------------------------------------------------------------------------------------------- gradients
def test_gradients(device):
    """Of sum(dy * moe(token, weight)), by central differences: the weight's by the backward op, the token's by the op with weights transposed."""
    rng, h = np.random.default_rng(7), 1e-3
    offsets = np.array(OFFSETS["rows before the first"])
    token, weight, dy = rng.standard_normal((M, K)), rng.standard_normal((E, K, N)), rng.standard_normal((M, N))

    def loss(t, w):
        expert = np.searchsorted(offsets, np.arange(M), side="right") - 1
        return sum(float(dy[i] @ (t[i] @ w[e])) for i, e in enumerate(expert) if e >= 0)

    def build(g):
        x, w, o = matrices(g, D.DOUBLE, ("row", "row"))
        d = g.tensor(dim=(1, M, N), layout="row", data_type=D.DOUBLE, name="dy")
        done(g.moe_grouped_matmul_bwd(d, x, o, compute_data_type=D.DOUBLE), "dw", D.DOUBLE)
        done(g.moe_grouped_matmul(d, g.transpose(w, [0, 2, 1]), o, compute_data_type=D.DOUBLE), "dx", D.DOUBLE)

    data = starts(offsets) | {"token": given(token), "weight": given(weight), "dy": given(dy)}
    found = check_graph(build, device, data=data, runs=1).outputs
    for name, x, at in (("dw", weight, [(4, 2, 3), (0, 0, 0), (2, 12, 10)]), ("dx", token, [(0, 0), (3, 5), (22, 12)])):
        for i in at:
            moved = [x.copy(), x.copy()]
            moved[0][i], moved[1][i] = x[i] + h, x[i] - h
            values = [loss(token, v) if name == "dw" else loss(v, weight) for v in moved]
            gradient = (values[0] - values[1]) / (2 * h)
            assert found[name].reshape(x.shape)[i] == pytest.approx(gradient, abs=1e-8)


def test_a_result_over_its_residual_is_refused():
    """SCATTER writes every row of the result before the products: a residual in the same memory would be read when it is no more."""
    g = graphdnn.pygraph(device="cpu", io_data_type=F32, intermediate_data_type=F32, compute_data_type=F32)
    token, weight, offsets = matrices(g)
    residual = g.tensor(dim=(1, M, N), layout="row")
    y = g.add(g.moe_grouped_matmul(token, weight, offsets, listed(g, "index", M), mode=mode.SCATTER), residual).set_output(True)
    built(g)
    arrays = {t: np.zeros(t.get_dim(), np.int32 if t.get_data_type() is D.INT32 else np.float32) for t in g._tensors if not t.get_is_virtual()}
    arrays[y] = arrays[residual]
    with pytest.raises(ValidationError, match="overlap|share|memory"):
        g.execute(arrays, np.zeros(g.get_workspace_size(), np.uint8))


# ------------------------------------------------------------------------------------------------------------------------------- the declaration
def test_names_dims_and_json():
    g = graphdnn.pygraph(device="cpu", io_data_type=F32, intermediate_data_type=F32, compute_data_type=F32)
    token, weight, offsets = matrices(g)
    y = g.moe_grouped_matmul(token, weight, offsets, listed(g, "index", 40), mode=mode.GATHER, top_k=2)
    dw = g.moe_grouped_matmul_bwd(g.tensor(dim=(1, M, N), layout="row", name="dy"), token, offsets, name="b")
    assert [t.get_name() for t in (y, dw)] == ["0::Output", "b::DWeight"]
    y.set_output(True)
    dw.set_output(True)
    text = str(g)
    g.validate()
    assert (y.get_dim(), y.get_stride()) == ([1, 40, N], [40 * N, N, 1])
    assert (dw.get_dim(), dw.get_stride()) == ([E, K, N], [K * N, 1, K])
    again = graphdnn.pygraph(device="cpu")
    again.deserialize(text)
    assert str(again) == text and '"tag":"MOE_GROUPED_MATMUL"' in text and '"mode":"GATHER"' in text and '"top_k":2' in text
    built(again)


def test_a_stored_plan_runs():
    """Its step of groups survives serialize and deserialize."""
    g = graphdnn.pygraph(device="cpu", io_data_type=F32, intermediate_data_type=F32, compute_data_type=F32)
    token, weight, offsets = matrices(g, D.BFLOAT16)
    y = g.moe_grouped_matmul(token, weight, offsets).set_output(True)
    built(g)
    again = graphdnn.pygraph(device="cpu")
    again.deserialize(g.serialize())
    arrays = {token: np.ones((1, M, K), np.uint16), weight: np.ones((E, N, K), np.uint16), offsets: np.zeros(E, np.int32)}
    arrays[y] = np.full((1, M, N), np.nan, np.float32)
    again.execute({t.get_uid(): a for t, a in arrays.items()}, np.zeros(again.get_workspace_size(), np.uint8))
    assert np.isfinite(arrays[y]).all()


def call(g, **more):
    given = dict(zip(("token", "weight", "first_token_offset"), matrices(g), strict=True))
    return g.moe_grouped_matmul(**given | more)


def other(g, dim, dtype=F32, **more):
    return g.tensor(dim=dim, layout="row", data_type=dtype, **more)


ERRORS = {
    "rank of token": (ValidationError, "Token is not a stack", lambda g: call(g, token=other(g, (M, K)))),
    "two token matrices": (ValidationError, "Token is not a stack", lambda g: call(g, token=other(g, (2, M, K)))),
    "K": (ValidationError, "K of token and weight differ", lambda g: call(g, weight=other(g, (E, K + 1, N)))),
    "count of offsets": (ValidationError, "FirstTokenOffset", lambda g: call(g, first_token_offset=other(g, (E + 1, 1, 1), D.INT32))),
    "form of offsets": (
        ValidationError, "FirstTokenOffset", lambda g: call(g, weight=other(g, (4, K, N)), first_token_offset=other(g, (2, 2, 1), D.INT32))
    ),
    "gather without index": (ValidationError, "needs a token_index", lambda g: call(g, mode=mode.GATHER)),
    "index without a mode": (ValidationError, "takes no token_index", lambda g: call(g, token_index=listed(g, "i", M))),
    "scatter of fewer": (ValidationError, "TokenIndex", lambda g: call(g, token_index=listed(g, "i", M - 1), mode=mode.SCATTER)),
    "slots without top_k": (
        ValidationError, "top_k", lambda g: call(g, token_index=listed(g, "i", M), token_ks=listed(g, "s", M), mode=mode.SCATTER)
    ),
    "negative top_k": (ValidationError, "top_k", lambda g: call(g, token_index=listed(g, "i", M), mode=mode.GATHER, top_k=-1)),
    "top_k without a mode": (ValidationError, "top_k", lambda g: call(g, top_k=2)),
    "float offsets": (NotSupportedError, "FirstTokenOffset", lambda g: call(g, first_token_offset=other(g, (E, 1, 1)))),
    "kind of mode": (KindError, "mode", lambda g: call(g, mode="NONE")),
    "kind of index": (KindError, "token_index", lambda g: call(g, token_index=3, mode=mode.GATHER)),
    "rows of doutput": (
        ValidationError, "rows of doutput",
        lambda g: g.moe_grouped_matmul_bwd(other(g, (1, M + 1, N)), other(g, (1, M, K)), other(g, (E, 1, 1), D.INT32)),
    ),
    "no experts": (
        ValidationError, "needs experts", lambda g: g.moe_grouped_matmul_bwd(other(g, (1, M, N)), other(g, (1, M, K)), other(g, (0, 1, 1), D.INT32))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    kind, words, make = ERRORS[name]
    g = graphdnn.pygraph(device="cpu", io_data_type=F32)
    with pytest.raises(kind, match=words):
        make(g).set_output(True)
        g.build_operation_graph()
