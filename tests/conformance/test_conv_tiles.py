"""Convolutions by transformed tiles (Winograd, Fourier): every form within its own derived bound, fusion, what the engines refuse, notes."""

from __future__ import annotations

import numpy as np
import pytest

import graphdnn
from graphdnn import data_type
from graphdnn.engines import ENGINES
from graphdnn.ir.layout import by_name
from graphdnn.opspecs.fast_conv import winograd
from tests.conformance.test_conv import Case, done, graph_of, vector
from tests.helpers import Data, built, check_graph

D = data_type
F32 = D.FLOAT
WINOGRAD, FFT = 7, 8


def others(engine):
    """Every engine of convolutions but this one."""
    return [f"eng{e.id}" for e in ENGINES if e.name.startswith("conv") and e.id != engine]


CASES = {
    "plain": Case(x=(2, 3, 7, 9), k=5),
    "grouped, uneven padding": Case(x=(2, 4, 6, 5), k=6, groups=2, pre=(0, 2), post=(1, 3), flip=True),
    "cropped": Case(x=(1, 2, 9, 8), k=3, pre=(-1, 1), post=(2, -2)),
    "one output": Case(x=(2, 3, 3, 3), k=2, pre=0),
    "depthwise": Case(x=(2, 4, 5, 6), k=4, groups=4),
}
LARGE = {
    "5x5": Case(x=(2, 3, 9, 8), k=4, taps=5, pre=2),
    "a line": Case(x=(1, 2, 6, 11), k=3, taps=(1, 7), pre=(0, 3), flip=True),
    "7x4, grouped, uneven padding": Case(x=(2, 4, 8, 7), k=6, taps=(7, 4), pre=(3, 0), post=(1, 3), groups=2),
    "1x1": Case(x=(1, 3, 5, 4), k=2, taps=1, pre=0),
}


def small(case, device):
    """Fewer images, channels and filters in the simulator, the geometry as it is."""
    if device != "cudasim":
        return case
    x = (1, case.groups, *case.x[2:])
    return Case(x, case.groups, case.taps, case.pre, case.post, case.stride, case.dilation, case.groups, case.flip)


@pytest.mark.parametrize("layout", ["row", "channels_last"])
@pytest.mark.parametrize("kind", ["fprop", "dgrad"])
@pytest.mark.parametrize("name", CASES)
def test_winograd(device, name, kind, layout):
    outcome = check_graph(graph_of(small(CASES[name], device), kind, layout=layout), device, every_plan=True, barred=others(WINOGRAD), runs=1)
    assert outcome.plans >= 2


@pytest.mark.parametrize("layout", ["row", "channels_last"])
@pytest.mark.parametrize("kind", ["fprop", "dgrad"])
@pytest.mark.parametrize("name", [*LARGE, "plain"])
def test_fourier(device, name, kind, layout):
    """The largest tile is for a CPU: the simulator would take minutes."""
    case = small((LARGE | CASES)[name], device)
    check_graph(graph_of(case, kind, layout=layout), device, every_plan=device == "cpu" and name == "5x5", barred=others(FFT), runs=1)


@pytest.mark.parametrize("engine", [WINOGRAD, FFT])
@pytest.mark.parametrize("types", [(D.DOUBLE, D.DOUBLE), (D.HALF, D.HALF), (D.BFLOAT16, F32), (D.FP8_E4M3, D.HALF)], ids=lambda t: t[0].name)
def test_types(device, types, engine):
    dtype, out = types
    compute = D.DOUBLE if dtype is D.DOUBLE else F32
    check_graph(graph_of(small(CASES["plain"], device), "fprop", dtype=dtype, out=out, compute=compute), device, barred=others(engine), runs=1)


@pytest.mark.parametrize("layout", ["row", "channels_last"])
@pytest.mark.parametrize("engine", [WINOGRAD, FFT])
def test_prologue_and_epilogue_are_fused(device, engine, layout):
    """relu(scale * x + bias) in front, zero where there is padding; bias, residual, relu and a second output behind."""
    case = Case(x=(2, 4, 6, 5), k=6) if device != "cudasim" else Case(x=(1, 2, 4, 5), k=3)
    c, k = case.x[1], case.y[1]

    def build(g):
        x = g.tensor(dim=case.x, layout=layout, data_type=F32, name="image")
        x = g.relu(g.bias(g.scale(x, vector(g, (1, c, 1, 1), "scale")), vector(g, (1, c, 1, 1), "shift")))
        y = done(g.bias(case.add(g, "fprop", x=x, layout=layout), vector(g, (1, k, 1, 1), "bias")), "linear", D.HALF)
        more = g.tensor(dim=case.y, layout="row", data_type=D.HALF, name="residual")
        done(g.relu(g.add(y, more))).set_dim(case.y).set_stride(by_name(case.y, layout))

    outcome = check_graph(build, device, graph={"compute_data_type": F32}, barred=others(engine))
    assert len(outcome.graph.plan.partition.regions) == 1


