"""Class pygraph: a graph as the user declares it, and its way through the five steps."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from graphdnn import log
from graphdnn.device import DeviceProps
from graphdnn.dtypes import as_data_type, data_type
from graphdnn.errors import BuildError, KindError, ValidationError, explain
from graphdnn.frontend.arrays import describe
from graphdnn.frontend.attention_fp8_ops import AttentionFp8Ops
from graphdnn.frontend.attention_ops import AttentionOps
from graphdnn.frontend.choose import explicit_device, limited
from graphdnn.frontend.conv_ops import ConvOps
from graphdnn.frontend.copies import Copies
from graphdnn.frontend.declare import Snapshot, take_back
from graphdnn.frontend.enums import scalar_type, tensor_reordering
from graphdnn.frontend.handle import Handle, as_handle, resolve_device
from graphdnn.frontend.norm_ops import NormOps
from graphdnn.frontend.pointwise_ops import PointwiseOps
from graphdnn.frontend.properties import KernelCache
from graphdnn.frontend.quant_ops import GroupedOps, QuantOps
from graphdnn.frontend.random_ops import RandomOps
from graphdnn.frontend.raw_calls import RawCalls
from graphdnn.frontend.resample_ops import ResampleOps
from graphdnn.frontend.softmax_ops import SoftmaxOps
from graphdnn.frontend.structured_ops import StructuredOps
from graphdnn.frontend.tensor import as_integer, as_name, as_number
from graphdnn.frontend.tensor import tensor as Tensor
from graphdnn.frontend.tune import Tuning
from graphdnn.ir import jsontext

if TYPE_CHECKING:
    from graphdnn.ir.opgraph import OperationGraph


class pygraph(
    PointwiseOps, StructuredOps, ConvOps, ResampleOps, NormOps, SoftmaxOps, RandomOps, QuantOps, GroupedOps, AttentionOps, AttentionFp8Ops, Copies,
    Tuning, RawCalls,
):  # fmt: skip
    """A graph of tensor operations.

    Declare tensors and ops, then ``build([heur_mode.A])``, or step by step: ``validate``, ``build_operation_graph``, ``create_execution_plans``,
    ``check_support``, ``build_plans``; then ``execute``. ``print(graph)`` gives its JSON text.
    """

    def __init__(
        self,
        name: str = "test_graph",
        io_data_type: Any = data_type.NOT_SET,
        intermediate_data_type: Any = data_type.NOT_SET,
        compute_data_type: Any = data_type.NOT_SET,
        handle: int | None = None,
        sm_count: int | None = None,
        sm_version: int | None = None,
        kernel_cache: Any = None,
        device_property: Any = None,
        is_dynamic_shape_enabled: bool = False,
        is_override_shape_enabled: bool = False,
        device: Any = None,
        benchmark: bool | None = None,
        deterministic: bool | None = None,
        workspace_limit: int | None = None,
    ) -> None:
        """``io_data_type``: of tensors that are not virtual, where none is set; ``intermediate_data_type``: of virtual ones; ``compute_data_type``:
        what ops calculate in.

        ``device``: "cpu", "cuda:0", "cudasim", or a GPU that need not exist, such as "sm_90". Without it: the handle's device, that of
        ``device_property``, one of compute capability ``sm_version``, GRAPHDNN_DEVICE, the current CUDA device if usable, the CPU. ``name`` is shown
        by ``explain`` and in no other place.

        ``benchmark``: ``build_plans`` takes the fastest plan, from the tuning database or timed once; ``deterministic``: heuristics alone choose,
        among plans with equal bits on every run; None: what GRAPHDNN_BENCHMARK and GRAPHDNN_DETERMINISTIC say. ``workspace_limit``: bytes that any
        plan may need.
        """
        super().__init__()
        self._name = as_name(name)
        self._io, self._intermediate, self._compute = (as_data_type(d) for d in (io_data_type, intermediate_data_type, compute_data_type))
        if kernel_cache is not None and not isinstance(kernel_cache, KernelCache):
            raise KindError(explain("kernel_cache has the wrong type", expected="an object of create_kernel_cache()", found=repr(kernel_cache)[:80]))
        self._handle: Handle | None = None if handle is None else as_handle(handle)
        self._sm_count = None if sm_count is None else as_integer("sm_count", sm_count)
        self._device: DeviceProps | None = explicit_device(device, self._handle, device_property, sm_version, self._sm_count)
        self._kernel_cache: KernelCache | None = kernel_cache
        self._dynamic_shape = bool(is_dynamic_shape_enabled) or kernel_cache is not None
        self._override_shape = bool(is_override_shape_enabled)
        self._set_tuning(benchmark, deterministic, workspace_limit)
        self._filled: list[tuple[Any, str, Any, Any]] = []
        self._opgraph: OperationGraph | None = None
        self._plans = None
        self._variants, self._shape_plans, self._sources = {}, {}, None

    def _get_device(self) -> DeviceProps:
        if self._device is None:
            self._device = limited(resolve_device(None), self._sm_count)
        return self._device

    # -------------------------------------------------------------------------------------------------------------------------- tensors
    def tensor(
        self,
        dim: Any,
        stride: Any = None,
        data_type: Any = data_type.NOT_SET,
        is_virtual: bool = False,
        is_pass_by_value: bool = False,
        ragged_offset: Tensor | None = None,
        reordering_type: tensor_reordering = tensor_reordering.NONE,
        name: str = "",
        uid: int = -1,
        layout: str | Sequence[int] | None = None,
    ) -> Tensor:
        """Declare a tensor of extents ``dim``: with ``stride``, in elements, or with ``layout``, which gives packed strides: "row" (last dim
        fastest), "column" (last two swapped), "channels_last", or the dims in order, fastest first. ``uid`` -1: not assigned yet."""
        made = Tensor().set_name(name).set_dim(dim).set_data_type(data_type).set_is_virtual(is_virtual).set_is_pass_by_value(is_pass_by_value)
        if (stride is None) == (layout is None):
            found = "neither" if stride is None else "both"
            raise KindError(explain("a tensor takes either stride or layout", tensor=name, expected="stride=[...] or layout='row'", found=found))
        made = made.set_stride(stride) if layout is None else made.set_layout(layout)
        made.set_reordering_type(reordering_type)
        if ragged_offset is not None:
            made.set_ragged_offset(self._operand(None, "ragged_offset", ragged_offset))
        if as_integer("uid", uid) != -1:
            made.set_uid(uid)
        return self._adopt(made)

    def tensor_like(self, input: Any, name: str = "") -> Tensor:
        """A tensor declared like ``input``: a graph tensor (of any graph; all but uid and name), or an array of torch, NumPy, CuPy, numba or DLPack
        (dims, strides, data type; one element in host memory is passed by value)."""
        if isinstance(input, Tensor):
            return self._adopt(self._like(input)).set_name(name)
        facts = describe(input)
        made = self._adopt(Tensor()).set_name(name)
        made.dim, made.stride, made.dtype = facts.dim, facts.stride, facts.dtype
        made.by_value = facts.on_cpu and facts.size == 1
        return made

    def _like(self, other: Tensor) -> Tensor:
        if other.ragged_offset is not None and other._owner is not self._owner:
            raise ValidationError(
                explain(
                    "a ragged tensor can be copied within its graph only", tensor=other.name, fix="declare it with tensor(..., ragged_offset=...)"
                )
            )
        made = Tensor()
        for field in ("dim", "stride", "dtype", "virtual", "by_value", "constant", "value", "alignment", "reordering", "ragged_offset"):
            setattr(made, field, getattr(other, field))
        for field in ("vector_count", "vector_dimension", "_number", "symbolic_dim", "symbolic_stride"):
            setattr(made, field, getattr(other, field))
        return made

    def tensor_scalar(self, value: float | int, scalar_type: scalar_type) -> Tensor:
        """A number as a tensor: FLOAT for a float, INT32 for an int. RUNTIME_PARAM: an argument of the kernel, which a variant pack may replace;
        COMPILE_TIME_CONST: printed in the kernel."""
        if not isinstance(scalar_type, _SCALAR_TYPE):
            raise KindError(explain("scalar_type has the wrong type", expected="graphdnn.scalar_type", found=repr(scalar_type)))
        if isinstance(value, bool) or hasattr(value, "__len__"):
            raise KindError(explain("value has the wrong type", expected="a number", found=repr(value)[:80]))
        return self._scalar(as_integer("value", value) if hasattr(value, "__index__") else as_number("value", value), scalar_type)

    def query_tensor_attributes_of_uid(self, uid: int) -> Tensor:
        """The tensor with this uid. BuildError if there is none."""
        number = as_integer("uid", uid)
        for found in self._tensors:
            if found.uid == number:
                return found
        raise BuildError(
            explain("no tensor has this uid", expected=f"one of {sorted(t.uid for t in self._tensors if t.uid is not None)}", found=number)
        )

    # ------------------------------------------------------------------------------------------------------------------------- the steps
    def _changed(self) -> None:
        self._opgraph = self._plans = None
        self._variants, self._shape_plans, self._sources = {}, {}, None

    @contextmanager
    def _step(self) -> Iterator[Snapshot]:
        """Run passes. If they fail, the declarations are as they were and the error carries the JSON text of the graph."""
        before = Snapshot(self)
        with self._noted():
            try:
                yield before
            except BaseException:
                before.restore()
                raise

    def validate(self) -> None:
        """Check every tensor and op; fill in data types, dims and strides that are not set. May be called again after a change or an error.

        Raises ValidationError, NotSupportedError, or BuildError (two tensors of one uid)."""
        from graphdnn.passes import infer

        take_back(self._filled)
        self._filled = []
        with self._step() as before:
            infer.infer(self._nodes, list(self._tensors), infer.Context(self._io, self._intermediate, self._compute))
            self._settle_numbers()
        self._filled = Snapshot(self).changes_since(before)

    def build_operation_graph(self) -> None:
        """Validate, resolve every data type, assign uids, and freeze the graph. BuildError where a data type cannot be known."""
        from graphdnn.passes import canonicalize, check, expand
        from graphdnn.plans import views

        self.validate()
        self._changed()
        with self._step() as before:
            check.check(self._nodes)
            opgraph, _ = canonicalize.canonicalize(expand.expand(self._nodes), list(self._tensors), self._name)
        self._filled += Snapshot(self).changes_since(before)
        self._opgraph = views.laid_out(opgraph)
        self._lint()
        if log.enabled("info"):
            log.graph_json(str(self))

    def _lint(self) -> None:
        """Say where an input's strides overlap: legal (windows), but more often a batch stride that was meant to be larger."""
        if not log.enabled("warning"):
            return
        from graphdnn.opspecs.shapes import overlaps

        assert self._opgraph is not None, "called when it has been built"
        for t in (self._opgraph.tensors[i] for i in self._opgraph.inputs):
            moving = [(d, s) for d, s in zip(t.dim, t.stride, strict=True) if s != 0]
            if not t.ragged and overlaps([d for d, _ in moving], [s for _, s in moving]):
                log.warning(f"input '{t.name}' overlaps itself; intended? dims {list(t.dim)}, strides {list(t.stride)}")

    def build(self, modes: Any = None) -> None:
        """Without arguments: validate and build_operation_graph. With a list of heuristic modes: all five steps."""
        self.build_operation_graph()
        if modes is not None:
            self.create_execution_plans(modes)
            self.check_support()
            self.build_plans()

    # ------------------------------------------------------------------------------------------------------------------------------ text
    def _text(self) -> jsontext.GraphText:
        used = dict.fromkeys(t for n in self._nodes for t in (*n.inputs.values(), *n.outputs.values()))
        used |= dict.fromkeys(t.ragged_offset for t in used if t.ragged_offset is not None)
        sm_count = -1 if self._sm_count is None else self._sm_count
        dtypes = (self._io, self._intermediate, self._compute)
        return jsontext.GraphText(self._nodes, list(used), *dtypes, sm_count, self._dynamic_shape, self._override_shape)

    def __repr__(self) -> str:
        """JSON text, which ``deserialize`` takes."""
        return self._text_with_dims() if self.dims else jsontext.dumps(self._text())

    def key(self) -> int:
        """Hash of the JSON text: equal for graphs that were declared in the same way, in any process. uids and names are part of it."""
        return int.from_bytes(hashlib.sha256(repr(self).encode()).digest()[:8], "little") >> 1


_SCALAR_TYPE = scalar_type
