"""A driver written in Python (tests/unit/fake_cuda.py) in the place of the GPU's, and graphs that run on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

import graphdnn
from graphdnn import _libcuda, data_type
from graphdnn.targets import cuda_driver
from tests.helpers import built
from tests.unit.fake_cuda import FakeCuda, kinds

F32 = data_type.FLOAT
FLOAT = {"io_data_type": F32, "intermediate_data_type": F32, "compute_data_type": F32}
Fake = TypeVar("Fake", bound=FakeCuda)


def install(monkeypatch: pytest.MonkeyPatch, fake: Fake) -> Fake:
    """``fake`` is the driver of this process, which knows nothing of another one: no contexts, no modules."""
    monkeypatch.setattr(_libcuda, "_driver", _libcuda.Driver(fake))
    for name in ("_contexts", "_modules", "_functions"):
        monkeypatch.setattr(cuda_driver, name, {})
    return fake


class AnyKernel(dict[str, list[Any]]):
    """Parameters of kernels, from the specs of the plans that the test has declared."""

    def declare(self, graph: Any) -> None:
        """Know the kernels of a graph's plan."""
        self.update({spec.name: kinds(spec) for spec in graph.plan.recipe.kernels})


def on_gpu(fake: FakeCuda, declare: Callable[[Any], None], **more: Any) -> Any:
    """The graph that ``declare`` makes, built for a described GPU, whose kernels the driver is then told of, and for the driver's own."""
    described = graphdnn.pygraph(device="sm_90", **FLOAT)
    declare(described)
    fake.parameters.declare(built(described))
    g = graphdnn.pygraph(**({"device": "cuda:0"} | more), **FLOAT)
    declare(g)
    return built(g)
