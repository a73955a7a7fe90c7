"""The tensor-core matmul compiles for sm_90a without a GPU; its machine code has what the text says: no more waits, no spills, no local memory."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from graphdnn.codegen.render import render
from graphdnn.dtypes import data_type
from graphdnn.engines.matmul_wgmma import TILES
from tests.compile.sass import inspect
from tests.wgmma_problems import Problem, plan_index, planned

D = data_type
TRAINING = Problem(512, 512, 1024, (16,), (16,), result=D.BFLOAT16, epilogue=("scale", "bias", "gelu", "amax"))
PROBLEMS = {
    "training": TRAINING,
    "no amax": replace(TRAINING, epilogue=("scale", "bias", "gelu")),
    "half, both transposed": replace(TRAINING, a="column", b="column", dtype=D.HALF, result=D.HALF),
    "columns of results contiguous": replace(TRAINING, out="column"),
    "tails, two outputs, residual": Problem(1000, 77, 100, result=D.FLOAT, epilogue=("bias", "residual", "second", "relu"), pad=8),
    "sums of rows and columns": replace(TRAINING, epilogue=("gelu", "row sums", "column sums", "amax")),
    "wide floats": replace(TRAINING, result=D.FLOAT, epilogue=("float bias", "swish")),
    "broadcast batches": Problem(256, 256, 256, (4, 1), (1, 3), epilogue=("row scale", "gelu")),
}


def kernels(problem: Problem, config: str | None = None):
    g = planned(problem, "sm_90")
    return g._plans.plan_at(plan_index(g, config)).recipe.kernels


def check_machine_code(spec) -> None:
    seen = inspect(spec)
    ops = seen["opcodes"]
    text = render(spec).text

    def count(prefix: str) -> int:
        return sum(n for op, n in ops.items() if op.startswith(prefix))

    assert (seen["double"], seen["local"], seen["spills"], seen["facts"]["stack_bytes"]) == (0, 0, 0, 0)
    assert count("USETMAXREG") == 2 and count("UTMALDG") and count("UTMACCTL") and ops["BAR.SYNC.DEFER_BLOCKING"] == (spec.cluster == 1)
    assert count("HGMMA") == spec.fields["steps"] * spec.fields["blocks"]
    assert count("WARPGROUP.DEPBAR") == len(re.findall(r"wgmma_wait\(", text)), "a wait after every wgmma"
    assert seen["regs"] <= 168 and spec.shared_bytes <= 232448
    assert all(x.nbytes >= 0 for x in spec.shared) and spec.shared_bytes == spec.shared[-1].offset + spec.shared[-1].nbytes


@pytest.mark.parametrize("tile", TILES, ids=repr)
def test_every_tile_shape(tile):
    spec = kernels(TRAINING, repr(tile))[0]
    check_machine_code(spec)
    text = render(spec).text
    assert text.count("erf(") == 1, "the tape stands once, whatever the tile"


@pytest.mark.parametrize("name", PROBLEMS)
def test_problems(name):
    spec, *finish = kernels(PROBLEMS[name])
    check_machine_code(spec)
    for second in finish:
        assert inspect(second)["spills"] == 0


def test_clusters_fetch_together():
    config = next(t for t in TILES if t.cluster == 2)
    seen = inspect(kernels(TRAINING, repr(config))[0])
    ptx = seen["binary"].texts["ptx"]
    assert ".explicitcluster" in ptx and ".reqnctapercluster 2, 1, 1" in ptx and "multicast::cluster" in ptx
    assert any(op.startswith("UTMALDG") and "MULTICAST" in op for op in seen["opcodes"])


def test_wide_accesses():
    ops = inspect(kernels(TRAINING)[0])["opcodes"]
    assert ops["STG.E.128"] and ops["LDG.E.128"] and ops["LDS.128"] and ops["STS.64"]


def test_descriptors_are_parameters_of_128_bytes():
    seen = inspect(kernels(TRAINING)[0])
    ptx = seen["binary"].texts["ptx"]
    assert len(re.findall(r"\.param \.align 64 \.b8 \w+_param_(?:0|16)\[128\]", ptx)) == 2 and "GRAPHDNN_MAP" not in ptx
    assert re.search(r"mov\.b64 t, \w+_param_16;", ptx) and ".minnctapersm 1" in ptx


def test_the_template_knows_no_op_and_no_shape():
    from graphdnn.codegen.render import template_folder
    from graphdnn.opspecs.pointwise import POINTWISE

    text = (template_folder() / "cuda" / "matmul_wgmma.py.j2").read_text()
    words = set(re.findall(r"[a-z_]+", text.lower()))
    assert len(text.splitlines()) <= 250
    assert not words & {row.method for row in POINTWISE.values()} - {"min", "max"}
    assert not re.search(r"\{\{[^}]*[-+*/][^}]*\}\}", text), "arithmetic in a hole"
