"""Whatever could change what a kernel does changes its key, or is an argument of the launch. Nothing is compiled here: keys come from the recipe."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import graphdnn
from graphdnn import data_type, targets
from graphdnn.plans import cache

D = data_type
CHOICES: dict[str, tuple[Any, ...]] = {
    "batch": (2, 3),
    "m": (5, 6, 64),
    "n": (7, 8, 80),
    "k": (11, 16, 48),
    "left": (D.FLOAT, D.HALF, D.BFLOAT16, D.FP8_E4M3),
    "right": (D.FLOAT, D.HALF),
    "middle": (D.NOT_SET, D.HALF, D.BFLOAT16),
    "result": (D.FLOAT, D.BFLOAT16, D.FP8_E5M2, D.INT8),
    "compute": (D.FLOAT, D.DOUBLE),
    "a_layout": ("row", "column", (0, 2, 1), "repeated batch"),  # an order is given fastest first
    "out_pad": (0, 1, 8),
    "activation": (
        ("relu", {}),
        ("relu", {"negative_slope": 0.1}),
        ("relu", {"negative_slope": 0.2}),
        ("relu", {"upper_clip": 6.0}),
        ("relu", {"lower_clip": -1.0}),
        ("swish", {"swish_beta": 1.5}),
        ("swish", {"swish_beta": 1.25}),
        ("gelu", {}),
        ("gelu_approx_tanh", {}),
        ("tanh", {}),
    ),
    "scale": (("constant", 2.0), ("constant", 2.5), ("by_value", None), ("none", None)),
    "bias": (None, (1, 1, "n"), ("batch", 1, 1), ("batch", "m", "n")),
    "index_axis": (None, 0, 1, 2),
    "slice": (None, (0, 4, 1), (1, 5, 1), (0, 5, 2)),
    "transposed": (False, True),
    "reduction": (None, ("AMAX", (0, 1, 2)), ("ADD", (0, 1, 2)), ("MAX", (2,)), ("MAX", (1,)), ("NORM2", (1, 2))),
    "joined": (None, 1, 2),
    "reshaped": (False, True),
}
DEVICES = ("cpu", "sm_80", "sm_90", "cudasim")


@dataclass(frozen=True)
class Config:
    """A graph with every kind of choice that a user can make; each field is one of CHOICES."""

    batch: int = 2
    m: int = 5
    n: int = 7
    k: int = 11
    left: D = D.FLOAT
    right: D = D.FLOAT
    middle: D = D.NOT_SET
    result: D = D.FLOAT
    compute: D = D.FLOAT
    a_layout: Any = "row"
    out_pad: int = 0
    activation: Any = ("relu", {})
    scale: Any = ("constant", 2.0)
    bias: Any = None
    index_axis: Any = None
    slice: Any = None
    transposed: bool = False
    reduction: Any = None
    joined: Any = None
    reshaped: bool = False

    def declare(self, g: Any) -> None:
        """All ops that the fields ask for."""
        b, m, n, k = self.batch, self.m, self.n, self.k
        if self.a_layout == "repeated batch":
            a = g.tensor(dim=[b, m, k], stride=[0, k, 1], data_type=self.left)
        else:
            a = g.tensor(dim=[b, m, k], layout=self.a_layout, data_type=self.left)
        w = g.tensor(dim=[b, k, n], layout="row", data_type=self.right)
        y = self._tail(g, self._scaled(g, g.matmul(a, w).set_data_type(self.middle)))
        y = getattr(g, self.activation[0])(y, **self.activation[1])
        if self.reduction is not None:
            mode, axes = self.reduction
            dim = [1 if i in axes else d for i, d in enumerate((b, m, n))]
            g.reduction(y, graphdnn.reduction_mode[mode]).set_dim(dim).set_output(True).set_data_type(D.FLOAT)
        dims = [b, m, n]
        y, dims = self._moved(g, y, dims)
        strides, step = [0] * len(dims), 1
        for i in reversed(range(len(dims))):
            strides[i], step = step, step * dims[i] + self.out_pad
        g.identity(y).set_output(True).set_data_type(self.result).set_dim(dims).set_stride(strides)

    def _scaled(self, g: Any, y: Any) -> Any:
        kind, value = self.scale
        if kind == "none":
            return y
        if kind == "by_value":
            return g.mul(y, g.tensor(dim=[1, 1, 1], stride=[1, 1, 1], is_pass_by_value=True, data_type=D.FLOAT))
        which = graphdnn.scalar_type.COMPILE_TIME_CONST if kind == "constant" else graphdnn.scalar_type.RUNTIME_PARAM
        return g.mul(y, g.tensor_scalar(value, which))

    def _tail(self, g: Any, y: Any) -> Any:
        if self.bias is not None:
            dim = [getattr(self, d) if isinstance(d, str) else d for d in self.bias]
            y = g.add(y, g.tensor(dim=dim, layout="row", data_type=D.FLOAT))
        return y if self.index_axis is None else g.add(y, g.gen_index(y, axis=self.index_axis))

    def _moved(self, g: Any, y: Any, dims: list[int]) -> tuple[Any, list[int]]:
        y = g.identity(y).set_data_type(D.FLOAT)
        if self.slice is not None:
            start, stop, step = self.slice
            y = g.slice(y, [slice(None), slice(start, stop, step), slice(None)]).set_data_type(D.FLOAT)
            dims = [dims[0], len(range(start, stop, step)), dims[2]]
        if self.transposed:
            y, dims = g.transpose(y, [0, 2, 1]).set_data_type(D.FLOAT), [dims[0], dims[2], dims[1]]
        if self.joined is not None:
            y = g.concatenate([y, y], axis=self.joined).set_data_type(D.FLOAT)
            dims = [d * 2 if i == self.joined else d for i, d in enumerate(dims)]
        if self.reshaped:
            dims = [dims[0] * dims[1], dims[2]]
            y = g.reshape(y).set_dim(dims).set_stride([dims[1], 1]).set_data_type(D.FLOAT)
        return y, dims


def identity(config: Config, device: str = "cpu", **kwargs: Any) -> tuple[Any, ...]:
    """Keys of the best plan's kernels, in order, and the launches with their arguments."""
    g = graphdnn.pygraph(device=device, **({"compute_data_type": config.compute} | kwargs))
    config.declare(g)
    return identity_of(g)


