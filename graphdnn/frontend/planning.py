"""The second half of a graph's life: lists of plans, notes, knobs, build, execute, serialize. ``pygraph`` inherits it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphdnn import log
from graphdnn.device import DeviceProps
from graphdnn.errors import BuildError, ExecutionError, GraphError, KindError, NotSupportedError, ValidationError, explain
from graphdnn.frontend.enums import behavior_note, build_plan_policy, heur_mode, knob_type, numerical_note
from graphdnn.frontend.handle import Handle, as_handle, is_live
from graphdnn.frontend.loaded import LoadedPlans
from graphdnn.frontend.shapes import Shapes
from graphdnn.frontend.tensor import as_integer
from graphdnn.plans import streams

if TYPE_CHECKING:
    from os import PathLike

    from graphdnn.frontend.properties import KernelCache
    from graphdnn.inspection.explain import Explanation
    from graphdnn.ir.opgraph import OperationGraph
    from graphdnn.plans.executor import Executor
    from graphdnn.plans.plan import ExecutionPlan
    from graphdnn.plans.planset import PlanSet
    from graphdnn.targets.cuda_graph import Nodes


@dataclass(frozen=True)
class knob:
    """A knob of an engine: its type, smallest and largest value, and the step between values."""

    type: knob_type
    min_value: int
    max_value: int
    stride: int


def members(what: str, values: Any, kind: type[Any]) -> list[Any]:
    """``values`` as a list of objects of ``kind``; KindError, which names ``what``, for anything else."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise KindError(explain(f"{what} has the wrong type", expected=f"a list of {_of(kind)}", found=repr(values)[:80]))
    found = list(values)
    for v in found:
        if not isinstance(v, kind):
            raise KindError(explain(f"an entry of {what} has the wrong type", expected=_of(kind), found=repr(v)[:80]))
    return found


def _of(kind: type[Any]) -> str:
    return kind.__name__ if kind is str else f"graphdnn.{kind.__name__}"


def stream_of(own: Handle | None, handle: int | None, pack: Mapping[Any, Any], device: DeviceProps) -> int:
    """The stream to run on: of ``handle``, else of the handle ``own`` of the graph, else of the framework whose arrays are in ``pack``.

    ExecutionError for a handle that was destroyed, or is of another device."""
    used = own if handle is None else handle if type(handle) is Handle else as_handle(handle)
    if used is not None:
        if not is_live(used):
            as_handle(used)
        if handle is not None and used.device is not device and (used.device.kind, used.device.index) != (device.kind, device.index):
            rule, fix = "the handle is for another device than the plan", "build the graph with this handle"
            raise ExecutionError(explain(rule, expected=device.text, found=used.device.text, fix=fix))
        if used.stream is not None:
            return used.stream
    return streams.current(pack, device)


