"""Public names, signatures and enums of the API."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

import graphdnn
from graphdnn import _public
from graphdnn.frontend import stubgen

ROOT = Path(graphdnn.__file__).parent

API_NAMES = (
    "__version__ backend_version backend_version_string get_last_error_string create_handle destroy_handle set_stream get_stream create_kernel_cache "
    "create_device_properties pygraph tensor knob cudnnGraphNotSupportedError graph jit graph_cache Graph datatypes data_type heur_mode "
    "build_plan_policy norm_forward_phase reduction_mode behavior_note numerical_note diagonal_alignment attention_implementation tensor_reordering "
    "moe_grouped_matmul_mode scalar_type reshape_mode knob_type"
).split()

# Every op method of this version: name, then parameters after self, as the API page gives them. "*" marks required ones.
CDT = "compute_data_type=data_type.NOT_SET"
UNARY = "identity abs neg sqrt rsqrt reciprocal exp log ceil floor sin cos tan erf logical_not elu gelu gelu_approx_tanh sigmoid softplus tanh"
BINARY = {
    "a b": "add sub mul div add_square logical_and logical_or",
    "input0 input1": "max min mod pow",
    "input comparison": "cmp_eq cmp_neq cmp_gt cmp_ge cmp_lt cmp_le",
    "input bias": "bias",
    "input scale": "scale",
    "loss input": "elu_backward gelu_backward gelu_approx_tanh_backward sigmoid_backward softplus_backward tanh_backward",
}
RELU = "negative_slope=None lower_clip=None upper_clip=None"
SIGNATURES = {
    "binary_select": f"input0 input1 mask {CDT} name=",
    "gen_index": f"input axis {CDT} name=",
    "relu": f"input {RELU} {CDT} name=",
    "leaky_relu": f"input negative_slope {CDT} name=",
    "swish": f"input swish_beta=None {CDT} name=",
    "relu_backward": f"loss input {RELU} {CDT} name=",
    "leaky_relu_backward": f"loss input negative_slope {CDT} name=",
    "swish_backward": f"loss input {CDT} swish_beta=None name=",
    "matmul": f"A B {CDT} padding=0.0 name=",
    "reduction": f"input mode {CDT} name= axes=None keepdim=False",
    "reshape": "input name= reshape_mode=reshape_mode.VIEW_ONLY",
    "transpose": f"input permutation {CDT} name=",
    "slice": f"input slices=[] {CDT} name=",
    "concatenate": "inputs axis in_place_index=None name=",
    "tensor_like": "input name=",
    "tensor_scalar": "value scalar_type",
    "tensor": "dim stride=None data_type=data_type.NOT_SET is_virtual=False is_pass_by_value=False ragged_offset=None "
    "reordering_type=tensor_reordering.NONE name= uid=-1 layout=None",
    "create_execution_plans": "modes",
    "create_execution_plan": "engine_id knobs",
    "build_plans": "policy=build_plan_policy.HEURISTICS_CHOICE",
    "execute": "tensor_to_device_buffer workspace handle=None override_uids=None override_shapes=None override_strides=None dims=None",
    "execute_plan_at_index": "tensor_to_device_buffer workspace index handle=None "
    "override_uids=None override_shapes=None override_strides=None dims=None",
}
SIGNATURES |= dict.fromkeys(UNARY.split(), f"input {CDT} name=")
SIGNATURES |= {name: f"{args} {CDT} name=" for args, names in BINARY.items() for name in names.split()}


MODES = """ADD MUL SQRT MAX MIN RELU_FWD TANH_FWD SIGMOID_FWD ELU_FWD GELU_FWD SOFTPLUS_FWD SWISH_FWD RELU_BWD TANH_BWD SIGMOID_BWD ELU_BWD
GELU_BWD SOFTPLUS_BWD SWISH_BWD ERF IDENTITY GELU_APPROX_TANH_BWD GELU_APPROX_TANH_FWD GEN_INDEX BINARY_SELECT EXP LOG NEG MOD POW ABS CEIL COS
FLOOR RSQRT SIN LOGICAL_NOT TAN SUB ADD_SQUARE DIV CMP_EQ CMP_NEQ CMP_GT CMP_GE CMP_LT CMP_LE LOGICAL_AND LOGICAL_OR RECIPROCAL"""


def _spelled(function: object) -> str:
    found = []
    for p in list(inspect.signature(function).parameters.values())[1:]:  # type: ignore[arg-type]
        assert p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        found.append(p.name if p.default is p.empty else f"{p.name}={p.default}")
    return " ".join(found)


@pytest.mark.parametrize("method", SIGNATURES)
def test_signature(method):
    assert _spelled(getattr(graphdnn.pygraph, method)) == SIGNATURES[method]
    assert getattr(graphdnn.pygraph, method).__doc__


def test_constructor_signature():
    names = "name=test_graph io_data_type=data_type.NOT_SET intermediate_data_type=data_type.NOT_SET compute_data_type=data_type.NOT_SET handle=None "
    names += "sm_count=None sm_version=None kernel_cache=None device_property=None is_dynamic_shape_enabled=False "
    names += "is_override_shape_enabled=False device=None benchmark=None deterministic=None workspace_limit=None"
    assert _spelled(graphdnn.pygraph.__init__) == names


def test_every_row_is_a_method():
    from graphdnn.frontend.methods import methods
    from graphdnn.opspecs.pointwise import POINTWISE

    names = [m.name for m in methods()]
    assert set(MODES.split()) <= set(POINTWISE) and len(names) == len(set(names))
    assert all(callable(getattr(graphdnn.pygraph, n)) for n in names)


def test_unknown_ops_are_attribute_errors():
    g = graphdnn.pygraph(device="cpu")
    with pytest.raises(AttributeError):
        g.no_such_op  # noqa: B018


def test_all_names_are_there():
    assert set(API_NAMES) <= set(graphdnn.__all__)
    assert set(graphdnn.__all__) <= set(dir(graphdnn))
    for name in graphdnn.__all__:
        value = getattr(graphdnn, name)
        assert isinstance(value, types.ModuleType) == (name == "datatypes"), name
    with pytest.raises(AttributeError, match="no_such_name"):
        graphdnn.no_such_name  # noqa: B018


def test_names_under_the_frontends_private_modules():
    assert graphdnn._compiled_module.convolution_mode.CROSS_CORRELATION.value == 2
    assert graphdnn._pybind_module.cudnnGraphNotSupportedError is graphdnn.NotSupportedError
    assert graphdnn._compiled_module.pygraph is graphdnn.pygraph
    assert not hasattr(graphdnn._compiled_module, "no_such_name")


def _modules() -> list[str]:
    return [m.name for m in pkgutil.walk_packages([str(ROOT)], "graphdnn.")]


def test_no_module_carries_a_public_name():
    reserved = {*graphdnn.__all__, "ops", "experimental"} - {"datatypes"}
    top = {m.name.split(".")[1] for m in pkgutil.iter_modules([str(ROOT)], "graphdnn.")}
    assert not reserved & top


def test_names_resolve_after_every_module_has_been_imported():
    """In a fresh process: an imported submodule becomes an attribute of its package, and must not hide a name."""
    script = f"""
