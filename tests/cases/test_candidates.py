"""C4: candidates that ask a device for more than it has are pruned before anything is compiled; one that fails is no error while another works."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

import graphdnn
from graphdnn import data_type
from graphdnn import device as devices
from graphdnn.codegen.spec import KernelSpec, Launch, Recipe
from graphdnn.engines import ENGINES
from graphdnn.engines.base import Engine, Knobs
from graphdnn.errors import BuildError, NotSupportedError
from graphdnn.plans import cache, candidates
from graphdnn.status import OK

BF16, F32 = data_type.BFLOAT16, data_type.FLOAT
H200 = devices.describe("sm_90")
KIB = 1024


def matmul(device, **more):
    """Operation graph of a bf16 matmul, 2 x 512 x 256 x 128."""
    g = graphdnn.pygraph(device=device, intermediate_data_type=F32, compute_data_type=F32)
    a, b = (g.tensor(dim=dim, layout="row", data_type=BF16, name=n) for n, dim in (("a", (2, 512, 128)), ("b", (2, 128, 256))))
    g.matmul(a, b, name="mm").set_output(True).set_data_type(F32)
    g.validate()
    g.build_operation_graph()
    return g._opgraph


def with_shared(kib):
    """The GPU with ``kib`` KiB of shared memory a block."""
    return replace(H200, name=f"GPU of {kib} KiB", shared_per_block_optin=kib * KIB)


def shared_of(plans) -> list[int]:
    return [spec.shared_bytes for p in plans for spec in p.recipe.kernels]


def compiled() -> int:
    return cache.counters.misses + cache.counters.disk_hits + cache.counters.memory_hits


def only(name):
    return tuple(e for e in ENGINES if e.name == name)


@pytest.mark.parametrize("kib", [164, 100])
def test_C4_candidates_beyond_shared_memory_are_pruned_before_a_compile(kib, empty_cache):
    before = compiled()
    plans = candidates.create(matmul("sm_90"), with_shared(kib))
    plans.check_support()
    assert compiled() == before
    assert max(shared_of(plans)) <= kib * KIB
    assert len(plans) < len(candidates.create(matmul("sm_90"), with_shared(1000))), "the larger tiles are left out"


def test_C4_pruned_candidates_are_debug_lines_with_candidate_and_limit(monkeypatch, capfd):
    monkeypatch.setenv("GRAPHDNN_LOG", "debug")
    candidates.create(matmul("sm_90"), with_shared(100))
    lines = [line for line in capfd.readouterr().err.splitlines() if "bytes of shared memory; GPU of 100 KiB has 102400" in line]
    assert lines and all("DEBUG" in line and "WgmmaTile(" in line for line in lines)
    monkeypatch.setenv("GRAPHDNN_LOG", "info")
    candidates.create(matmul("sm_90"), with_shared(100))
    assert "shared memory" not in capfd.readouterr().err


def test_C4_none_survives_says_candidate_and_limit(empty_cache):
    before = compiled()
    with pytest.raises(NotSupportedError) as caught:
        candidates.create(matmul("sm_90"), with_shared(8), engines=only("matmul_wgmma"))
    text = str(caught.value)
    assert "matmul_wgmma" in text and "WgmmaTile(" in text and "'mm'" in text, text
    assert "bytes of shared memory; GPU of 8 KiB has 8192" in text, text
    assert compiled() == before


@dataclass(frozen=True)
class Size(Knobs):
    """Bytes of shared memory that a kernel asks for."""

    shared: int = 0


class Forgetful(Engine):
    """An engine that does not look at the device, and whose template does not exist."""

    id = 60
    name = "forgetful"
    sizes: tuple[int, ...] = ()

    def _accepts(self, graph, region):
        return OK

    def _candidates(self, graph, region, device):
        return tuple(Size(n) for n in self.sizes)

    def _cost(self, graph, region, device, knobs):
        return 1e-12 * (1 + knobs.shared)

    def _lower(self, graph, region, device, knobs, memory):
        return Recipe((KernelSpec("cuda/no_such.j2", f"k_{knobs.shared}", (), block=128, shared_bytes=knobs.shared),), (Launch(0, 1, ()),))


def forgetful(*sizes):
    return type("Sized", (Forgetful,), {"id": 60, "name": "forgetful", "sizes": sizes})()


def test_C4_the_limit_holds_for_every_engine():
    """Whatever an engine forgets, no plan is compiled that the device could not launch, and the error names every kernel with the limit."""
    plans = candidates.create(matmul("sm_90"), with_shared(64), engines=(forgetful(65 * KIB, 300 * KIB),))
    before = compiled()
    with pytest.raises(NotSupportedError) as caught:
        plans.build()
    text = str(caught.value)
    for size in (65 * KIB, 300 * KIB):
        assert f"kernel 'k_{size}' needs {size} bytes of shared memory; GPU of 64 KiB has 65536" in text, text
    assert compiled() == before
    fitting = candidates.create(matmul("sm_90"), with_shared(64), engines=(forgetful(65 * KIB), *ENGINES))
    fitting.check_support()
    assert "k_" in fitting.obstacle(0) and "eng60" in fitting.name_at(0), "the first one is left out, others stay"


def test_C4_a_failed_candidate_is_a_debug_line_while_another_works(monkeypatch, capfd, empty_cache):
    monkeypatch.setenv("GRAPHDNN_LOG", "info")
    plans = candidates.create(matmul("cpu"), devices.cpu(), engines=(forgetful(0), *ENGINES))
    plans.build()
    assert plans.chosen_index > 0 and any("eng60" in r.engine for r in plans.rejections)
    said = capfd.readouterr().err
    assert not [line for line in said.splitlines() if "WARNING" in line or "ERROR" in line or "eng60" in line], said
    monkeypatch.setenv("GRAPHDNN_LOG", "debug")
    candidates.create(matmul("cpu"), devices.cpu(), engines=(forgetful(0), *ENGINES)).build()
    assert any("DEBUG" in line and "eng60" in line for line in capfd.readouterr().err.splitlines())


def test_C4_nothing_compiles_names_every_candidate(empty_cache):
    plans = candidates.create(matmul("cpu"), devices.cpu(), engines=(forgetful(0, 16),))
    with pytest.raises(BuildError) as caught:
        plans.build()
    for name in (p.name for p in plans if "unfused" not in p.name):
        assert f"\n  - {name}: " in str(caught.value), str(caught.value)
