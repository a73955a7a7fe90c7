"""An op is one row: rows that are put into the tables before anything else is imported are ops on every target, with methods, enum member, JSON text,
reference, error bounds and fusion."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
import numpy as np
from graphdnn.codegen import access
from graphdnn.opspecs import pointwise, reduction, registry, shapes
from graphdnn.opspecs.spec import OpSpec

expr = "T(0) if a < T(-3) else truediv(a * nanmin(a + T(3), T(6)), T(6))"
formula = lambda a: np.where(a < -3, 0, a * np.minimum(a + 3, 6) / 6)
row = pointwise.PointwiseOp("HARDSWISH_FWD", "hardswish", ("input",), expr, formula, "a * clip(a + 3, 0, 6) / 6", domain="float")
pointwise.POINTWISE[row.mode] = row

count = lambda x, axes: np.count_nonzero(x, axis=axes, keepdims=True).astype(x.dtype)
nonzero = reduction.ReductionOp("COUNT_NONZERO", "T(0)", "T(1) if a != T(0) else T(0)", "x + y", "x", count, "how many are not 0")
reduction.REDUCTION[nonzero.mode] = nonzero


def infer(node):
    x = node.inputs["X"]
    shapes.give(node, "Y", shapes.dims(x), lambda: shapes.strides(x))


def flipped(node, graph, index):
    x, axis = node.input_ids[0], node.attr("axis")
    size = graph.tensors[x].dim[axis]
    return (access.Piece(x, tuple(i.scaled(-1).shifted(size - 1) if a == axis else i for a, i in enumerate(index))),)


flip = lambda node, dims, arrays: [np.flip(arrays[0], node.attr("axis"))]
registry.SPECS["FLIP"] = OpSpec("FLIP", "movement", ("X",), ("Y",), infer, shapes.check_plain, flip, attrs=("axis",))
access.MOVES["FLIP"] = flipped

import graphdnn
from graphdnn import data_type
from tests.helpers import check_graph


def build(g):
    x = g.tensor(dim=(3, 5, 7), layout="row", data_type=data_type.FLOAT, name="x")
    y = g.hardswish(g._add("FLIP", "flip", {"X": g.relu(g.sub(x, 0.25))}, ("Y",), {"axis": 2})[0])
    y.set_name("y").set_output(True).set_data_type(data_type.FLOAT)
    found = g.reduction(y, graphdnn.reduction_mode.COUNT_NONZERO, axes=(0, 2), keepdim=True)
    found.set_name("count").set_output(True).set_data_type(data_type.INT32)


found = check_graph(build, sys.argv[1], graph={"intermediate_data_type": data_type.FLOAT, "compute_data_type": data_type.FLOAT})
assert 0 < found.outputs["count"].sum() < 105
text = str(found.graph)
assert all(word in text for word in ("HARDSWISH_FWD", "COUNT_NONZERO", "FLIP"))
again = graphdnn.pygraph(device=sys.argv[1])
again.deserialize(text)
print(found.graph.explain().kernels, "kernel")
"""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cudasim", marks=pytest.mark.sim)])
def test_rows_are_ops(device: str, tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT), "GRAPHDNN_CACHE_DIR": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", PROGRAM, device], capture_output=True, text=True, env=env, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout == "1 kernel\n"
