"""What the tensor-core engine takes and refuses, with reasons; its descriptors on their way to the driver; the guarded second kernel."""

from __future__ import annotations

import ctypes
import re

import pytest

import graphdnn
from graphdnn.codegen.spec import Binary, Buffer, DescriptorParam, KernelSpec, Launch, PointerParam, Recipe, TensorMap
from graphdnn.dtypes import data_type
from graphdnn.errors import ExecutionError
from graphdnn.plans import codec
from graphdnn.targets.cuda import CudaTarget
from tests.fake_driver import install
from tests.unit.fake_cuda import Descriptor, FakeCuda
from tests.wgmma_problems import Problem, build, planned

D = data_type


def plans(problem_or_build, device="sm_90"):
    g = graphdnn.pygraph(device=device, intermediate_data_type=D.FLOAT, compute_data_type=D.FLOAT)
    problem_or_build(g) if callable(problem_or_build) else build(g, problem_or_build)
    g.validate()
    g.build_operation_graph()
    g.create_execution_plans([graphdnn.heur_mode.A])
    return g


def names(g):
    return [g.get_plan_name_at_index(i) for i in range(g.get_execution_plan_count())]


def reasons(g):
    return " / ".join(r.reason for r in g._plans.rejections if r.engine == "matmul_wgmma" and r.region == "r0")


@pytest.mark.parametrize("device", ["sm_90", "sm_80", "cpu", "cudasim"])
def test_it_is_first_where_it_runs(device):
    first = names(plans(Problem(512, 512, 512, epilogue=("bias", "gelu", "amax")), device))[0]
    assert ("eng3" in first) == (device == "sm_90"), "in the simulator it is slow and comes on request"


def matmul(m=64, n=64, k=64, dtype=D.BFLOAT16, right=None, compute=D.FLOAT, a=None, b=None, prologue=None, alignment=16, out=None):
    def make(g):
        x = g.tensor(dim=(2, m, k), stride=a or (m * k, k, 1), data_type=dtype, name="x").set_alignment(alignment)
        w = g.tensor(dim=(2, k, n), stride=b or (k * n, n, 1), data_type=right or dtype, name="w")
        y = g.matmul(prologue(g, x) if prologue else x, w, compute_data_type=compute, name="mm")
        y.set_output(True).set_data_type(out or D.FLOAT)

    return make


