# Printed by graphdnn/frontend/stubgen.py; do not edit.
# ruff: noqa: F401, I001
from graphdnn import datatypes as datatypes
from graphdnn._version import __version__ as __version__
from graphdnn.dtypes import data_type as data_type
from graphdnn.errors import BuildError as BuildError
from graphdnn.errors import ExecutionError as ExecutionError
from graphdnn.errors import GraphError as GraphError
from graphdnn.errors import KindError as KindError
from graphdnn.errors import NotSupportedError as NotSupportedError
from graphdnn.errors import SerializationError as SerializationError
from graphdnn.errors import ValidationError as ValidationError
from graphdnn.errors import cudnnGraphNotSupportedError as cudnnGraphNotSupportedError
from graphdnn.errors import last_error_string as get_last_error_string
from graphdnn.frontend.ahead import compile_for as compile_for
from graphdnn.frontend.decorators import graph as graph
from graphdnn.frontend.decorators import graph_cache as graph_cache
from graphdnn.frontend.decorators import jit as jit
from graphdnn.frontend.enums import attention_implementation as attention_implementation
from graphdnn.frontend.enums import behavior_note as behavior_note
from graphdnn.frontend.enums import build_plan_policy as build_plan_policy
from graphdnn.frontend.enums import diagonal_alignment as diagonal_alignment
from graphdnn.frontend.enums import heur_mode as heur_mode
from graphdnn.frontend.enums import knob_type as knob_type
from graphdnn.frontend.enums import moe_grouped_matmul_mode as moe_grouped_matmul_mode
from graphdnn.frontend.enums import norm_forward_phase as norm_forward_phase
from graphdnn.frontend.enums import numerical_note as numerical_note
from graphdnn.frontend.enums import reshape_mode as reshape_mode
from graphdnn.frontend.enums import scalar_type as scalar_type
from graphdnn.frontend.enums import tensor_reordering as tensor_reordering
from graphdnn.frontend.handle import backend_version as backend_version
from graphdnn.frontend.handle import backend_version_string as backend_version_string
from graphdnn.frontend.handle import create_handle as create_handle
from graphdnn.frontend.handle import destroy_handle as destroy_handle
from graphdnn.frontend.handle import get_stream as get_stream
from graphdnn.frontend.handle import set_stream as set_stream
from graphdnn.frontend.pipeline import Pipeline as Pipeline
from graphdnn.frontend.planning import knob as knob
from graphdnn.frontend.properties import create_device_properties as create_device_properties
from graphdnn.frontend.properties import create_kernel_cache as create_kernel_cache
from graphdnn.frontend.pygraph import pygraph as pygraph
from graphdnn.frontend.reduction_modes import reduction_mode as reduction_mode
from graphdnn.frontend.symbols import Dim as Dim
from graphdnn.frontend.tensor import tensor as tensor
from graphdnn.frontend.wrapper import Graph as Graph
from graphdnn.plans.cache import stats as stats
from graphdnn.frontend import names as _compiled_module
from graphdnn.frontend import names as _pybind_module

__all__ = [
    "__version__",
    "BuildError",
    "Dim",
    "ExecutionError",
    "Graph",
    "GraphError",
    "KindError",
    "NotSupportedError",
    "Pipeline",
    "SerializationError",
    "ValidationError",
    "attention_implementation",
    "backend_version",
    "backend_version_string",
    "behavior_note",
    "build_plan_policy",
    "compile_for",
    "create_device_properties",
    "create_handle",
    "create_kernel_cache",
    "cudnnGraphNotSupportedError",
    "data_type",
    "destroy_handle",
    "diagonal_alignment",
    "get_last_error_string",
    "get_stream",
    "graph",
    "graph_cache",
    "heur_mode",
    "jit",
    "knob",
    "knob_type",
    "moe_grouped_matmul_mode",
    "norm_forward_phase",
    "numerical_note",
    "pygraph",
    "reduction_mode",
    "reshape_mode",
    "scalar_type",
    "set_stream",
    "stats",
    "tensor",
    "tensor_reordering",
    "datatypes",
]
