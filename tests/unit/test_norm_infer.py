"""Inference and errors of normalization, statistics and softmax ops: the rows of the API page, what runs here beside it, and our errors."""

from __future__ import annotations

import inspect
import json

import pytest

import graphdnn
from graphdnn import data_type, norm_forward_phase
from graphdnn.errors import KindError, NotSupportedError, ValidationError
from graphdnn.ir.layout import packed

F32, F16 = data_type.FLOAT, data_type.HALF
TRAINING, INFERENCE, NOT_SET = norm_forward_phase.TRAINING, norm_forward_phase.INFERENCE, norm_forward_phase.NOT_SET
NCHW, NHWC = (180, 30, 10, 1), (180, 1, 60, 6)
SAME, RUNS, OURS = "same", "runs here", "our error"


def graph():
    return graphdnn.pygraph(io_data_type=F16, intermediate_data_type=F32, compute_data_type=F32, device="cpu")


def t(g, *dim, stride=None, name=""):
    return g.tensor(dim=dim, stride=stride or packed(dim), name=name)


def forward(method, x, stride, scale, *more):
    """Forward op on X and a scale of these dims."""

    def declare(g):
        s = t(g, *scale)
        return getattr(g, method)(TRAINING, t(g, *x, stride=stride), s, s, 1e-5, *more)

    return declare


def backward(method, x, stride, scale, statistics, *more, mean=True):
    def declare(g):
        inputs = [t(g, *x), t(g, *x, stride=stride), t(g, *scale), *[t(g, *statistics) for _ in range(1 + mean)]]
        return getattr(g, method)(*inputs, *more)

    return declare


def batchnorm(x, stride, running=True):
    def declare(g):
        c = [t(g, 1, x[1], *[1] * (len(x) - 2)) for _ in range(4)]
        return g.batchnorm(t(g, *x, stride=stride), *c[:2], *(c[2:] if running else (None, None)), 1e-5, 0.1 if running else None)

    return declare


def inference(x, stride):
    return lambda g: [g.batchnorm_inference(t(g, *x, stride=stride), *(t(g, 1, x[1], 1, 1) for _ in range(4)))]