def identity_of(g: Any) -> tuple[Any, ...]:
    g.validate()
    g.build_operation_graph()
    g.create_execution_plans([graphdnn.heur_mode.A])
    plan = g._plans.plan_at(0)
    target = targets.get(plan.device)
    return tuple(cache.kernel_key(spec, target) for spec in plan.recipe.kernels), plan.recipe.steps


def test_choices_cover_the_config():
    assert [f.name for f in fields(Config)] == list(CHOICES)


_configs = st.builds(Config, **{name: st.sampled_from(values) for name, values in CHOICES.items()})


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(config=_configs, field=st.sampled_from(sorted(CHOICES)), device=st.sampled_from(("cpu", "sm_90")), data=st.data())
def test_changing_any_one_choice_changes_the_key_or_an_argument(config, field, device, data):
    other = data.draw(st.sampled_from([v for v in CHOICES[field] if v != getattr(config, field)]))
    changed = replace(config, **{field: other})
    assert identity(config, device) != identity(changed, device), f"{field}: {getattr(config, field)} and {other} share every kernel and argument"


@pytest.mark.parametrize("field", CHOICES)
@pytest.mark.parametrize("device", ["cpu", "sm_90"])
def test_all_values_of_each_choice_differ(field, device):
    """From one base, exhaustively."""
    base = Config(bias=(1, 1, "n"), reduction=("AMAX", (0, 1, 2)))
    found = {str(v): identity(replace(base, **{field: v}), device) for v in CHOICES[field]}
    assert len(set(found.values())) == len(found), f"{field}: {[a for a in found if sum(found[a] == f for f in found.values()) > 1]}"


def test_a_value_that_is_an_argument_is_not_in_the_key():
    """A runtime scalar and a by-value tensor are arguments: one kernel serves every value of both."""
    found = {identity(replace(Config(), scale=s)) for s in (("by_value", None), ("runtime", 2.0), ("runtime", 3.0))}
    assert len(found) == 1


def test_the_same_graph_has_the_same_key_whatever_its_names():
    base = Config()
    again = identity(base)
    assert identity(base) == again
    g = graphdnn.pygraph(device="cpu", compute_data_type=base.compute, name="another")
    base.declare(g)
    for i, t in enumerate(g._tensors):
        t.set_name(f"renamed {i}").set_uid(1000 - i)
    assert identity_of(g) == again