@pytest.mark.parametrize("engine", [WINOGRAD, FFT])
def test_nothing_is_said_of_tiles_that_are_not_finite(device, engine):
    """Infinities and NaN reach the whole tile; all other tiles are as they should be."""
    case = Case(x=(1, 1, 40, 40), k=2) if device != "cudasim" else Case(x=(1, 1, 18, 10), k=1)
    image = np.random.default_rng(0).standard_normal(case.x)
    image[0, 0, 3, 5], image[0, 0, 2, 2] = np.inf, np.nan
    check_graph(graph_of(case, "fprop"), device, data={"x": Data("values", values=image)}, barred=others(engine), runs=1, may_exclude=0.95)


def test_any_strides(device):
    def build(g):
        case = small(Case(x=(2, 3, 5, 4), k=5), device)

        def tensor(dim, name):
            return g.tensor(dim=dim, stride=[2 * s for s in by_name(dim, (0, 3, 2, 1))], data_type=F32, name=name)

        result = done(case.add(g, "fprop", tensor(case.x, "x"), tensor(case.w, "w"))).set_dim(case.y)
        result.set_stride([3 * s for s in by_name(case.y, (2, 3, 0, 1))])

    check_graph(build, device, offsets={"x": 1, "w": 3}, barred=others(WINOGRAD), runs=1)


REFUSED = {
    "conv_winograd: the filter has 5 x 5 taps": (WINOGRAD, Case(taps=5, pre=2), "fprop", F32),
    "conv_winograd: convolution 'c' has strides (2, 1)": (WINOGRAD, Case(stride=(2, 1)), "fprop", F32),
    "conv_winograd: convolution 'c' has strides (1, 1) and dilations (1, 2)": (WINOGRAD, Case(dilation=(1, 2)), "fprop", F32),
    "conv_winograd: the anchor 'c' of the region does not slide over one image": (WINOGRAD, Case(), "wgrad", F32),
    "conv_fft: convolution 'c' has 1 spatial dims": (FFT, Case(x=(2, 3, 9)), "fprop", F32),
    "conv_fft: convolution 'c' is computed in INT32": (FFT, Case(), "fprop", D.INT8),
    "conv_fft: convolution 'c' is empty": (FFT, Case(x=(0, 4, 7, 5)), "fprop", F32),
    "leaves few outputs of a tile under a filter of 19 x 1 taps": (FFT, Case(x=(1, 1, 20, 3), taps=(19, 1), pre=0), "fprop", F32),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refusals_say_why(reason):
    engine, case, kind, dtype = REFUSED[reason]
    g = graphdnn.pygraph(device="cpu")
    y = case.add(g, kind, dtype=dtype)
    g._nodes[-1].name = "c"
    done(y, dtype=D.INT32 if dtype is D.INT8 else F32)
    built(g)
    assert any(reason in r.reason for r in g._plans.rejections), [r.reason for r in g._plans.rejections]
    assert all(c.engine != engine for c in g.plan.choices)


def test_notes_and_deselection():
    """A plan says what it is, and a user who wants plain sums bars it."""

    def plans(*barred):
        g = graphdnn.pygraph(device="cpu")
        done(Case(x=(2, 16, 20, 20), k=16).add(g, "fprop"))
        g.validate()
        g.build_operation_graph()
        g.create_execution_plans([graphdnn.heur_mode.A])
        g.deselect_numeric_notes(list(barred))
        return {
            frozenset(map(str, p.numeric_notes))
            for i in range(g.get_execution_plan_count())
            if not g._plans.obstacle(i)
            for p in [g._plans.plan_at(i)]
        }

    note = graphdnn.numerical_note
    every = plans()
    assert {frozenset(("WINOGRAD", "WINOGRAD_TILE_4x4")), frozenset(("WINOGRAD", "WINOGRAD_TILE_6x6")), frozenset(("FFT",)), frozenset()} <= every
    assert plans(note.WINOGRAD, note.FFT) == {frozenset()}


@pytest.mark.parametrize("size", [4, 6])
def test_minimal_filtering_is_exact_in_rational_numbers(size):
    """y_i = sum over r of d_(i + r) g_r, coefficient by coefficient."""
    w = winograd(size, 3)
    for i in range(size - 2):
        for a in range(size):
            for r in range(3):
                assert sum(w.output[i][j] * w.filter[j][r] * w.input[j][a] for j in range(size)) == (a == i + r)