class Planning(Shapes):
    """Plans of a graph. ``_plans`` is None until there is a list; a list that was loaded or unpickled holds one built plan."""

    _handle: Handle | None
    _device: DeviceProps | None
    _opgraph: OperationGraph | None
    _kernel_cache: KernelCache | None
    _variants: dict[Any, Any]
    _plan_list: PlanSet | LoadedPlans | None = None
    _stored: bytes | None = None

    @abstractmethod
    def _get_device(self) -> DeviceProps:
        """The device of the graph; chosen when first asked for."""

    @abstractmethod
    def build_operation_graph(self) -> None:
        """Validate and freeze the graph."""

    @abstractmethod
    def _overridden(
        self, plan: ExecutionPlan, pack: Mapping[Any, Any], overrides: tuple[Any, Any, Any], dims: Mapping[Any, int] | None, stream: int
    ) -> ExecutionPlan:
        """The plan for other shapes, which will run on ``stream``. ``overrides``: uids, shapes, strides."""

    @abstractmethod
    def _deterministic(self) -> bool:
        """Whether plans are chosen by heuristics alone, and give equal bits on every run."""

    @abstractmethod
    def _narrowed(self, plans: PlanSet) -> PlanSet:
        """The list without plans that the graph's settings rule out."""

    @abstractmethod
    def _measured_choice(self, plans: PlanSet | LoadedPlans) -> bool:
        """In benchmark mode: build the fastest plan. Whether that was done."""

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Errors of a step go to the log and carry the JSON text of the graph, so that a report can be replayed."""
        try:
            yield
        except GraphError as error:
            error.add_note(f"graph: {self}")
            log.error(str(error))
            raise

    # ------------------------------------------------------------------------------------------------------------------------- plan lists
    @property
    def _plans(self) -> PlanSet | LoadedPlans | None:
        """The list of plans, if there is one. A plan that came with a pickle is loaded here."""
        if self._plan_list is None and self._stored is not None:
            from graphdnn.plans import serialize

            self._plan_list, self._stored = LoadedPlans(serialize.load(self._stored, self._get_device())), None
        return self._plan_list

    @_plans.setter
    def _plans(self, plans: PlanSet | LoadedPlans | None) -> None:
        self._plan_list, self._stored = plans, None

    def _planned(self) -> PlanSet | LoadedPlans:
        plans = self._plans
        if plans is None:
            raise BuildError(
                explain("the graph has no execution plans", expected="plans", found="none", fix="call create_execution_plans([heur_mode.A]) first")
            )
        return plans

    def _choosable(self) -> PlanSet:
        """The list, where there is something to choose."""
        plans = self._planned()
        if isinstance(plans, LoadedPlans):
            raise BuildError(explain("a loaded graph has one plan, already built", fix="call create_execution_plans() to have others"))
        return plans

    def _supported(self, step: str) -> PlanSet | LoadedPlans:
        plans = self._plans
        if plans is None:
            raise NotSupportedError(
                explain(f"{step} needs a list of plans", expected="plans", found="none", fix="call create_execution_plans() first")
            )
        return plans

    def _create(self, modes: Sequence[heur_mode]) -> PlanSet:
        from graphdnn.plans import stored

        assert self._opgraph is not None, "callers check that the operation graph is built"
        graph, device, names, measured = self._opgraph, self._get_device(), [m.name for m in modes], not self._deterministic()
        if self._kernel_cache is None and not self.dims:
            return self._narrowed(stored.create(graph, device, names, measured))
        from graphdnn.plans import candidates

        store = None if self._kernel_cache is None else self._kernel_cache.store
        return self._narrowed(candidates.create(graph, device, names, store=store, measured=measured))

    def create_execution_plans(self, modes: Sequence[heur_mode]) -> None:
        """List candidate plans, best first, for a list of heuristic modes. NotSupportedError, with every rejection, if no engine takes the graph."""
        if not isinstance(modes, list | tuple):
            raise KindError(explain("modes has the wrong type", expected="a list of graphdnn.heur_mode", found=repr(modes)))
        found = members("modes", modes, heur_mode)
        if not found:
            raise ValidationError(explain("modes is empty", expected="at least one graphdnn.heur_mode", found=modes))
        if self._opgraph is None:
            raise NotSupportedError(
                explain("create_execution_plans needs an operation graph", found="none", fix="call build_operation_graph() first")
            )
        with self._noted():
            self._plans = self._create(found)
        self._variants, self._shape_plans = {}, {}
        log.info(f"{self.get_execution_plan_count()} plans for {self._get_device().text}, the first is {self.get_plan_name_at_index(0)}")

    def _custom(self) -> PlanSet:
        """The list that takes custom plans and knows the engines; an empty one if no heuristics have been asked."""
        if self._opgraph is None:
            raise BuildError(explain("engines are known once there is an operation graph", found="none", fix="call build_operation_graph() first"))
        plans = self._plans
        return self._create(()) if plans is None or isinstance(plans, LoadedPlans) else plans

    def create_execution_plan(self, engine_id: int, knobs: Mapping[knob_type, int]) -> None:
        """Append a plan that uses engine ``engine_id`` with ``knobs`` in the costliest part that it takes. BuildError if it takes none."""
        if not isinstance(knobs, Mapping) or not all(isinstance(k, knob_type) for k in knobs):
            raise KindError(explain("knobs has the wrong type", expected="a dict of graphdnn.knob_type to int", found=repr(knobs)[:80]))
        engine = as_integer("engine_id", engine_id)
        plans = self._custom()
        plans.add_custom(engine, {k.name: as_integer(f"knob {k.name}", v) for k, v in knobs.items()})
        self._plans = plans

    def get_engine_count(self) -> int:
        """Number of engines: ids are 0 to count - 1. Not every engine takes every graph."""
        return self._custom().engine_count()

    def get_knobs_for_engine(self, engine: int) -> list[knob]:
        """Knobs of an engine for this graph. BuildError if it does not take it."""
        found = self._custom().knobs_for_engine(as_integer("engine", engine))
        return [knob(knob_type[k.type], k.min_value, k.max_value, k.stride) for k in found]

    def get_execution_plan_count(self) -> int:
        """Number of plans; 0 before they are created."""
        return 0 if self._plans is None else self._plans.count()

    def get_plan_name_at_index(self, index: int) -> str:
        """Name of a plan: the engine and knobs of each region, as in "r0:eng3_k12=1|r1:eng0"."""
        return self._planned().name_at(as_integer("index", index))

    # --------------------------------------------------------------------------------------------------------------------- notes, filters
    def get_behavior_notes(self) -> list[behavior_note]:
        """Notes of the built plan, or of the first one if none is built yet."""
        plans = self._planned()
        return self.get_behavior_notes_for_plan_at_index(max(plans.chosen_index, 0))

    def get_behavior_notes_for_plan_at_index(self, index: int) -> list[behavior_note]:
        """Notes of one plan."""
        return [behavior_note[n.name] for n in self._planned().plan_at(as_integer("index", index)).behavior_notes]

    def select_behavior_notes(self, notes: Sequence[behavior_note]) -> None:
        """Keep only plans that have all these notes."""
        self._choosable().select_behavior_notes(members("notes", notes, behavior_note))

    def deselect_behavior_notes(self, notes: Sequence[behavior_note]) -> None:
        """Leave out plans that have any of these notes."""
        self._choosable().deselect_behavior_notes(members("notes", notes, behavior_note))

    def select_numeric_notes(self, notes: Sequence[numerical_note]) -> None:
        """Keep only plans that have all these notes."""
        self._choosable().select_numeric_notes(members("notes", notes, numerical_note))

    def deselect_numeric_notes(self, notes: Sequence[numerical_note]) -> None:
        """Leave out plans that have any of these notes."""
        self._choosable().deselect_numeric_notes(members("notes", notes, numerical_note))

    def deselect_engines(self, names: Sequence[str]) -> None:
        """Leave out plans whose name holds one of these texts, such as "eng4"."""
        self._choosable().deselect_engines(members("names", names, str))

    def deselect_workspace_greater_than(self, workspace: int) -> None:
        """Leave out plans that need more than ``workspace`` bytes."""
        self._choosable().deselect_workspace_greater_than(as_integer("workspace", workspace))

    # ------------------------------------------------------------------------------------------------------------------- support and build
    def check_support(self) -> None:
        """Return if at least one plan is supported; compiles nothing. NotSupportedError, with every reason, if none is."""
        with self._noted():
            self._supported("check_support").check_support()

    def build_plans(self, policy: build_plan_policy = build_plan_policy.HEURISTICS_CHOICE) -> None:
        """Compile the best plan that compiles, or with ALL every plan."""
        if not isinstance(policy, build_plan_policy):
            raise KindError(explain("policy has the wrong type", expected="graphdnn.build_plan_policy", found=repr(policy)))
        with self._noted():
            plans = self._supported("build_plans")
            if self.dims or policy is build_plan_policy.ALL or not self._measured_choice(plans):
                plans.build(policy.name, self._shaped)

    def build_plan_at_index(self, index: int) -> None:
        """Compile one plan; ``execute`` uses it from now on."""
        with self._noted():
            self._planned().build_at(as_integer("index", index), self._shaped)

    @property
    def plan(self) -> ExecutionPlan:
        """The plan that ``execute`` uses: its source, PTX, machine code, resources. BuildError before one is built."""
        return self._planned().chosen

    def get_workspace_size(self) -> int:
        """Bytes of workspace that the built plan needs. BuildError before one is built."""
        if self._plans is None:
            raise BuildError(explain("Plan index -1 is invalid.", expected="a built plan", found="none", fix="call build_plans() first"))
        return self._largest_workspace(self._plans.chosen)

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        """Bytes of workspace that one plan needs."""
        return self._largest_workspace(self._planned().plan_at(as_integer("index", index)))

    # ------------------------------------------------------------------------------------------------------------------------------ running
    def _stream(self, handle: int | None, pack: Mapping[Any, Any], plan: ExecutionPlan) -> int:
        return stream_of(self._handle, handle, pack, plan.device)

    def execute(
        self,
        tensor_to_device_buffer: Mapping[Any, Any],
        workspace: Any,
        handle: int | None = None,
        override_uids: Sequence[int] | None = None,
        override_shapes: Sequence[Sequence[int]] | None = None,
        override_strides: Sequence[Sequence[int]] | None = None,
        dims: Mapping[Any, int] | None = None,
    ) -> None:
        """Run the built plan.

        ``tensor_to_device_buffer``: tensor, uid or name -> array (torch, NumPy on a CPU, CuPy, numba, DLPack), address, or number for a by-value
        tensor; None keys and unknown uids are skipped. ``workspace``: array or address of ``get_workspace_size()`` bytes, None if that is 0.
        ``dims``: extents of the graph's dims (graphdnn.Dim, by name or object), where the shapes of the arrays do not tell them.
        A CPU plan has finished on return; a CUDA plan is enqueued on the handle's stream of this moment.
        """
        plans = self._plan_list
        plan = None if plans is None else plans.ready
        if plan is None:
            plan = self._planned().chosen
        known = None if override_uids or dims or self._shape_plans else plan.known
        if known is not None:
            used = self._handle if handle is None else handle
            if known.run(tensor_to_device_buffer, workspace, used):
                return
        self._run(plan, tensor_to_device_buffer, workspace, handle, (override_uids, override_shapes, override_strides), dims)
        if known is not None:
            known.learn(tensor_to_device_buffer, workspace, used)

    def _run(
        self,
        plan: ExecutionPlan,
        pack: Mapping[Any, Any],
        workspace: Any,
        handle: int | None,
        overrides: tuple[Any, Any, Any],
        dims: Mapping[Any, int] | None,
    ) -> None:
        """Execute ``plan``, or its like for the shapes of this call. ``overrides``: uids, shapes, strides."""
        stream = self._stream(handle, pack, plan)
        if overrides[0] is not None:
            plan = self._overridden(plan, pack, overrides, dims, stream)
        elif self._shape_plans or dims:
            plan = self._for_call(plan, pack, dims, stream)
        plan.execute(pack, workspace, stream)

    def bind(
        self,
        tensor_to_device_buffer: Mapping[Any, Any],
        workspace: Any = None,
        handle: int | None = None,
        dims: Mapping[Any, int] | None = None,
    ) -> Executor:
        """The built plan with these buffers, checked and laid out once, for many calls: ``run = graph.bind(pack, workspace); run()``.

        The arguments are those of :meth:`execute`, and so are the errors. Calls go to the handle's stream of the moment of ``bind``. The executor
        of a graph with dims has the extents of this pack: an ``update`` with arrays of other ones is a ValidationError.
        """
        plan, pack = self._planned().chosen, tensor_to_device_buffer
        stream = self._stream(handle, pack, plan)
        shaped = self._for_call(plan, pack, dims, stream) if self._shape_plans or dims else plan
        return shaped.bind(pack, workspace, stream, self._same_extents(pack, dims) if plan.name in self._shape_plans else None)

    def execute_plan_at_index(
        self,
        tensor_to_device_buffer: Mapping[Any, Any],
        workspace: Any,
        index: int,
        handle: int | None = None,
        override_uids: Sequence[int] | None = None,
        override_shapes: Sequence[Sequence[int]] | None = None,
        override_strides: Sequence[Sequence[int]] | None = None,
        dims: Mapping[Any, int] | None = None,
    ) -> None:
        """Run one plan of the list, which must have been built; see :meth:`execute`."""
        plan = self._planned().plan_at(as_integer("index", index))
        if not plan.built:
            raise BuildError(
                explain(f"plan {index} ({plan.name}) is not built", fix="call build_plans(build_plan_policy.ALL) or build_plan_at_index(index) first")
            )
        self._run(plan, tensor_to_device_buffer, workspace, handle, (override_uids, override_shapes, override_strides), dims)

    def populate_cuda_graph(
        self,
        handle: int | None,
        tensor_to_device_buffer: Mapping[Any, Any],
        workspace: Any,
        cuda_graph: int,
        dims: Mapping[Any, int] | None = None,
    ) -> None:
        """Write the built plan into an empty CUDA graph, as a chain of kernel and memset nodes: nothing runs, no stream is used, nothing is captured.

        ``handle``: None, or one of the plan's device; ``tensor_to_device_buffer``, ``workspace``, ``dims``: as in :meth:`execute`; the nodes hold
        addresses and numbers of this call, and the caller keeps the memory alive. ``cuda_graph``: address of a CUgraph (``cudaGraph_t``), to be
        instantiated or added to another as a child graph. NotSupportedError for a plan of no CUDA device, ExecutionError for a graph that has
        nodes."""
        self._graph_nodes(handle, tensor_to_device_buffer, workspace, dims).populate(as_integer("cuda_graph", cuda_graph))

    def update_cuda_graph(
        self,
        handle: int | None,
        tensor_to_device_buffer: Mapping[Any, Any],
        workspace: Any,
        cuda_graph: int,
        dims: Mapping[Any, int] | None = None,
    ) -> None:
        """Give other buffers and numbers to the nodes that :meth:`populate_cuda_graph` of the same plan has written; see there.

        An instantiated graph takes them by cuGraphExecUpdate. ExecutionError, and no change, for a graph that this plan has not populated."""
        self._graph_nodes(handle, tensor_to_device_buffer, workspace, dims).update(as_integer("cuda_graph", cuda_graph))

    def _graph_nodes(self, handle: int | None, pack: Mapping[Any, Any], workspace: Any, dims: Mapping[Any, int] | None) -> Nodes:
        from graphdnn.plans import cuda_graphs

        plan = self._planned().chosen
        stream = self._stream(handle, pack, plan)
        return cuda_graphs.nodes(self._for_call(plan, pack, dims, stream) if self._shape_plans or dims else plan, pack, workspace)

    # -------------------------------------------------------------------------------------------------------------------------- looking in
    def _looked_at(self) -> PlanSet | LoadedPlans:
        """The list of plans, or one made for the purpose and not kept."""
        plans = self._plans
        if plans is not None:
            return plans
        if self._opgraph is None:
            self.build_operation_graph()
        return self._create((heur_mode.A,))

    def explain(self) -> Explanation:
        """What the plan does and why: kernels, memory traffic, operations, choices, cuts, rejections. ``print`` it, or take its ``data``.

        The built plan, or before a build the one that comes first; a graph without plans is planned for this, without keeping the plans."""
        from graphdnn.inspection import explain as report

        plans = self._looked_at()
        assert self._opgraph is not None, "a graph with plans has an operation graph"
        return report.explain(self._opgraph, plans.chosen if isinstance(plans, LoadedPlans) else plans)

    def draw(self, path: str | PathLike[str] | None = None, format: str | None = None) -> str | bytes:
        """A picture of the graph and of what is fused in the plan (see :meth:`explain` for which plan), written to ``path`` if there is one.

        ``format``: "svg", "png", "dot" or "mermaid"; by default what the suffix of ``path`` says, else "svg"."""
        from graphdnn.inspection.draw import draw

        plans = self._looked_at()
        plan = plans.plan_at(max(plans.chosen_index, 0))
        return draw(plan.graph, plan.partition, path, format, [c.name for c in plan.choices])
