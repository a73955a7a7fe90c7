"""B2 B3 B4: offsets beyond 2^31, empty tensors, every rank."""

from __future__ import annotations

import math

import numpy as np
import pytest

import graphdnn
from graphdnn import data_type
from tests.helpers import built, check_graph, given

F32, U8, I32 = data_type.FLOAT, data_type.UINT8, data_type.INT32
FLOAT = {"io_data_type": F32, "compute_data_type": F32}
FAR = 2**31 + 12_345


def _sparse(count: int) -> np.ndarray:
    """``count`` bytes of which only touched pages take memory."""
    return np.zeros(count, np.uint8)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cudasim", marks=pytest.mark.sim)])
def test_B2_view_whose_offsets_pass_2_to_31(device):
    """Two rows FAR bytes apart, read and written: an offset that wraps would leave the block."""
    g = graphdnn.pygraph(device=device)
    x = g.tensor(dim=[2, 40], stride=[FAR, 1], data_type=U8, name="x")
    y = g.add(x, x).set_name("y").set_output(True).set_data_type(U8).set_dim([2, 40]).set_stride([FAR, 1])
    built(g)
    source, target = _sparse(FAR + 64), _sparse(FAR + 64)
    values = np.arange(80, dtype=np.uint8).reshape(2, 40)
    source[:40], source[FAR : FAR + 40] = values
    g.execute({x: source.ctypes.data, y: target.ctypes.data}, _workspace(g))
    np.testing.assert_array_equal([target[:40], target[FAR : FAR + 40]], values * 2)
    assert not target[40:8192].any() and not target[FAR - 4096 : FAR].any()


def _workspace(g) -> int:
    _workspace.kept = np.empty(max(g.get_workspace_size(), 1) + 256, np.uint8)
    return -(-_workspace.kept.ctypes.data // 256) * 256


@pytest.mark.parametrize("device", ["cpu", pytest.param("cudasim", marks=pytest.mark.sim)])
@pytest.mark.parametrize("op", ["reduction", "matmul"])
def test_B2_far_rows_in_other_ops(device, op):
    g = graphdnn.pygraph(device=device, compute_data_type=I32)
    x = g.tensor(dim=[2, 3], stride=[FAR, 1], data_type=data_type.INT8, name="x")
    if op == "matmul":
        b = g.tensor(dim=[3, 2], stride=[1, FAR], data_type=data_type.INT8, name="b")
        y = g.matmul(x, b)
    else:
        y = g.reduction(x, graphdnn.reduction_mode.ADD).set_dim([2, 1])
    y.set_name("y").set_output(True).set_data_type(I32)
    built(g)
    memory = _sparse(FAR + 64).view(np.int8)
    rows = np.array([[1, -2, 3], [40, 50, -60]])
    memory[:3], memory[FAR : FAR + 3] = rows
    out = np.full((2, 2) if op == "matmul" else (2, 1), -1, np.int32)
    pack = {x: memory.ctypes.data, y: out} | ({b: memory.ctypes.data} if op == "matmul" else {})
    g.execute(pack, _workspace(g))
    np.testing.assert_array_equal(out, rows @ rows.T if op == "matmul" else rows.sum(1, keepdims=True))


@pytest.mark.parametrize(("stride", "wide"), [(80, False), (2**30, False), (2**32, True), (2**33, True)])
def test_B2_index_width_follows_the_largest_offset(stride, wide):
    """64-bit index arithmetic only where an offset needs it."""
    g = graphdnn.pygraph(device="sm_90")
    x = g.tensor(dim=[2, 77], stride=[stride, 1], data_type=U8)
    g.neg(x).set_output(True).set_data_type(U8).set_dim([2, 77]).set_stride([77, 1])
    built(g)
    text = g.plan.source
    assert ("uint32(cuda.blockIdx.x)" in text) is not wide, text
    assert ("int64(cuda.blockIdx.x)" in text) is wide, text


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["neg", "reduction"])
def test_B2_more_than_2_to_31_elements(op):
    import torch

    n = 2**31 + 64
    g = graphdnn.pygraph(device="cuda:0")
    x = g.tensor(dim=[n], stride=[1], data_type=U8, name="x")
    y = g.neg(x) if op == "neg" else g.reduction(x, graphdnn.reduction_mode.ADD, compute_data_type=data_type.INT64).set_dim([1])
    y.set_name("y").set_output(True).set_data_type(U8 if op == "neg" else data_type.INT64)
    built(g)
    source = torch.randint(0, 256, (n,), dtype=torch.uint8, device="cuda:0")
    target = torch.zeros(n if op == "neg" else 1, dtype=torch.uint8 if op == "neg" else torch.int64, device="cuda:0")
    g.execute({x: source, y: target}, torch.empty(max(g.get_workspace_size(), 1), dtype=torch.uint8, device="cuda:0"))
    torch.cuda.synchronize()
    if op == "neg":
        assert all(torch.equal(t, (-s.to(torch.int16)).to(torch.uint8)) for s, t in zip(source.split(2**28), target.split(2**28), strict=True))
    else:
        assert int(target) == sum(int(s.sum(dtype=torch.int64)) for s in source.split(2**28))


