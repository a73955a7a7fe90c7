"""Every CUDA template compiles with no GPU, for sm_80 and sm_90a; in float32 graphs SASS has no double precision, no local memory, no spills."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import graphdnn
from graphdnn import data_type
from graphdnn.opspecs.pointwise import POINTWISE
from graphdnn.opspecs.reduction import REDUCTION
from tests.helpers import built

D = data_type
F32 = D.FLOAT
ARCHS = ("sm_80", "sm_90")
TEMPLATES = Path(__file__).resolve().parents[2] / "codegen_templates" / "cuda"
EXEMPT = {"SIN": "argument reduction of large angles", "COS": "argument reduction of large angles", "TAN": "argument reduction of large angles"}
"""Rows whose float32 form may hold a double-precision instruction or local memory, and why."""
DOUBLE = re.compile(r"\b(?:D(?:ADD|MUL|FMA|SETP|MNMX|MMA)|\w+\.(?:\w+\.)*F64|MUFU\.\w*64H?)\b")
LOCAL = re.compile(r"\b(?:LDL|STL)\b")
ROWS = sorted(set(POINTWISE) - set(EXEMPT))
CHUNKS = [ROWS[i : i + 6] for i in range(0, len(ROWS), 6)]


def tensor(g, dim, dtype=F32, name="", **kwargs):
    return g.tensor(dim=dim, data_type=dtype, name=name, **({"layout": "row"} | kwargs))


def out(t, dtype=F32):
    return t.set_output(True).set_data_type(dtype)


def call(g, mode, inputs):
    row = POINTWISE[mode]
    return getattr(g, row.method)(*inputs[: len(row.args)], **({"axis": 1} if mode == "GEN_INDEX" else {}))


def rows(modes):
    def build(g):
        inputs = [tensor(g, (64, 100)) for _ in range(3)]
        for mode in modes:
            out(call(g, mode, inputs))

    return build


def reductions(dim, reduced, dtype=F32, modes=tuple(REDUCTION), **kwargs):
    def build(g):
        x = tensor(g, dim, dtype, **kwargs)
        for mode in modes:
            out(g.reduction(x, graphdnn.reduction_mode[mode]).set_dim(reduced))

    return build


def matmul(left=F32, right=F32, result=F32, layouts=("row", "row"), mnk=(200, 136, 72), epilogue=None, prologue=None, batch=2):
    def build(g):
        m, n, k = mnk
        a = tensor(g, (batch, m, k), left, layout=layouts[0])
        b = tensor(g, (batch, k, n), right, layout=layouts[1])
        a = prologue(g, a) if prologue else a
        y = g.matmul(a, b)
        out(epilogue(g, y) if epilogue else y, result)

    return build


def fp8_training(g, y):
    scale = g.tensor(dim=[1, 1, 1], stride=[1, 1, 1], is_pass_by_value=True, data_type=F32)
    y = g.gelu(g.add(g.mul(y, scale), tensor(g, (1, 1, 136))))
    out(g.reduction(y, graphdnn.reduction_mode.AMAX).set_dim([1, 1, 1]))
    return y


def column_sums(g, y):
    out(g.reduction(y, graphdnn.reduction_mode.ADD).set_dim([1, 1, 136]))
    return g.relu(y)


def row_sums(g, y):
    out(g.reduction(y, graphdnn.reduction_mode.ADD).set_dim([2, 200, 1]))
    out(g.reduction(y, graphdnn.reduction_mode.AMAX).set_dim([1, 200, 1]))
    return g.relu(y)


def statistics(g):
    """Sums of channels of a convolution."""
    x, w = tensor(g, (2, 32, 20, 20)), tensor(g, (48, 32, 3, 3))
    y = g.relu(g.conv_fprop(x, w, padding=[1, 1], stride=[1, 1], dilation=[1, 1], compute_data_type=F32)).set_data_type(F32)
    for t in g.genstats(y, compute_data_type=F32):
        out(t)
    out(y).set_dim((2, 48, 20, 20))


def heads_apart(g, y):
    """A stack of matrices with 136 columns as heads of 8, one behind the other."""
    return g.transpose(g.reshape(y, reshape_mode=graphdnn.reshape_mode.LOGICAL).set_dim([2, 200, 17, 8]), [0, 2, 1, 3])


def conv(dtype=F32, kind="fprop", layout="row", stride=1, groups=1, filters=48):
    def build(g):
        p = 20 // stride
        x, w, dy = (tensor(g, dim, dtype, layout=layout) for dim in ((2, 32, 20, 20), (filters, 32 // groups, 3, 3), (2, filters, p, p)))
        more = {"padding": [1, 1], "stride": [stride] * 2, "dilation": [1, 1], "compute_data_type": F32}
        if kind == "fprop":
            y = g.bias(g.conv_fprop(g.relu(x), w, **more), tensor(g, (1, filters, 1, 1)))
            out(g.relu(y), dtype).set_dim((2, filters, p, p)).set_stride(dy.get_stride())
        elif kind == "dgrad":
            out(g.conv_dgrad(g.sigmoid(dy), w, **more).set_dim((2, 32, 20, 20)), dtype)
        else:
            out(g.conv_wgrad(x, dy, **more).set_dim((filters, 32 // groups, 3, 3)), dtype)

    return build


def movement(g):
    x = tensor(g, (6, 8, 40))
    y = g.transpose(g.slice(x, [slice(1, 5), slice(None), slice(0, 40, 2)]), [2, 0, 1]).set_data_type(F32)
    out(g.reshape(g.relu(y)).set_dim([8, 80]).set_stride([80, 1]))
    out(g.concatenate([x, tensor(g, (6, 8, 3))], axis=2))


def mxfp8(g):
    y, scale = g.block_scale_quantize(g.gelu(tensor(g, (64, 1024), D.BFLOAT16)), 32)
    out(y, D.FP8_E4M3)
    out(scale, D.FP8_E8M0)


def nvfp4(g):
    a, b = g.tensor(dim=(2, 64, 128), layout="row", data_type=D.FP4_E2M1), g.tensor(dim=(2, 128, 96), layout="column", data_type=D.FP4_E2M1)
    order = graphdnn.tensor_reordering.F8_128x4
    sa, sb = (g.tensor(dim=d, layout="row", data_type=D.FP8_E4M3, reordering_type=order) for d in ((2, 128, 8), (2, 8, 128)))
    out(g.matmul(g.block_scale_dequantize(a, sa, [1, 16]), g.block_scale_dequantize(b, sb, [16, 1])), D.BFLOAT16)


def int8_chain(g):
    """int8 weights and activations, scale, bias and activation, back to int8."""
    y = g.matmul(tensor(g, (2, 200, 72), D.INT8), tensor(g, (2, 72, 136), D.INT8), compute_data_type=D.INT32).set_data_type(D.INT32)
    y = g.mul(y, tensor(g, (1, 1, 136)), compute_data_type=F32).set_data_type(F32)
    out(g.relu(g.add(y, tensor(g, (1, 1, 136)), compute_data_type=F32), compute_data_type=F32), D.INT8)


def moe(mode):
    """And for NONE the gradient of the weights."""

    def build(g):
        token, dy = tensor(g, (1, 300, 72), D.BFLOAT16), tensor(g, (1, 300, 136), D.BFLOAT16)
        weight = g.tensor(dim=(8, 72, 136), layout="column", data_type=D.BFLOAT16)
        offsets, index = tensor(g, (8, 1, 1), D.INT32), tensor(g, (1, 300, 1), D.INT64)
        plain = mode is graphdnn.moe_grouped_matmul_mode.NONE
        out(g.gelu(g.moe_grouped_matmul(token, weight, offsets, None if plain else index, mode=mode)), D.BFLOAT16)
        if plain:
            out(g.moe_grouped_matmul_bwd(dy, token, offsets))

    return build


def attention(dtype=F32, q=(2, 4, 200, 64), kv=(2, 2, 300, 64), d_v=64, stats=True, **kwargs):
    def build(g):
        more = {name: make(g) if callable(make) else make for name, make in kwargs.items()}
        values = (*kv[:3], d_v)
        o, s = g.sdpa(tensor(g, q, dtype), tensor(g, kv, dtype), tensor(g, values, dtype), generate_stats=stats, compute_data_type=F32, **more)
        out(o, dtype).set_dim((*q[:3], d_v)).set_stride((q[1] * q[2] * d_v, q[2] * d_v, d_v, 1))
        if stats:
            out(s)

    return build


def attention_gradient(dtype=F32, q=(2, 4, 200, 64), kv=(2, 2, 300, 64), compute=F32, bias=(), sink=False, **kwargs):
    def build(g):
        more = {name: make(g) if callable(make) else make for name, make in kwargs.items()}
        if bias:
            more |= {"bias": tensor(g, bias, dtype), "dBias": tensor(g, bias, dtype)}
        if sink:
            more |= {n: tensor(g, (1, q[1], 1, 1)) for n in ("sink_token", "dSink_token")}
        k, v = tensor(g, kv, dtype), tensor(g, kv, dtype)
        given = tensor(g, q, dtype), k, v, tensor(g, q, dtype), tensor(g, q, dtype), tensor(g, (*q[:3], 1), compute)
        for t, like in zip(g.sdpa_backward(*given, compute_data_type=compute, **more), (q, kv, kv), strict=True):
            out(t, dtype).set_dim(like).set_stride(k.get_stride() if like == kv else given[0].get_stride())

    return build


def random_numbers(g):
    return 0.25, *(g.tensor(dim=(1, 1, 1, 1), stride=(1, 1, 1, 1), data_type=D.INT64) for _ in range(2))


def lengths(g):
    return g.tensor(dim=(2, 1, 1, 1), stride=(1, 1, 1, 1), data_type=D.INT32)


GRAPHS = {
    **{f"pointwise {c[0]}..{c[-1]}": rows(c) for c in CHUNKS},
    "pointwise bf16 vectors": lambda g: out(g.relu(g.add(tensor(g, (4096, 4096), D.BFLOAT16), tensor(g, (4096, 4096), D.BFLOAT16))), D.BFLOAT16),
    "pointwise fp8 in, fp16 out": lambda g: out(g.gelu(tensor(g, (64, 128), D.FP8_E4M3)), D.HALF),
    "pointwise broadcast and permuted": lambda g: out(g.mul(tensor(g, (8, 16, 32), layout="channels_last"), tensor(g, (1, 16, 1)))),
    "pointwise far strides": lambda g: out(g.neg(g.tensor(dim=(2, 64), stride=(2**32, 1), data_type=F32))).set_dim((2, 64)).set_stride((64, 1)),
    "reduction rows": reductions((64, 1024), (64, 1)),
    "reduction columns": reductions((1024, 64), (1, 64), modes=("ADD", "MAX", "NORM2")),
    "reduction middle, channels last": reductions((8, 32, 20), (8, 1, 20), modes=("AVG", "AMAX"), layout="channels_last"),
    "reduction split": reductions((2, 1_000_000), (2, 1), modes=("ADD", "AMAX")),
    "reduction bf16": reductions((64, 1000), (64, 1), D.BFLOAT16, modes=("ADD", "MUL")),
    "softmax by hand": lambda g: softmax(g, tensor(g, (64, 1000))),
    "matmul": matmul(),
    "matmul column": matmul(layouts=("column", "column")),
    "matmul bf16 fp8 training": matmul(D.BFLOAT16, D.BFLOAT16, D.FP8_E4M3, epilogue=fp8_training),
    "matmul column sums": matmul(epilogue=column_sums),
    "matmul row sums": matmul(epilogue=row_sums),
    "conv statistics": statistics,
    "matmul heads apart": matmul(epilogue=heads_apart),
    "matmul bf16 heads apart": matmul(D.BFLOAT16, D.BFLOAT16, D.BFLOAT16, epilogue=heads_apart),
    "matmul prologue": matmul(prologue=lambda g, a: g.relu(g.mul(a, 0.5))),
    "matmul tiny": matmul(mnk=(3, 5, 7)),
    "conv": conv(),
    "conv channels last, bf16, strided": conv(D.BFLOAT16, layout="channels_last", stride=2),
    "conv data gradient, strided, prologue": conv(kind="dgrad", stride=2),
    "conv weight gradient, grouped": conv(kind="wgrad", groups=2),
    "conv, depthwise": conv(groups=32, filters=64),
    "conv, Winograd": conv(),
    "conv, Winograd, data gradient": conv(kind="dgrad", layout="channels_last"),
    "conv, Fourier": conv(layout="channels_last"),
    "movement": movement,
    "int8 chain": int8_chain,
    "moe": moe(graphdnn.moe_grouped_matmul_mode.NONE),
    "moe scatter": moe(graphdnn.moe_grouped_matmul_mode.SCATTER),
    "attention": attention(attn_scale=0.125, use_causal_mask=True),
    "attention bf16, biased, dropout": attention(
        D.BFLOAT16, d_v=128, attn_scale=0.125, bias=lambda g: tensor(g, (1, 4, 200, 300), D.BFLOAT16), dropout=random_numbers
    ),
    "attention of one row, any head dim": attention(D.HALF, (2, 4, 1, 300), (2, 1, 300, 300), 33, False, use_alibi_mask=True, use_causal_mask=True),
    "attention gradient": attention_gradient(attn_scale=0.125, use_causal_mask=True),
    "attention gradient bf16, biased, dropout, sink": attention_gradient(
        D.BFLOAT16,
        (2, 4, 200, 80),
        (2, 2, 300, 80),
        bias=(1, 4, 200, 300),
        sink=True,
        dropout=random_numbers,
        use_padding_mask=True,
        seq_len_q=lengths,
        seq_len_kv=lengths,
        diagonal_band_left_bound=64,
    ),
    "attention with lengths": attention(use_padding_mask=True, seq_len_q=lengths, seq_len_kv=lengths, diagonal_band_left_bound=64),
    "mxfp8 quantize": mxfp8,
    "nvfp4 matmul": nvfp4,
    "dropout": lambda g: out(g.mul(tensor(g, (64, 1024)), g.rng("BERNOULLI", 5, 2**40, dim=(64, 1024), probability=0.5))),
    "normal numbers in a matmul": matmul(epilogue=lambda g, y: g.add(y, g.rng("NORMAL", 1, 2, dim=(2, 200, 136)))),
}
BARRED = {"conv, Winograd": ("eng5", "eng8"), "conv, Winograd, data gradient": ("eng5", "eng8"), "conv, Fourier": ("eng5", "eng7")}
"""Engines that some of these are not for."""
OTHER = {
    "double pointwise": lambda g: out(g.gelu(tensor(g, (64, 100), D.DOUBLE)), D.DOUBLE),
    "double attention gradient": attention_gradient(D.DOUBLE, (1, 2, 70, 24), (1, 2, 90, 24), D.DOUBLE, use_causal_mask=True),
    "double matmul": matmul(D.DOUBLE, D.DOUBLE, D.DOUBLE),
    "int8 matmul": matmul(D.INT8, D.INT8, D.INT32),
    "int64 matmul": matmul(D.INT64, D.INT64, D.INT64),
    "int32 reduction": reductions((64, 100), (64, 1), D.INT32, modes=("ADD", "MAX", "AVG")),
    "double reduction": reductions((64, 100), (64, 1), D.DOUBLE, modes=("ADD", "NORM2")),
    "sin cos tan": rows(sorted(EXEMPT)),
}
"""Not float32: they must compile; what their SASS holds is their own business, spills excepted."""


def softmax(g, x):
    m = g.reduction(x, graphdnn.reduction_mode.MAX).set_dim([64, 1])
    e = g.exp(g.sub(x, m))
    out(g.div(e, g.reduction(e, graphdnn.reduction_mode.ADD).set_dim([64, 1])))


def compiled(build, arch, *, every=False, barred=()):
    """The chosen plan, or all plans, of a graph built for ``arch``."""
    g = graphdnn.pygraph(device=arch, compute_data_type=D.NOT_SET)
    build(g)
    built(g, graphdnn.build_plan_policy.ALL if every else None, barred)
    return g


def plan_of(name, arch):
    return compiled(GRAPHS.get(name) or OTHER[name], arch, barred=BARRED.get(name, ())).plan


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", GRAPHS)
def test_float32_graphs_compile_to_clean_machine_code(name, arch):
    plan = plan_of(name, arch)
    assert plan.kernels, "something was compiled"
    assert all(k.binary.code.startswith(b"\x7fELF") for k in plan.kernels)
    sass = plan.sass
    assert sass.count("EXIT") >= len(plan.kernels), "the disassembly has every kernel"
    doubles = [line.strip() for line in sass.splitlines() if DOUBLE.search(line)]
    assert not doubles, f"double precision in a float32 graph: {doubles[:4]}"
    local = [line.strip() for line in sass.splitlines() if LOCAL.search(line)]
    assert not local, f"local memory: {local[:4]}"
    spilled = {r["name"]: r["spill_bytes"] for r in plan.resources if r["spill_bytes"]}
    assert not spilled, f"bytes of spills: {spilled}"


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", OTHER)
def test_other_graphs_compile_without_spills(name, arch):
    plan = plan_of(name, arch)
    assert all(r["registers"] > 0 for r in plan.resources)
    spilled = {r["name"]: r["spill_bytes"] for r in plan.resources if r["spill_bytes"]}
    assert not spilled, f"bytes of spills: {spilled}"


@pytest.mark.parametrize("mode", EXEMPT)
def test_exempt_rows_need_their_exemption(mode):
    """The list of exemptions shrinks when a row no longer needs one."""
    plan = compiled(rows([mode]), "sm_90").plan
    assert DOUBLE.search(plan.sass) or LOCAL.search(plan.sass), f"{mode} is clean now: take it off the list"


CANDIDATES = {
    "matmul": GRAPHS["matmul"],
    "reduction": reductions((64, 1024), (64, 1), modes=("ADD", "AMAX")),
    "pointwise": GRAPHS["pointwise bf16 vectors"],
    "fp8 training": GRAPHS["matmul bf16 fp8 training"],
    "reduction split": GRAPHS["reduction split"],
    "reduction of nine modes": GRAPHS["reduction rows"],
}
QUICK = (("matmul", "sm_80"), ("reduction", "sm_90"), ("pointwise", "sm_90"))
"""What every test run does; the rest takes minutes."""
EVERY = [pytest.param(n, a, marks=() if (n, a) in QUICK else pytest.mark.slow) for n in CANDIDATES for a in ARCHS]


@pytest.mark.parametrize(("name", "arch"), EVERY)
def test_every_candidate_is_clean(name, arch):
    """All engines and knob sets, not only the one that the heuristic puts first."""
    g = compiled(CANDIDATES[name], arch, every=True)
    plans = [p for p in g._plans if p.built]
    assert len(plans) == g.get_execution_plan_count(), f"some candidates did not build: {g._plans.rejections}"
    for plan in plans:
        assert not any(r["spill_bytes"] for r in plan.resources), plan.name
        assert not LOCAL.search(plan.sass), plan.name
        assert not DOUBLE.search(plan.sass), plan.name


def test_no_template_is_left_out():
    """Each file under codegen_templates/cuda that is a kernel (not a file of macros) is used by a graph above."""
    used: set[str] = set()
    for build in (*GRAPHS.values(), *OTHER.values()):
        g = graphdnn.pygraph(device="sm_90", compute_data_type=D.NOT_SET)
        build(g)
        g.validate()
        g.build_operation_graph()
        g.create_execution_plans([graphdnn.heur_mode.A, graphdnn.heur_mode.FALLBACK])
        used.update(spec.template for p in g._plans for spec in p.recipe.kernels)
    kernels = {f"cuda/{p.name}" for p in TEMPLATES.glob("*.j2") if re.search(r"^\s*def \{\{", p.read_text(), re.M)}
    assert kernels, "templates were found"
    assert kernels <= used, f"no graph uses {sorted(kernels - used)}"