REFUSED = {
    "float inputs": (matmul(dtype=D.FLOAT), "is FLOAT; wgmma takes BFLOAT16 and HALF"),
    "mixed inputs": (matmul(right=D.HALF), "'x' is BFLOAT16 and 'w' is HALF; wgmma needs both inputs of one type"),
    "double sums": (matmul(compute=D.DOUBLE), "computes in DOUBLE"),
    "lines of 65 elements": (matmul(k=65), r"'x' has strides 65 and 1 \(k\): one must be 1, the other a multiple of 16 bytes"),
    "no unit stride": (matmul(a=(64 * 128, 128, 2)), "strides 128 and 2"),
    "repeated rows": (matmul(a=(64, 0, 1)), "strides 0 and 1"),
    "batch stride": (matmul(a=(64 * 64 + 4, 64, 1)), "batch strides"),
    "alignment": (matmul(alignment=8), "aligned to 8 bytes; TMA needs 16"),
    "K = 0": (matmul(k=0), "K = 0"),
    "empty": (matmul(m=0), "empty result"),
    "prologue": (matmul(prologue=lambda g, x: g.relu(x).set_data_type(D.BFLOAT16)), "is calculated in front of the matmul"),
    "more than 2**31 elements": (matmul(a=(2**31, 64, 1)), "spans .* elements; at most"),
    "float prologue": (matmul(prologue=lambda g, x: g.relu(x)), "is FLOAT; wgmma takes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_have_reasons_and_another_engine_serves(name):
    make, why = REFUSED[name]
    g = plans(make)
    assert re.search(why, reasons(g)), reasons(g)
    if name != "prologue":
        assert names(g) and not any(n.startswith("r0:eng3") for n in names(g))


def test_other_gpus_are_refused():
    assert "need an sm_90a GPU" in reasons(plans(matmul(), "sm_80"))


def test_a_stored_prologue_lets_the_engine_in():
    g = plans(matmul(prologue=lambda g, x: g.relu(x).set_data_type(D.BFLOAT16)))
    assert any(n.startswith("cut") and "eng3" in n for n in names(g))


def test_slices_and_transposes_are_only_strides():
    def make(g):
        x = g.tensor(dim=(2, 64, 256), stride=(64 * 256, 256, 1), data_type=D.BFLOAT16, name="x")
        part = g.slice(x, [slice(None), slice(8, 40), slice(64, 128)]).set_data_type(D.BFLOAT16)
        w = g.transpose(g.tensor(dim=(2, 32, 64), stride=(2048, 64, 1), data_type=D.BFLOAT16, name="w"), [0, 2, 1]).set_data_type(D.BFLOAT16)
        g.matmul(part, w, compute_data_type=D.FLOAT).set_output(True).set_data_type(D.FLOAT)

    g = plans(make)
    assert names(g)[0].startswith("r0:eng3")
    maps = [a for s in g._plans.plan_at(0).recipe.steps if isinstance(s, Launch) for a in s.args if isinstance(a, TensorMap)]
    assert maps[0].buffer.offset == 2 * (8 * 256 + 64) and maps[0].dims == (64, 32, 2) and maps[0].strides == (512, 64 * 512)


def test_sums_join_only_where_the_engine_takes_them():
    p = Problem(256, 256, 128, (2,), (2,), epilogue=("relu", "row sums", "column sums", "amax"))
    g = planned(p, "sm_90")
    assert names(g)[0].startswith("sums|r0:eng3") and "|r1" not in names(g)[0]
    assert names(planned(p, "cpu"))[0].startswith("sums|r0:eng2")
    g = planned(p, "sm_80")
    assert "|r1" in names(g)[0] and "of rows and of columns in one kernel" in " ".join(r.reason for r in g._plans.rejections)


MAP = TensorMap(Buffer("tensor", 0, 32), D.BFLOAT16, (72, 100, 3), (144, 14400), (64, 64, 1), 128)
SPEC = KernelSpec("cuda/matmul_wgmma.py.j2", "k_map", (DescriptorParam("d0"), PointerParam("p0", "float32")), block=384)
RECIPE = Recipe((SPEC,), (Launch(0, 7, (MAP, Buffer("tensor", 1))),))


@pytest.fixture
def fake(monkeypatch):
    return install(monkeypatch, FakeCuda({"k_map": [Descriptor, ctypes.c_uint64]}))


def test_descriptors_are_encoded_at_load_and_moved_when_the_address_changes(fake):
    executable = CudaTarget("sm_90a").load(RECIPE, (Binary("k_map", b"cubin"),))
    assert ("encode", 9, [72, 100, 3], [144, 14400], [64, 64, 1], 3) in fake.log
    fake.log.clear()
    for address in (0x1000, 0x1000, 0x2000):
        executable.run({0: address, 1: 0x9000}, {}, 0, 0)
    assert [e for e in fake.log if e[0] in ("encode", "move")] == [("move", 0x1020), ("move", 0x2020)]
    assert [e[6] for e in fake.log if e[0] == "launch"] == [[0x1020, 0x9000], [0x1020, 0x9000], [0x2020, 0x9000]]


def test_a_refused_descriptor_is_explained(fake):
    fake.fail["cuTensorMapEncodeTiled"] = 1
    with pytest.raises(ExecutionError, match=r"encoding the TMA descriptor of TensorMap.*CUDA_ERROR_INVALID_VALUE"):
        CudaTarget("sm_90a").load(RECIPE, (Binary("k_map", b"cubin"),))


@pytest.mark.parametrize("args", [(Buffer("tensor", 0), Buffer("tensor", 1)), (MAP, MAP)])
def test_descriptors_and_pointers_are_not_exchanged(fake, args):
    with pytest.raises(ExecutionError, match="a DescriptorParam for parameter d0|a PointerParam for parameter p0"):
        CudaTarget("sm_90a").load(Recipe((SPEC,), (Launch(0, 7, args),)), (Binary("k_map", b"cubin"),))


def test_recipes_with_descriptors_survive_storage():
    g = plans(Problem(256, 256, 128, epilogue=("bias", "amax")))
    recipe = g._plans.plan_at(0).recipe
    again = codec.decode(Recipe, codec.encode(recipe))
    assert again.steps == recipe.steps and any(isinstance(a, TensorMap) for a in recipe.steps[-1].args)
    assert again.kernels[0].params == recipe.kernels[0].params and again.kernels[0].shared == recipe.kernels[0].shared


def test_unaligned_buffers_get_another_kernel():
    """In the simulator: the engine is chosen by name, a view that begins within 16 bytes runs the portable kernel."""
    import numpy as np

    from tests.buffers import aligned_bytes
    from tests.wgmma_problems import plan_index

    g = planned(Problem(24, 16, 8, epilogue=("relu", "amax"), result=D.FLOAT), "cudasim")
    index = plan_index(g, 0)
    g.build_plan_at_index(index)
    rng = np.random.default_rng(0)
    store = {n: aligned_bytes(4096)[2:].view(np.uint16)[: r * c].reshape(r, c) for n, r, c in (("a", 24, 8), ("b", 8, 16))}
    for array in store.values():
        array[:] = (rng.standard_normal(array.shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    values = {n: (x.astype(np.uint32) << 16).view(np.float32) for n, x in store.items()}
    y, top = aligned_bytes(24 * 16 * 4).view(np.float32).reshape(24, 16), aligned_bytes(16)[:4].view(np.float32).reshape(1, 1)
    workspace = aligned_bytes(g.get_workspace_size_plan_at_index(index))
    g.execute_plan_at_index({"a": store["a"], "b": store["b"], "y": y, "AMAX(1, 1)": top}, workspace, index)
    expected = np.maximum(values["a"] @ values["b"], 0)
    assert np.allclose(y, expected, atol=1e-4) and np.allclose(top, expected.max(), atol=1e-4)


def test_capture_is_recognized(fake):
    target = CudaTarget("sm_90a")
    fake.captured.add(0x77)
    assert target.capturing(0x77) and not target.capturing(0x78)
    fake.fail["cuStreamIsCapturing"] = 906
    assert target.capturing(0), "the legacy stream may not be used while another is captured"
