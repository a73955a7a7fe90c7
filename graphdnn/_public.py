"""Where every public name lives. Read by ``graphdnn/__init__.py``, which resolves names on first use, and by the stub generator."""

from __future__ import annotations

_MODULES: dict[str, tuple[str, ...]] = {
    "graphdnn.dtypes": ("data_type",),
    "graphdnn.errors": ("BuildError", "ExecutionError", "GraphError", "KindError", "NotSupportedError", "SerializationError", "ValidationError")
    + ("cudnnGraphNotSupportedError",),
    "graphdnn.frontend.ahead": ("compile_for",),
    "graphdnn.frontend.decorators": ("graph", "graph_cache", "jit"),
    "graphdnn.frontend.enums": ("attention_implementation", "behavior_note", "build_plan_policy", "diagonal_alignment", "heur_mode", "knob_type")
    + ("moe_grouped_matmul_mode", "norm_forward_phase", "numerical_note", "reshape_mode", "scalar_type", "tensor_reordering"),
    "graphdnn.frontend.handle": ("backend_version", "backend_version_string", "create_handle", "destroy_handle", "get_stream", "set_stream"),
    "graphdnn.frontend.pipeline": ("Pipeline",),
    "graphdnn.frontend.planning": ("knob",),
    "graphdnn.frontend.properties": ("create_device_properties", "create_kernel_cache"),
    "graphdnn.frontend.pygraph": ("pygraph",),
    "graphdnn.frontend.reduction_modes": ("reduction_mode",),
    "graphdnn.frontend.symbols": ("Dim",),
    "graphdnn.frontend.tensor": ("tensor",),
    "graphdnn.frontend.wrapper": ("Graph",),
    "graphdnn.plans.cache": ("stats",),
}
_RENAMED = {"get_last_error_string": ("graphdnn.errors", "last_error_string")}
SUBMODULES = ("datatypes",)
"""Public submodules."""
ALIASES = ("_compiled_module", "_pybind_module")
"""Where scripts reach for names that the cuDNN Frontend does not export: here its other names."""

WHERE: dict[str, tuple[str, str]] = {name: (module, name) for module, names in _MODULES.items() for name in names} | _RENAMED
"""Public name -> (module, name there)."""
NAMES: tuple[str, ...] = ("__version__", *sorted(WHERE), *SUBMODULES)
"""All public names."""