def test_devices_have_keys_of_their_own():
    found = {device: set(identity(Config(), device)[0]) for device in DEVICES}
    for a in DEVICES:
        for b in DEVICES:
            assert a == b or not found[a] & found[b], f"{a} and {b} share a kernel"


def test_alignment_class_changes_the_key_where_kernels_rely_on_it():
    def make(alignment):
        g = graphdnn.pygraph(device="sm_90", compute_data_type=D.FLOAT)
        x = g.tensor(dim=[4096], stride=[1], data_type=D.BFLOAT16).set_alignment(alignment)
        g.relu(x).set_output(True).set_data_type(D.BFLOAT16).set_alignment(alignment)
        return identity_of(g)

    assert make(16) != make(2)


@pytest.mark.parametrize("flag", ["allow_tf32", "fast_math"])
def test_numerical_flags_change_the_key_or_are_refused(flag):
    """A flag that pygraph knows is in the key; one that it does not know is an error and never ignored."""
    plain = graphdnn.pygraph(device="sm_90", compute_data_type=D.FLOAT)
    Config().declare(plain)
    if flag not in inspect.signature(graphdnn.pygraph.__init__).parameters:
        with pytest.raises(TypeError):
            graphdnn.pygraph(device="sm_90", **{flag: True})
        return
    flagged = graphdnn.pygraph(device="sm_90", compute_data_type=D.FLOAT, **{flag: True})
    Config().declare(flagged)
    assert identity_of(plain) != identity_of(flagged)


@pytest.mark.parametrize("package", ["numba", "llvmlite", "numba-cuda", "nvidia-nvvm", "nvidia-cuda-nvcc"])
def test_a_newer_cuda_toolchain_changes_every_key(package, monkeypatch):
    from graphdnn.targets import cuda_versions

    before = identity(Config(), "sm_90")[0]
    changed = dict(cuda_versions.installed()) | {package: "99.1"}
    monkeypatch.setattr(cuda_versions, "installed", lambda: changed)
    assert not set(before) & set(identity(Config(), "sm_90")[0])


@pytest.mark.parametrize("package", ["numba", "llvmlite"])
def test_a_newer_cpu_toolchain_changes_every_key(package, monkeypatch):
    from graphdnn.targets import cpu

    before = identity(Config())[0]
    real = cpu._version
    monkeypatch.setattr(cpu, "_version", lambda name: "99.1" if name == package else real(name))
    assert not set(before) & set(identity(Config())[0])


def test_another_cpu_changes_every_key(monkeypatch):
    from graphdnn.targets import cpu_object

    before = identity(Config())[0]
    monkeypatch.setattr(cpu_object, "host_key", lambda: "another CPU without AVX")
    assert not set(before) & set(identity(Config())[0])


@pytest.mark.parametrize("part", ["templates", "intrinsics"])
@pytest.mark.parametrize("device", ["cpu", "sm_90"])
def test_templates_and_intrinsics_are_in_the_key(part, device, monkeypatch):
    from graphdnn import intrinsics
    from graphdnn.codegen import render

    before = identity(Config(), device)[0]
    monkeypatch.setattr(render if part == "templates" else intrinsics, "digest", lambda: "edited")
    assert not set(before) & set(identity(Config(), device)[0])


def test_line_information_is_in_the_key(monkeypatch):
    before = identity(Config(), "sm_90")[0]
    monkeypatch.setenv("GRAPHDNN_LINEINFO", "1")
    assert not set(before) & set(identity(Config(), "sm_90")[0])


def test_random_graphs_that_differ_never_share_key_and_arguments():
    """Among 150 programs of the fuzzer, equal identities mean equal graphs."""
    from tests.fuzz.generator import generate
    from tests.fuzz.program import declare

    seen: dict[Any, Any] = {}
    for seed in range(150):
        program = generate(seed)
        g = graphdnn.pygraph(device="cpu", **program.graph_arguments())
        declare(program, g)
        found = identity_of(g)
        if not found[0]:
            continue  # nothing to calculate: all empty
        og = g._opgraph
        meaning = (
            tuple((t.dim, t.strides, t.dtype, t.virtual, t.by_value, t.constant, t.value) for t in og.tensors),
            tuple(replace(n, name="") for n in og.nodes),
        )
        assert seen.setdefault(found, meaning) == meaning, f"seed {seed} shares a plan with another graph"
