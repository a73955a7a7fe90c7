"""Graphs as bytes and as copies: serialize and deserialize, pickle and deepcopy, and the variant of a graph with other shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from graphdnn.errors import BuildError, KindError, NotSupportedError, SerializationError, ValidationError, explain
from graphdnn.frontend.enums import heur_mode
from graphdnn.frontend.handle import as_handle
from graphdnn.frontend.loaded import LoadedPlans, declarations
from graphdnn.frontend.shapes import Shapes
from graphdnn.frontend.tensor import as_dims
from graphdnn.frontend.tensor import tensor as Tensor
from graphdnn.ir import jsontext
from graphdnn.ir.layout import like
from graphdnn.ir.tensor import Dims, TensorDecl
from graphdnn.opspecs import registry

if TYPE_CHECKING:
    from graphdnn.frontend.pygraph import pygraph
    from graphdnn.plans.plan import ExecutionPlan

Overrides = tuple[tuple[int, Dims, Dims], ...]
"""(uid, dims, strides)"""
Given = dict[int, tuple[Dims, Dims | None]]
"""What a call says: dims and strides by uid."""
MAX_VARIANTS = 512
"""Plans of overridden shapes that are kept; the oldest goes first."""


def plan_bytes(data: Any) -> bytes:
    """``data``, bytes or a list of integers, as bytes. SerializationError for integers that are no bytes, KindError for anything else."""
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data)
    if isinstance(data, Sequence) or hasattr(data, "tobytes"):
        try:
            return bytes(data)
        except (TypeError, ValueError):
            raise SerializationError(explain("not a serialized plan", expected="a list of integers from 0 to 255", found=repr(data)[:60])) from None
    raise KindError(explain("data has the wrong type", expected="the list of serialize(), bytes, or the JSON text of a graph", found=repr(data)[:80]))


class Copies(Shapes):
    """What a graph can do with itself as data."""

    _io: Any
    _intermediate: Any
    _compute: Any
    _sm_count: int | None
    _dynamic_shape: bool
    _override_shape: bool
    _handle: Any
    _device: Any
    _kernel_cache: Any
    _filled: list[tuple[Any, str, Any, Any]]
    _opgraph: Any
    _plans: Any

    # -------------------------------------------------------------------------------------------------------------------------- as bytes
    def serialize(self) -> list[int]:
        """The built plan as a list of bytes: graph, engines, knobs, launch recipe, source, machine code. BuildError before a plan is built."""
        from graphdnn.plans import serialize

        if self._plans is None:
            raise BuildError(explain("only a built plan can be serialized", expected="a plan", found="none", fix="call build([heur_mode.A]) first"))
        return list(serialize.dump(self._plans.chosen))

    def deserialize(self, handle_: Any = None, data: Any = None) -> None:
        """``deserialize(data)`` or ``deserialize(handle, data)``: become the stored graph. Executes nothing.

        From the data of ``serialize()``, or of ``compile_for`` (then the plan for the device at hand), the plan is ready to run; tensors are
        addressed by uid or name. From the JSON text of a graph, the usual steps follow. SerializationError for damaged data or a plan of another
        version or device, ValidationError for a malformed text."""
        if data is None:
            handle_, data = None, handle_
        handle = None if handle_ is None else as_handle(handle_)
        if handle is not None and self._device is not None and (handle.device.kind, handle.device.index) != (self._device.kind, self._device.index):
            raise ValidationError(explain("the handle and the graph disagree", expected=self._device.text, found=handle.device.text))
        if isinstance(data, str):
            self._become(jsontext.loads(data, registry.declared, Tensor))
            self._take_dims(data)
        else:
            self._load(plan_bytes(data), self._device if handle is None else handle.device)
        if handle is not None:
            self._handle, self._device = handle, handle.device

    def _replace(self, tensors: Sequence[TensorDecl], nodes: list[Any]) -> None:
        """Other declarations instead of the present ones."""
        self._tensors, self._nodes, self._filled = {}, nodes, []
        self._changed()
        for t in tensors:
            assert isinstance(t, Tensor), "made by the factory that was given"
            self._adopt(t)

    def _become(self, text: jsontext.GraphText) -> None:
        self._replace(text.tensors, text.nodes)
        self._io, self._intermediate, self._compute = text.io, text.intermediate, text.compute
        self._sm_count = None if text.sm_count < 0 else text.sm_count
        self._dynamic_shape |= text.dynamic_shape
        self._override_shape |= text.override_shape
        self._from_text = True

    def _load(self, data: bytes, device: Any) -> None:
        from graphdnn.plans import serialize

        plan = serialize.load(data, device)
        self._replace(*declarations(plan.graph))
        self._opgraph, self._plans, self._device = plan.graph, LoadedPlans(plan), plan.device

    # ------------------------------------------------------------------------------------------------------------------ pickle, deepcopy
    def _state(self, with_plan: bool) -> dict[str, Any]:
        from graphdnn.plans import serialize

        state = self.__dict__ | {"_nodes": list(self._nodes), "_tensors": dict(self._tensors), "_filled": list(self._filled)}
        plans = state.pop("_plan_list")
        if with_plan and plans is not None and plans.chosen_index >= 0 and not plans.chosen.shaped:
            state["_stored"] = serialize.dump(plans.chosen)
        state["_plan_list"], state["_variants"], state["_shape_plans"], state["_sources"] = None, {}, {}, None
        return state

    def __getstate__(self) -> dict[str, Any]:
        """Declarations, settings, and the chosen plan in serialized form; it is loaded when it is first used. Other plans are not kept, nor is that
        of a graph with dims, which is built again."""
        return self._state(True)

    # ------------------------------------------------------------------------------------------------------------------------ other shapes
    def _overridden(
        self, plan: ExecutionPlan, pack: Mapping[Any, Any], overrides: tuple[Any, Any, Any], dims: Mapping[Any, int] | None, stream: int
    ) -> ExecutionPlan:
        """The plan for other shapes: built on first use, kept for the next. ExecutionError where it would be built while ``stream`` is captured.

        Shapes of tensors that are declared with dims tell the extents of the dims; what then still differs is overridden."""
        given = _given(*overrides)
        told: dict[int | None, Dims] = {uid: dim for uid, (dim, _) in given.items()}
        base = self._for_call(plan, pack, dims, stream, told)
        declared = self._at_shape(base) if self._shape_plans else {t.uid: t for t in self._tensors}
        wanted = self._differing(given, {uid: (t.dim, t.stride) for uid, t in declared.items()})
        if not wanted:
            return base
        if not self._override_shape:
            raise ValidationError(
                explain(
                    "shapes cannot be overridden", expected="the declared shapes", found=wanted[0][1], fix="pygraph(is_override_shape_enabled=True)"
                )
            )
        if isinstance(self._plans, LoadedPlans) and not self._filled:
            raise NotSupportedError(explain("a deserialized plan has the shapes it was built for", found=wanted[0][1], fix="build the graph here"))
        values = self._values(pack, dims or {}, told) if self._shape_plans else ()
        variant = self._variants.get((values, wanted))
        if variant is None:
            plan.refuse_in_capture(stream, "the plan for the overridden shapes is not built yet", "execute() once with these shapes")
            while len(self._variants) >= MAX_VARIANTS:
                del self._variants[next(iter(self._variants))]
            variant = self._variants[values, wanted] = self._with_shapes(values, wanted)
        return variant.plan

    @staticmethod
    def _differing(given: Given, known: Mapping[int | None, tuple[Dims | None, Dims | None]]) -> Overrides:
        """Every tensor whose shape differs from the ``known`` one. Unknown uids and shapes of another rank are skipped; without strides, or with
        strides of another rank, the order of the known ones is kept."""
        found = []
        for uid, (dim, stride) in given.items():
            own_dim, own_stride = known.get(uid, (None, None))
            if own_dim is None or own_stride is None or len(dim) != len(own_dim):
                continue
            if stride is None or len(stride) != len(dim):
                stride = own_stride if dim == own_dim else like(dim, own_stride)
            if (dim, stride) != (own_dim, own_stride):
                found.append((uid, dim, stride))
        return tuple(sorted(found, key=lambda o: o[0]))

    _variants: dict[tuple[tuple[int, ...], Overrides], pygraph]

    _from_text: bool = False

    def _with_shapes(self, values: Sequence[int], wanted: Overrides) -> pygraph:
        """A graph of fixed shapes: those for ``values`` of the dims, but for those that are ``wanted``. A text holds what was inferred beside what
        was declared: outputs of a graph that was read from one follow from their inputs wherever they did."""
        from graphdnn.passes import infer

        twin = self._twin()
        for t in infer.inferable(twin._nodes) if self._from_text else ():
            t.dim = t.stride = None
        named = dict(zip(self.dims, values, strict=True))
        for t in twin._tensors:
            t.at(named)
            t.symbolic_dim = t.symbolic_stride = None
        by_uid: Mapping[int | None, Tensor] = {t.uid: t for t in twin._tensors}
        for uid, dim, stride in wanted:
            by_uid[uid].dim, by_uid[uid].stride = dim, stride
        twin.build([heur_mode.A, heur_mode.FALLBACK])
        return twin


def _given(uids: Any, shapes: Any, strides: Any) -> Given:
    """Shapes and strides by uid. ValidationError for lists of different lengths, and for a tensor that is given two shapes."""
    uids = as_dims("override_uids", uids)
    if uids and (shapes is None or len(shapes) != len(uids) or (strides is not None and len(strides) != len(uids))):
        raise ValidationError(explain("override_uids, override_shapes and override_strides go together", expected="lists of one length"))
    found: Given = {}
    for i, uid in enumerate(uids):
        one = as_dims("an override shape", shapes[i]), None if strides is None else as_dims("override strides", strides[i])
        if found.setdefault(uid, one) != one:
            rule, fix = f"the tensor of uid {uid} is given two shapes", "name every uid once"
            first = found[uid]
            raise ValidationError(explain(rule, expected=f"dims {first[0]} and strides {first[1]}", found=f"{one[0]} and {one[1]}", fix=fix))
    return found