X4, C4, I4 = (4, 6, 3, 10), (1, 6, 1, 1), (4, 6, 1, 1)
COLUMNS = (1, 2, 10)
# (what it is beside the API page, what declares it, dims and strides of its outputs; None for outputs that are None)
ROWS = {
    "layernorm": (SAME, forward("layernorm", (2, 5, 8), (40, 8, 1), (1, 1, 8)),
                  [((2, 5, 8), (40, 8, 1)), ((2, 5, 1), (5, 1, 1)), ((2, 5, 1), (5, 1, 1))]),
    "layernorm, other order": (SAME, forward("layernorm", (2, 5, 8), COLUMNS, (1, 1, 8)),
                               [((2, 5, 8), COLUMNS), ((2, 5, 1), (1, 2, 10)), ((2, 5, 1), (1, 2, 10))]),
    "layernorm, two axes": (SAME, forward("layernorm", (2, 5, 8), (40, 8, 1), (1, 5, 8)),
                            [((2, 5, 8), (40, 8, 1)), ((2, 1, 1), (1, 1, 1)), ((2, 1, 1), (1, 1, 1))]),
    "layernorm (N, C, 1, 1)": (SAME, forward("layernorm", (4, 6, 1, 1), (6, 1, 6, 6), (1, 6, 1, 1)),
                               [((4, 6, 1, 1), (6, 1, 6, 6)), *[((4, 1, 1, 1), (1, 1, 4, 4))] * 2]),
    "rmsnorm": (SAME, forward("rmsnorm", (2, 5, 8), (40, 8, 1), (1, 1, 8)), [((2, 5, 8), (40, 8, 1)), ((2, 5, 1), (5, 1, 1))]),
    "adalayernorm": (SAME, forward("adalayernorm", (2, 5, 8), (40, 8, 1), (2, 1, 8)),
                     [((2, 5, 8), (40, 8, 1)), ((2, 5, 1), (5, 1, 1)), ((2, 5, 1), (5, 1, 1))]),
    "adalayernorm [S, B, D]": (RUNS, forward("adalayernorm", (5, 2, 8), (16, 8, 1), (1, 2, 8)),
                               [((5, 2, 8), (16, 8, 1)), ((5, 2, 1), (2, 1, 1)), ((5, 2, 1), (2, 1, 1))]),
    "adalayernorm, whole samples": (SAME, forward("adalayernorm", (2, 5, 8), (40, 8, 1), (2, 5, 8)),
                                    [((2, 5, 8), (40, 8, 1)), ((2, 1, 1), (1, 1, 1)), ((2, 1, 1), (1, 1, 1))]),
    "instancenorm": (SAME, forward("instancenorm", X4, NHWC, C4), [(X4, NHWC), (I4, (6, 1, 6, 6)), (I4, (6, 1, 6, 6))]),
    "instancenorm, NCHW": (SAME, forward("instancenorm", X4, NCHW, C4), [(X4, NCHW), (I4, (6, 1, 6, 6)), (I4, (6, 1, 6, 6))]),
    "groupnorm": (RUNS, forward("groupnorm", X4, NHWC, C4, 3), [(X4, NHWC), ((4, 3, 1, 1), (3, 1, 3, 3)), ((4, 3, 1, 1), (3, 1, 3, 3))]),
    "batchnorm": (SAME, batchnorm(X4, NHWC), [(X4, NHWC), *[(C4, (6, 1, 6, 6))] * 4]),
    "batchnorm without running": (SAME, batchnorm(X4, NCHW, False), [(X4, NCHW), (C4, (6, 1, 6, 6)), (C4, (6, 1, 6, 6)), None, None]),
    "batchnorm, 3-D": (SAME, batchnorm((4, 6, 5), (30, 5, 1)), [((4, 6, 5), (30, 5, 1)), *[((1, 6, 1), (6, 1, 6))] * 4]),
    "batchnorm_inference": (SAME, inference(X4, NHWC), [(X4, NHWC)]),
    "layernorm_backward": (SAME, backward("layernorm_backward", (4, 6, 1, 1), (6, 1, 1, 1), C4, (4, 1, 1, 1)),
                           [((4, 6, 1, 1), (6, 1, 6, 6)), (C4, (6, 1, 6, 6)), (C4, (6, 1, 6, 6))]),
    "layernorm_backward, 3-D": (SAME, backward("layernorm_backward", (2, 5, 8), (40, 8, 1), (1, 1, 8), (2, 5, 1)),
                                [((2, 5, 8), (40, 1, 5)), ((1, 5, 8), (40, 1, 5)), ((1, 5, 8), (40, 1, 5))]),
    "layernorm_backward, all axes": (RUNS, backward("layernorm_backward", (2, 5, 8), (40, 8, 1), (2, 5, 8), (1, 1, 1)),
                                     [((2, 5, 8), (40, 1, 5)), ((2, 5, 8), (40, 1, 5)), ((2, 5, 8), (40, 1, 5))]),
    "rmsnorm_backward": (SAME, backward("rmsnorm_backward", (2, 5, 8), (40, 8, 1), (1, 1, 8), (2, 5, 1), True, mean=False),
                         [((2, 5, 8), (40, 1, 5)), ((1, 5, 8), (40, 1, 5)), ((1, 5, 8), (40, 1, 5))]),
    "rmsnorm_backward without bias": (SAME, backward("rmsnorm_backward", (2, 5, 8), (40, 8, 1), (1, 1, 8), (2, 5, 1), False, mean=False),
                                      [((2, 5, 8), (40, 1, 5)), ((1, 5, 8), (40, 1, 5)), None]),
    "adalayernorm_backward": (SAME, backward("adalayernorm_backward", (2, 5, 8), COLUMNS, (2, 1, 8), (2, 5, 1)),
                              [((2, 5, 8), (40, 8, 1)), ((2, 1, 8), (8, 8, 1)), ((2, 1, 8), (8, 8, 1))]),
    "adalayernorm_backward [S, B, D]": (RUNS, backward("adalayernorm_backward", (5, 2, 8), (16, 8, 1), (1, 2, 8), (5, 2, 1)),
                                        [((5, 2, 8), (16, 8, 1)), ((1, 2, 8), (16, 8, 1)), ((1, 2, 8), (16, 8, 1))]),
    "batchnorm_backward": (SAME, backward("batchnorm_backward", X4, NCHW, C4, C4), [(X4, NHWC), (C4, (6, 1, 6, 6)), (C4, (6, 1, 6, 6))]),
    "instancenorm_backward": (SAME, backward("instancenorm_backward", X4, NCHW, C4, I4), [(X4, NHWC), (C4, (6, 1, 6, 6)), (C4, (6, 1, 6, 6))]),
    "groupnorm_backward": (RUNS, backward("groupnorm_backward", X4, NCHW, C4, (4, 2, 1, 1)), [(X4, NHWC), (C4, (6, 1, 6, 6)), (C4, (6, 1, 6, 6))]),
    "genstats": (SAME, lambda g: g.genstats(t(g, *X4, stride=NHWC)), [(C4, (6, 1, 6, 6)), (C4, (6, 1, 6, 6))]),
    "bn_finalize, a momentum of nothing": (OURS, lambda g: g.bn_finalize(*(t(g, *C4) for _ in range(4)), 1e-5, 7, momentum=0.1),
                                           [*[(C4, (6, 1, 6, 6))] * 4, None, None]),
    "bn_finalize": (RUNS, lambda g: g.bn_finalize(*(t(g, *C4) for _ in range(4)), 1e-5, 7), [*[(C4, (6, 1, 6, 6))] * 4, None, None]),
    "dbn_weight": (RUNS, lambda g: g.dbn_weight(t(g, *X4), t(g, *X4), *(t(g, *C4) for _ in range(3))), [(C4, (6, 1, 6, 6))] * 5),
    "softmax": (RUNS, lambda g: [g.softmax(t(g, 2, 5, 8, stride=COLUMNS), -2)], [((2, 5, 8), COLUMNS)]),
    "log_softmax": (RUNS, lambda g: [g.log_softmax(t(g, 2, 5, 8), 0)], [((2, 5, 8), (40, 8, 1))]),
    "logsumexp": (RUNS, lambda g: [g.logsumexp(t(g, 2, 5, 8, stride=COLUMNS), 1)], [((2, 8), (1, 2))]),
    "logsumexp keepdim": (RUNS, lambda g: [g.logsumexp(t(g, 2, 5, 8), 1, True)], [((2, 1, 8), (8, 8, 1))]),
    "softmax_backward": (RUNS, lambda g: [g.softmax_backward(t(g, 2, 8), t(g, 2, 8, stride=(1, 2)), 1)], [((2, 8), (1, 2))]),
    "log_softmax_backward": (RUNS, lambda g: [g.log_softmax_backward(t(g, 2, 8), t(g, 2, 8), 1)], [((2, 8), (8, 1))]),
    "logsumexp_backward": (RUNS, lambda g: [g.logsumexp_backward(t(g, 2), t(g, 2, 8), t(g, 2, 1), 1)], [((2, 8), (8, 1))]),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_dims_and_strides(name):
    _, declare, wanted = ROWS[name]
    g = graph()
    made = declare(g)
    assert len(made) == len(wanted)
    g.validate()
    g.validate()
    assert [None if x is None else (tuple(x.get_dim()), tuple(x.get_stride())) for x in made] == wanted
    assert all(x is None or (x.get_is_virtual() and x.get_data_type() is F32) for x in made)
    g.build_operation_graph()


@pytest.mark.parametrize("name", ["layernorm", "batchnorm", "layernorm_backward", "genstats"])
def test_outputs_that_are_not_virtual_have_the_io_type(name):
    g = graph()
    made = ROWS[name][1](g)
    for x in made:
        x.set_output(True)
    g.validate()
    assert all(x.get_data_type() is F16 for x in made)


def test_dims_and_strides_of_the_user_stay():
    g = graph()
    x, s, m = t(g, 2, 5, 8), t(g, 1, 1, 8), t(g, 2, 5, 1)
    dx, dscale, dbias = g.layernorm_backward(x, x, s, m, m)
    dx.set_stride((40, 8, 1)), dscale.set_dim((1, 1, 8)), dbias.set_dim((8,)).set_stride((2,))
    y, mean, _ = g.layernorm(TRAINING, x, s, s, 1e-5)
    y.set_stride((1, 2, 10)), mean.set_stride((7, 1, 3))
    g.validate()
    assert (dx.get_stride(), dscale.get_dim(), dscale.get_stride(), dbias.get_stride()) == ([40, 8, 1], [1, 1, 8], [8, 1, 1], [2])
    assert (y.get_stride(), mean.get_dim(), mean.get_stride()) == ([1, 2, 10], [2, 5, 1], [7, 1, 3])


def test_phase_decides_what_there_is():
    for method, more in (("layernorm", 2), ("rmsnorm", 1), ("adalayernorm", 2), ("instancenorm", 2)):
        for phase in (INFERENCE, NOT_SET):
            g = graph()
            made = getattr(g, method)(phase, t(g, 2, 5, 8), t(g, 1, 5, 1), t(g, 1, 5, 1), 1e-5)
            assert made[1:] == [None] * more
            if phase is NOT_SET:
                assert json.loads(str(g))["nodes"][0]["forward_phase"] is None
                with pytest.raises(ValidationError, match="forward phase not set.*INFERENCE"):
                    g.validate()


# ----------------------------------------------------------------------------------------------------------------------------------------- errors
def failing(method, *dims, first=(), more=(1e-5,)):
    return lambda g: getattr(g, method)(*first, *(t(g, *d, name=n) for d, n in zip(dims, "xyzvw", strict=False)), *more)


TRAIN = {"first": (TRAINING,)}
# (what the page does: accepts it, or refuses it too; what declares it; the error's text)
ERRORS = {
    "layernorm scale of another extent": (OURS, failing("layernorm", (2, 8), (1, 7), (1, 7), **TRAIN),
                                          r"'y'.*scale does not fit.*\[2, 8\].*\[1, 7\]"),
    "layernorm bias of another extent": (OURS, failing("layernorm", (2, 8), (1, 8), (1, 4), **TRAIN), "'z'.*bias does not fit"),
    "layernorm scale of a larger rank": (OURS, failing("layernorm", (2, 8), (1, 1, 8), (1, 8), **TRAIN), "'y'.*scale does not fit"),
    "layernorm over nothing": (OURS, failing("layernorm", (2, 8), (1, 1), (1, 1), **TRAIN), r"no axis is normalized.*\[1, 1\]"),
    "layernorm over an empty axis": (OURS, failing("layernorm", (2, 0), (1, 0), (1, 0), **TRAIN), r"axis 1 has no elements.*\[2, 0\]"),
    "rmsnorm over an empty axis": (OURS, failing("rmsnorm", (2, 0), (1, 0), (1, 0), **TRAIN), "axis 1 has no elements"),
    "instancenorm channels": (OURS, failing("instancenorm", X4, (1, 5, 1, 1), C4, **TRAIN), r"'y'.*one for each channel: \[4, 6, 1, 1\]"),
    "instancenorm without space": (OURS, failing("instancenorm", (2, 8), (1, 8), (1, 8), **TRAIN), "rank >= 3, channels at axis 1"),
    "instancenorm over an empty axis": (OURS, failing("instancenorm", (2, 3, 0), (1, 3, 1), (1, 3, 1), **TRAIN), "axis 2 has no elements"),
    "groupnorm groups": (OURS, failing("groupnorm", X4, C4, C4, more=(1e-5, 4), **TRAIN), "divisor of the 6 channels, found 4"),
    "groupnorm no groups": (OURS, failing("groupnorm", X4, C4, C4, more=(1e-5, 0), **TRAIN), "divisor of the 6 channels"),
    "groupnorm_backward groups": (OURS, failing("groupnorm_backward", X4, X4, C4, (4, 4, 1, 1), (4, 4, 1, 1), more=()), "divisor of the 6 channels"),
    "batchnorm channels": (OURS, failing("batchnorm", X4, (1, 8, 1, 1), C4, more=(None, None, 1e-5, None)), r"one for each channel: \[1, 6, 1, 1\]"),
    "batchnorm scale of rank 1": (OURS, failing("batchnorm", X4, (6,), C4, more=(None, None, 1e-5, None)), "scale does not fit"),
    "batchnorm rank": (OURS, failing("batchnorm", (8,), (8,), (8,), more=(None, None, 1e-5, None)), "rank >= 2"),
    "batchnorm of nothing": (OURS, failing("batchnorm", (0, 6), (1, 6), (1, 6), more=(None, None, 1e-5, None)), "axis 0 has no elements"),
    "batchnorm without momentum": (SAME, failing("batchnorm", X4, C4, C4, C4, C4, more=(1e-5, None)), "running statistics without momentum"),
    "batchnorm with one statistic": (OURS, lambda g: g.batchnorm(t(g, *X4), t(g, *C4), t(g, *C4), t(g, *C4), None, 1e-5, 0.1),
                                     "without prev_running_var"),
    "batchnorm running channels": (OURS, failing("batchnorm", X4, C4, C4, (1, 5, 1, 1), C4, more=(1e-5, 0.1)),
                                   r"'v'.*prev_running_mean does not fit.*\[1, 6, 1, 1\]"),
    "batchnorm_inference channels": (OURS, failing("batchnorm_inference", X4, C4, C4, (1, 7, 1, 1), C4, more=()), "scale does not fit"),
    "epsilon of two": (OURS, failing("rmsnorm", (2, 8), (1, 8), (1, 8), (2,), more=(), **TRAIN), "epsilon is one number"),
    "layernorm_backward grad": (OURS, failing("layernorm_backward", (2, 7), (2, 8), (1, 8), (2, 1), (2, 1), more=()),
                                r"'x'.*dy does not fit.*\[2, 8\]"),
    "layernorm_backward statistics": (OURS, failing("layernorm_backward", (2, 8), (2, 8), (1, 8), (1, 1), (2, 1), more=()),
                                      r"'v'.*mean does not fit.*\[2, 1\]"),
    "batchnorm_backward statistics": (OURS, failing("batchnorm_backward", X4, X4, C4, C4, I4, more=()), "inv_variance does not fit"),
    "instancenorm_backward without statistics": (SAME, failing("instancenorm_backward", X4, X4, C4, more=()), "needs input INV_VARIANCE"),
    "rmsnorm_backward over an empty axis": (OURS, failing("rmsnorm_backward", (2, 0), (2, 0), (1, 0), (2, 1), more=(False,)),
                                            "axis 1 has no elements"),
    "genstats rank": (OURS, failing("genstats", (8,), more=()), "rank >= 2"),
    "bn_finalize dims": (OURS, failing("bn_finalize", C4, C4, (1, 5, 1, 1), C4, more=(1e-5, 8)), "scale does not fit"),
    "dbn_weight channels": (OURS, failing("dbn_weight", X4, X4, C4, (1, 5, 1, 1), C4, more=()), "inv_variance does not fit"),
    "softmax axis": (OURS, failing("softmax", (2, 8), more=(2,)), r"axis is out of range.*-2\.\.1"),
    "softmax of rank 0": (OURS, failing("softmax", (), more=(0,)), "at least one dim"),
    "softmax_backward dims": (OURS, failing("softmax_backward", (2, 7), (2, 8), more=(1,)), "dy does not fit"),
    "logsumexp_backward dims": (OURS, failing("logsumexp_backward", (8,), (2, 8), (2,), more=(1,)), r"dy does not fit.*\[2, 1\] or \[2\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    _, declare, text = ERRORS[name]
    g = graph()
    declare(g)
    with pytest.raises(ValidationError, match=text):
        g.validate()


@pytest.mark.parametrize(("port", "dim"), [("DSCALE", (1, 1, 1)), ("DBIAS", (1, 1, 7)), ("DSCALE", (1, 1, 1, 8)), ("DSCALE", (2, 1))])
def test_gradients_that_scale_cannot_have(port, dim):
    g = graph()
    x, s, m = t(g, 2, 5, 8), t(g, 1, 1, 8), t(g, 2, 5, 1)
    g.layernorm_backward(x, x, s, m, m)[("DX", "DSCALE", "DBIAS").index(port)].set_dim(dim)
    with pytest.raises(ValidationError, match=f"{port.lower()} cannot have these dims"):
        g.validate()


def test_statistics_of_other_dims_are_refused():
    g = graph()
    g.layernorm(TRAINING, t(g, 2, 8), t(g, 1, 8), t(g, 1, 8), 1e-5)[1].set_dim((1, 1))
    with pytest.raises(ValidationError, match=r"contradict.*\[2, 1\]"):
        g.validate()


def test_kinds_of_arguments():
    g = graph()
    x, s = t(g, 2, 8), t(g, 1, 8)
    for call in (
        lambda: g.layernorm(1, x, s, s, 1e-5),
        lambda: g.layernorm(TRAINING, x, s, None, 1e-5),
        lambda: g.layernorm(TRAINING, x, 1.0, s, 1e-5),
        lambda: g.layernorm(TRAINING, None, s, s, 1e-5),
        lambda: g.rmsnorm(TRAINING, x, s),
        lambda: g.rmsnorm_backward(x, x, s, s),
        lambda: g.layernorm_backward(x, x, s, None, s),
        lambda: g.batchnorm(x, s, s, s, s, None, 0.1),
        lambda: g.batchnorm(x, s, s, s, s, 1e-5, 0.1, peer_stats=3),
        lambda: g.groupnorm(TRAINING, x, s, s, 1e-5, 2.5),
        lambda: g.softmax(x, 1.5),
        lambda: g.softmax(x),
    ):
        with pytest.raises(TypeError):
            call()
    with pytest.raises(KindError, match="argument 'input'.*graph tensor"):
        g.layernorm(TRAINING, None, s, s, 1e-5)
    with pytest.raises(NotSupportedError, match="one device"):
        g.batchnorm(x, s, s, s, s, 1e-5, 0.1, peer_stats=[s])


# ------------------------------------------------------------------------------------------------------------------------ names, text, signatures
NAMES = {
    "layernorm": "Y MEAN INV_VARIANCE",
    "rmsnorm": "Y INV_VARIANCE",
    "batchnorm": "Y MEAN INV_VARIANCE NEXT_RUNNING_MEAN NEXT_RUNNING_VAR",
    "layernorm_backward": "DX DSCALE DBIAS",
    "rmsnorm_backward": "DX Dscale Dbias",
    "batchnorm_inference": "Y",
    "bn_finalize": "EQ_SCALE EQ_BIAS MEAN INV_VARIANCE",
    "softmax": "Y",
    "softmax_backward": "DX",
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_outputs(name):
    g = graph()
    assert [x.get_name() for x in ROWS[name][1](g) if x is not None] == [f"::{n}" for n in NAMES[name].split()]


def test_names_with_a_node_name():
    g = graph()
    x, s, m = t(g, 2, 5, 8), t(g, 1, 1, 8), t(g, 2, 5, 1)
    assert [y.get_name() for y in g.genstats(x, name="gs")] == ["gs_sum_output", "gs_sq_sum_output"]
    assert [y.get_name() for y in g.layernorm(TRAINING, x, s, s, 1e-5, name="LN")] == ["LN::Y", "LN::MEAN", "LN::INV_VARIANCE"]
    assert [y.get_name() for y in g.rmsnorm_backward(x, x, s, m, True, name="b")] == ["b::DX", "b::Dscale", "b::Dbias"]


CDT = "compute_data_type=data_type.NOT_SET name="
SIGNATURES = {
    "layernorm": f"norm_forward_phase input scale bias epsilon {CDT}",
    "layernorm_backward": f"grad input scale mean inv_variance {CDT}",
    "adalayernorm": f"norm_forward_phase input scale bias=None epsilon=None {CDT}",
    "adalayernorm_backward": f"grad input scale mean inv_variance {CDT}",
    "rmsnorm": f"norm_forward_phase input scale bias=None epsilon=None {CDT}",
    "rmsnorm_backward": f"grad input scale inv_variance has_dbias {CDT}",
    "instancenorm": f"norm_forward_phase input scale bias epsilon {CDT}",
    "instancenorm_backward": f"grad input scale mean=None inv_variance=None {CDT}",
    "batchnorm": f"input scale bias in_running_mean in_running_var epsilon momentum peer_stats=[] {CDT}",
    "batchnorm_backward": f"grad input scale mean inv_variance peer_stats=[] {CDT}",
    "batchnorm_inference": f"input mean inv_variance scale bias {CDT}",
    "genstats": f"input {CDT}",
    "groupnorm": f"norm_forward_phase input scale bias epsilon num_groups {CDT}",
    "groupnorm_backward": f"grad input scale mean inv_variance {CDT}",
    "bn_finalize": f"sum sq_sum scale bias epsilon accum_count in_running_mean=None in_running_var=None momentum=None {CDT}",
    "dbn_weight": f"grad input mean inv_variance scale {CDT}",
    "softmax": f"input axis {CDT}",
    "log_softmax": f"input axis {CDT}",
    "logsumexp": f"input axis keepdim=False {CDT}",
    "softmax_backward": f"grad output axis {CDT}",
    "log_softmax_backward": f"grad output axis {CDT}",
    "logsumexp_backward": f"grad input output axis {CDT}",
}


@pytest.mark.parametrize("method", SIGNATURES)
def test_signature(method):
    function = getattr(graphdnn.pygraph, method)
    parameters = list(inspect.signature(function).parameters.values())[1:]
    assert " ".join(p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters) == SIGNATURES[method]
    assert function.__doc__ and all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


TEXT = {
    "layernorm": ("LAYER_NORM", "X SCALE BIAS EPSILON", "Y MEAN INV_VARIANCE", {"forward_phase": "TRAINING"}),
    "rmsnorm": ("RMS_NORM", "X SCALE BIAS EPSILON", "Y INV_VARIANCE", {"forward_phase": "TRAINING"}),
    "adalayernorm": ("ADA_LAYER_NORM", "X SCALE BIAS EPSILON", "Y MEAN INV_VARIANCE", {"forward_phase": "TRAINING"}),
    "instancenorm": ("INSTANCE_NORM", "X SCALE BIAS EPSILON", "Y MEAN INV_VARIANCE", {"forward_phase": "TRAINING"}),
    "batchnorm": ("BATCHNORM", "X SCALE BIAS EPSILON PREV_RUNNING_MEAN PREV_RUNNING_VAR MOMENTUM",
                  "Y MEAN INV_VARIANCE NEXT_RUNNING_MEAN NEXT_RUNNING_VAR", {"peer_stats": []}),
    "batchnorm_inference": ("BATCHNORM_INFERENCE", "X SCALE BIAS MEAN INV_VARIANCE", "Y", {}),
    "batchnorm_backward": ("DBN", "DY X SCALE MEAN INV_VARIANCE", "DX DSCALE DBIAS", {"peer_stats": []}),
    "layernorm_backward": ("LAYER_NORM_BPROP", "DY X SCALE MEAN INV_VARIANCE", "DX DSCALE DBIAS", {}),
    "adalayernorm_backward": ("ADA_LAYER_NORM_BPROP", "DY X SCALE MEAN INV_VARIANCE", "DX DSCALE DBIAS", {}),
    "instancenorm_backward": ("INSTANCE_NORM_BPROP", "DY X SCALE MEAN INV_VARIANCE", "DX DSCALE DBIAS", {}),
    "rmsnorm_backward": ("RMS_NORM_BPROP", "DY X SCALE INV_VARIANCE", "DX DSCALE DBIAS", {}),
    "rmsnorm_backward without bias": ("RMS_NORM_BPROP", "DY X SCALE INV_VARIANCE", "DX DSCALE", {}),
    "genstats": ("GENSTATS", "X", "SUM SQ_SUM", {}),
    "groupnorm": ("GROUP_NORM", "X SCALE BIAS EPSILON", "Y MEAN INV_VARIANCE", {"forward_phase": "TRAINING", "num_groups": 3}),
    "logsumexp": ("LOGSUMEXP", "X", "Y", {"axis": 1, "keepdim": False}),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXT)
def test_text(name):
    tag, inputs, outputs, attrs = TEXT[name]
    g = graph()
    ROWS[name][1](g)
    (node,) = json.loads(str(g))["nodes"]
    assert (node.pop("tag"), set(node.pop("inputs")), set(node.pop("outputs"))) == (tag, set(inputs.split()), set(outputs.split()))
    assert {k: v for k, v in node.items() if k not in ("name", "compute_data_type")} == attrs and "compute_data_type" in node


@pytest.mark.parametrize("name", ROWS)
def test_text_comes_back(name):
    g, copy = graph(), graphdnn.pygraph(device="cpu")
    ROWS[name][1](g)
    g.build_operation_graph()
    copy.deserialize(str(g))
    copy.build_operation_graph()
    assert copy._opgraph.key == g._opgraph.key


def test_every_row_says_how_it_compares():
    assert {kind for kind, *_ in (*ROWS.values(), *ERRORS.values())} == {SAME, RUNS, OURS}
