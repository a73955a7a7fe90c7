"""Engines that are imported late: what stands for them, and that a graph without their regions does not import them."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest

from graphdnn.engines import ENGINES
from graphdnn.engines.later import Later

LATE = [e for e in ENGINES if isinstance(e, Later)]


@pytest.mark.parametrize("engine", LATE, ids=lambda e: e.name)
def test_it_stands_for_an_engine_of_its_id_and_name(engine: Later) -> None:
    assert (engine.id, engine.name) == (engine.real.id, engine.real.name) and engine.real is engine.real
    for other in (pickle.loads(pickle.dumps(engine)), copy.deepcopy(engine)):
        assert type(other) is type(engine) and other.real is engine.real


def test_a_matmul_imports_none_of_them() -> None:
    program = """
import sys, graphdnn
g = graphdnn.pygraph(io_data_type="float32", compute_data_type="float32", device="sm_90")
a, b = g.tensor(dim=[2, 8, 8], stride=[64, 8, 1]), g.tensor(dim=[2, 8, 8], stride=[64, 8, 1])
g.relu(input=g.matmul(A=a, B=b)).set_output(True)
g.validate(); g.build_operation_graph(); g.create_execution_plans([graphdnn.heur_mode.A])
names = ("attention_bwd", "attention_fwd", "conv_direct", "conv_fft", "conv_winograd", "moe_grouped")
print([n for n in names if "graphdnn.engines." + n in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