import importlib, types
skipped = []
for name in {_modules()!r}:
    try:
        importlib.import_module(name)
    except ImportError as error:
        if str(error.name or '').startswith('graphdnn'):
            raise
        skipped.append(name)
import graphdnn
from graphdnn import _public
for name in graphdnn.__all__:
    value = getattr(graphdnn, name)
    if name in _public.WHERE:
        module, attribute = _public.WHERE[name]
        assert value is getattr(importlib.import_module(module), attribute), name
        assert not isinstance(value, types.ModuleType), name
print(len(graphdnn.__all__), 'names,', len(skipped), 'modules need an optional package')
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT.parent, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_star_import():
    scope: dict[str, object] = {}
    exec("from graphdnn import *", scope)
    assert set(graphdnn.__all__) <= set(scope)


def test_a_build_imports_no_heavy_library():
    """Declaring, validating and printing need neither numba nor jinja2 nor networkx nor torch."""
    script = """
import sys
import graphdnn
g = graphdnn.pygraph(io_data_type=graphdnn.data_type.FLOAT, compute_data_type=graphdnn.data_type.FLOAT, device="cpu")
x = g.tensor(dim=(2, 3), layout="row")
g.relu(x).set_output(True)
g.validate(), g.build_operation_graph(), str(g), g.key()
print(sorted({"numba", "jinja2", "networkx", "torch", "cuda", "llvmlite", "ml_dtypes"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT.parent, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize("name", stubgen.STUBS)
def test_stubs_are_up_to_date(name):
    assert (ROOT / name).read_text(encoding="utf-8") == stubgen.STUBS[name](), "run python -m graphdnn.frontend.stubgen"


def test_stub_is_python_that_names_every_method(tmp_path):
    import ast

    tree = ast.parse(stubgen.pointwise_stub())
    (cls,) = [n for n in tree.body if isinstance(n, ast.ClassDef)]
    from graphdnn.frontend.methods import methods

    assert [n.name for n in cls.body if isinstance(n, ast.FunctionDef)] == [m.name for m in methods()]


# ------------------------------------------------------------------------------------------------------------------------------------- enums
ENUMS = {
    "data_type": "NOT_SET 0 FLOAT 1 DOUBLE 2 HALF 3 INT8 4 INT32 5 INT8x4 6 UINT8 7 UINT8x4 8 INT8x32 9 BFLOAT16 10 INT64 11 BOOLEAN 12 FP8_E4M3 13 "
    "FP8_E5M2 14 FAST_FLOAT_FOR_FP8 15 FP8_E8M0 16 FP4_E2M1 17 INT4 18",
    "heur_mode": "A 0 B 1 FALLBACK 2 OPENSOURCE 3",
    "build_plan_policy": "HEURISTICS_CHOICE 0 ALL 1",
    "norm_forward_phase": "NOT_SET 0 INFERENCE 1 TRAINING 2",
    "reduction_mode": "NOT_SET 0 ADD 1 MUL 2 MIN 3 MAX 4 AMAX 5 AVG 6 NORM1 7 NORM2 8 MUL_NO_ZEROS 9",
    "behavior_note": "RUNTIME_COMPILATION 1 REQUIRES_FILTER_INT8x32_REORDER 2 REQUIRES_BIAS_INT8x32_REORDER 3 SUPPORTS_CUDA_GRAPH_NATIVE_API 4 "
    "CUBLASLT_DEPENDENCY 5",
    "numerical_note": "TENSOR_CORE 1 DOWN_CONVERT_INPUTS 2 REDUCED_PRECISION_REDUCTION 3 FFT 4 NONDETERMINISTIC 5 WINOGRAD 6 WINOGRAD_TILE_4x4 7 "
    "WINOGRAD_TILE_6x6 8 WINOGRAD_TILE_13x13 9 STRICT_NAN_PROP 10",
    "diagonal_alignment": "TOP_LEFT 0 BOTTOM_RIGHT 1",
    "attention_implementation": "AUTO 0 COMPOSITE 1 UNIFIED 2",
    "tensor_reordering": "NONE 0 INT8x32 1 F16x16 2 F8_128x4 3",
    "moe_grouped_matmul_mode": "NONE 1 GATHER 2 SCATTER 3",
    "scalar_type": "RUNTIME_PARAM 0 COMPILE_TIME_CONST 1",
    "reshape_mode": "VIEW_ONLY 1 LOGICAL 2",
    "knob_type": "NOT_SET 0 SWIZZLE 1 TILE_SIZE 2 EDGE 3 MULTIPLY 4 SPLIT_K_BUF 5 TILEK 6 STAGES 7 REDUCTION_MODE 8 SPLIT_K_SLC 9 IDX_MODE 10 "
    "SPECFILT 11 KERNEL_CFG 12 WORKSPACE 13 TILE_CGA_M 14 TILE_CGA_N 15 BLOCK_SIZE 16 OCCUPANCY 17 ARRAY_SIZE_PER_THREAD 18 SPLIT_COLS 19 "
    "TILE_ROWS 20 TILE_COLS 21 LOAD_SIZE 22 CTA_COUNT 23 STREAM_K 24 SPLIT_P_SLC 25 TILE_M 26 TILE_N 27 WARP_SPEC_CFG 28",
}


@pytest.mark.parametrize("name", ENUMS)
def test_enum(name):
    enum = getattr(graphdnn, name)
    words = ENUMS[name].split()
    expected = dict(zip(words[::2], map(int, words[1::2]), strict=True))
    members = {k: m.value for k, m in enum.__members__.items()}
    assert dict(list(members.items())[: len(expected)]) == expected, "what is added comes after what the API has"
    assert len(members) == len(expected) or name == "reduction_mode"
    for text, value in expected.items():
        member = enum(value)
        assert member.name == text and int(member) == value and str(member) == f"{name}.{text}" and repr(member) == f"<{name}.{text}: {value}>"
        assert member != value and hash(member) == hash(enum(value))


def test_enums_of_two_types_differ():
    assert graphdnn.heur_mode.A != graphdnn.build_plan_policy.HEURISTICS_CHOICE


def test_versions_and_last_error():
    assert graphdnn.backend_version() >= 92200
    assert graphdnn.backend_version_string() == "9.22.0"
    with pytest.raises(TypeError):
        graphdnn.tensor().set_dim("ab")
    assert "dim" in graphdnn.get_last_error_string()


def test_datatypes_submodule():
    from graphdnn import datatypes

    assert datatypes.is_torch_available() == (importlib.util.find_spec("torch") is not None)
    import torch
    assert datatypes._torch_to_cudnn_data_type(torch.bfloat16) is graphdnn.data_type.BFLOAT16
    assert datatypes._cudnn_to_torch_data_type(graphdnn.data_type.FP8_E4M3) is torch.float8_e4m3fn
    assert datatypes._cudnn_to_torch_data_type(graphdnn.data_type.NOT_SET) is None
    assert datatypes._is_torch_tensor(torch.ones(1)) and not datatypes._is_torch_tensor(1)


def test_public_table_names_what_exists():
    for module, attribute in _public.WHERE.values():
        assert hasattr(importlib.import_module(module), attribute)