@pytest.mark.parametrize("dim", [(0,), (0, 5), (4, 0), (3, 0, 2)])
def test_B3_pointwise_on_nothing(device, dim):
    def build(g):
        x = g.tensor(dim=dim, layout="row", data_type=F32, name="x")
        g.relu(g.add(x, 1.0)).set_name("y").set_output(True)

    assert check_graph(build, device, graph=FLOAT).outputs["y"].shape == dim


@pytest.mark.parametrize(
    ("mode", "want"),
    [("ADD", 0), ("MUL", 1), ("MAX", -math.inf), ("MIN", math.inf), ("AVG", math.nan), ("NORM1", 0), ("NORM2", 0), ("MUL_NO_ZEROS", 1)],
)
def test_B3_reduction_of_nothing_gives_the_identity(device, mode, want):
    def build(g):
        x = g.tensor(dim=[3, 0, 2], layout="row", data_type=F32, name="x")
        g.reduction(x, graphdnn.reduction_mode[mode]).set_dim([3, 1, 2]).set_name("y").set_output(True)

    got = check_graph(build, device, graph=FLOAT).outputs["y"]
    np.testing.assert_array_equal(got, np.full((3, 1, 2), want))


@pytest.mark.parametrize("mode", ["MAX", "MIN", "AVG"])
def test_B3_integer_reduction_without_identity_is_an_error(mode):
    """Integers have no infinity and no NaN."""
    g = graphdnn.pygraph(device="cpu")
    x = g.tensor(dim=[3, 0], layout="row", data_type=I32, name="x")
    g.reduction(x, graphdnn.reduction_mode[mode], name="red").set_dim([3, 1]).set_output(True).set_data_type(I32)
    with pytest.raises(graphdnn.GraphError, match="red"):
        built(g)


@pytest.mark.parametrize(("m", "n", "k"), [(3, 5, 0), (0, 5, 7), (3, 0, 7), (0, 0, 0)])
@pytest.mark.parametrize("bias", [False, True])
def test_B3_matmul_with_an_empty_extent(device, m, n, k, bias):
    def build(g):
        a = g.tensor(dim=[2, m, k], layout="row", data_type=F32, name="a")
        b = g.tensor(dim=[2, k, n], layout="row", data_type=F32, name="b")
        y = g.matmul(a, b)
        if bias:
            y = g.add(y, g.tensor(dim=[1, 1, 1], stride=[1, 1, 1], data_type=F32, name="bias"))
        y.set_name("y").set_output(True).set_dim([2, m, n]).set_stride([m * n or 1, n or 1, 1])

    got = check_graph(build, device, data={"bias": given(1.5)}, graph=FLOAT).outputs["y"]
    assert got.shape == (2, m, n)
    if k == 0:
        assert (got == (1.5 if bias else 0)).all()


@pytest.mark.parametrize("rank", range(9))
def test_B4_pointwise_at_every_rank(device, rank):
    dim = (2, 3, 1, 2, 3, 1, 2, 1)[:rank]

    def build(g):
        x = g.tensor(dim=dim, layout="row", data_type=F32, name="x")
        y = g.relu(g.add(x, x)).set_name("y").set_output(True)
        assert y is not None

    assert check_graph(build, device, graph=FLOAT).outputs["y"].shape == dim


@pytest.mark.parametrize("dim", [(6, 40), (2, 3, 40), (2, 3, 2, 40)], ids=len)
def test_B4_layernorm_needs_no_dummy_dims(device, dim):
    """(B, S, H) with a scale of H alone, and the ranks beside it."""

    def build(g):
        x, s, b = (g.tensor(dim=d, layout="row", data_type=F32, name=n) for n, d in (("x", dim), ("s", dim[-1:]), ("b", dim[-1:])))
        y, *_ = g.layernorm(graphdnn.norm_forward_phase.INFERENCE, x, s, b, 1e-5)
        y.set_name("y").set_output(True)

    assert check_graph(build, device, graph=FLOAT | {"intermediate_data_type": F32}).outputs["y"].shape == dim


@pytest.mark.parametrize("rank", [2, 3, 4, 5])
def test_B4_matmul_at_every_rank(device, rank):
    batch = (2, 3, 2)[: rank - 2]

    def build(g):
        a = g.tensor(dim=(*batch, 3, 7), layout="row", data_type=F32, name="a")
        b = g.tensor(dim=(*batch, 7, 5), layout="row", data_type=F32, name="b")
        g.matmul(a, b).set_name("y").set_output(True)

    assert check_graph(build, device, graph=FLOAT).outputs["y"].shape == (*batch, 3, 5)


@pytest.mark.parametrize("rank", range(1, 9))
def test_B4_reduction_at_every_rank(device, rank):
    """The last axis alone and every axis; without dummy dims the result has rank - 1 and rank 0."""
    dim = (2, 3, 1, 2, 3, 1, 2, 3)[:rank]

    def build(g):
        x = g.tensor(dim=dim, layout="row", data_type=F32, name="x")
        g.reduction(x, graphdnn.reduction_mode.ADD, axes=[-1], keepdim=False).set_name("last").set_output(True)
        g.reduction(x, graphdnn.reduction_mode.MAX, axes=list(range(rank)), keepdim=False).set_name("all").set_output(True)

    got = check_graph(build, device, graph=FLOAT).outputs
    assert got["last"].shape == dim[:-1] and got["all"].shape == ()
