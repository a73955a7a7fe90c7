"""One plan of a graph: lowered when something of it is asked for, compiled by ``build``, loaded once, run by any number of threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from graphdnn import device as devices
from graphdnn import env, log, targets
from graphdnn.codegen.spec import Recipe
from graphdnn.device import DeviceProps
from graphdnn.errors import BuildError, ExecutionError, ValidationError, explain
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.opspecs.fast_conv import FastConv
from graphdnn.passes.regions import Partition, Region
from graphdnn.plans import cache, heuristics, overlap, slots, variant_pack
from graphdnn.plans.assemble import assemble
from graphdnn.plans.cache import Kernel, KernelStore
from graphdnn.plans.heuristics import Candidate, Option
from graphdnn.plans.variant_pack import Binder
from graphdnn.targets.base import Executable

if TYPE_CHECKING:
    from graphdnn.codegen.parametric import Forms
    from graphdnn.plans.executor import Executor
    from graphdnn.plans.known import Known
    from graphdnn.targets.cuda_launch import CudaExecutable

Owned = tuple[tuple[int, ...], ...]
"""For each region the indexes of its kernels in the recipe."""
Lowered = tuple[Recipe, Owned]


class Note(str):
    """Name of a behavior_note or numerical_note member."""

    @property
    def name(self) -> str:
        """The text itself, as the members of the API's enums have it."""
        return str(self)


@dataclass(frozen=True)
class Choice:
    """What runs one region: engine id and name, KERNEL_CFG, the knobs as text, estimated seconds."""

    engine: int
    name: str
    index: int
    knobs: str
    cost: float


class ExecutionPlan:
    """A partition of the graph with an engine and knobs for each region. Immutable once built; threads may share it."""

    def __init__(
        self,
        graph: OperationGraph,
        device: DeviceProps,
        partition: Partition,
        choices: tuple[Choice, ...],
        name: str,
        cost: float,
        notes: tuple[str, ...],
        lower: Callable[[], tuple[Recipe, Owned]],
        *,
        kernels: tuple[Kernel, ...] | None = None,
        candidate: Candidate | Callable[[], Candidate] | None = None,
        store: KernelStore | None = None,
        shaped: bool = False,
    ) -> None:
        """Use :meth:`of`, or ``serialize.load``. ``kernels``: compiled before. ``candidate``: what the plan was made from, or what
        tells it when it is needed, where that is known. ``shaped``: the plan is for one shape of a graph with dims."""
        self.shaped = shaped
        self.graph = graph
        self.device = device
        self.partition = partition
        self.choices = choices
        self.name = name
        self.cost = cost
        self.numeric_notes: tuple[Note, ...] = tuple(Note(n) for n in notes)
        native = (Note("SUPPORTS_CUDA_GRAPH_NATIVE_API"),) if device.kind == "cuda" else ()
        self.behavior_notes: tuple[Note, ...] = (Note("RUNTIME_COMPILATION"), *native)
        self._lower = lower
        self._candidate = candidate
        self._store = store
        self._lowered: tuple[Recipe, Owned] | None = None
        self._kernels = kernels
        self._ready: tuple[Binder, Executable] | None = None
        self.known: Known | None = None
        self._elsewhere: dict[int, ExecutionPlan] = {}
        self._followed = False
        self.forms: Forms | None = None  # of a graph with dims: kernels for less aligned buffers are shared by its shapes too
        self._guards: dict[tuple[tuple[int, int], ...], ExecutionPlan] = {}
        self._lock = threading.RLock()

    @classmethod
    def of(
        cls, graph: OperationGraph, device: DeviceProps, candidate: Candidate, store: KernelStore | None = None, lowered: Lowered | None = None
    ) -> ExecutionPlan:
        """The plan of a candidate. Lowers nothing yet. ``lowered``: what it is lowered to, where that is not what its engines say."""
        choices = tuple(Choice(o.engine.id, o.engine.name, o.index, repr(o.knobs), float(o.cost)) for o in candidate.options)
        return cls(
            graph,
            device,
            candidate.partition,
            choices,
            candidate.name,
            candidate.cost,
            candidate.numeric_notes,
            lambda: lowered or assemble(graph, device, candidate),
            candidate=candidate,
            store=store,
            shaped=lowered is not None,
        )

    def sharing(self, forms: Forms) -> ExecutionPlan:
        """The same plan with kernels that plans of other sizes share. A plan that is built or was loaded stays as it is."""
        candidate = self._made_from() if self._kernels is None else None
        if candidate is None:
            return self
        from graphdnn.codegen.parametric import parametric

        lowered = parametric(self.recipe, self.region_kernels, forms)
        made = ExecutionPlan.of(self.graph, self.device, candidate, self._store, lowered)
        made.shaped = False
        return made

    def _made_from(self) -> Candidate | None:
        if callable(self._candidate):
            self._candidate = self._candidate()
        return self._candidate

    @property
    def candidate(self) -> Candidate:
        """What the plan was made from. BuildError for a loaded plan."""
        found = self._made_from()
        if found is None:
            raise BuildError(explain(f"plan '{self.name}' was loaded: its engines are not known", fix="build the graph again"))
        return found

    @property
    def algorithms(self) -> dict[int, FastConv]:
        """Nodes whose sums are not made product by product, and how they are: for ``reference.run_with_error``. Empty for a loaded plan."""
        found = self._made_from()
        if found is None:
            return {}
        made = ((r, o.engine.algorithm(o.knobs)) for r, o in zip(self.partition.regions, found.options, strict=True))
        return {r.anchors[0]: how for r, how in made if how is not None}

    # -- lowering, building, loading ------------------------------------------------------------------------------------------------------
    def _parts(self) -> tuple[Recipe, Owned]:
        if self._lowered is None:
            with self._lock:
                if self._lowered is None:
                    self._lowered = self._lower()
        return self._lowered

    @property
    def recipe(self) -> Recipe:
        """The launch recipe. Lowers the plan when first asked for; compiles nothing."""
        return self._parts()[0]

    @property
    def region_kernels(self) -> Owned:
        """For each region the indexes of its kernels in ``recipe.kernels``."""
        return self._parts()[1]

    @property
    def workspace_bytes(self) -> int:
        """Bytes that execute needs as workspace. Compiles nothing."""
        return self.recipe.workspace

    @property
    def built(self) -> bool:
        """Whether the kernels are compiled."""
        return self._kernels is not None

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Compiled kernels, in the order of ``recipe.kernels``. BuildError before build."""
        if self._kernels is None:
            raise BuildError(explain(f"plan '{self.name}' is not built", fix="call build_plans() or build_plan_at_index() first"))
        return self._kernels

    def build(self) -> ExecutionPlan:
        """Get every kernel from a cache or compile it, and load them unless the device is only a described one. BuildError, ExecutionError."""
        with self._lock:
            if self._kernels is None:
                target = targets.get(self.device)
                self._kernels = tuple(cache.get(spec, target, self._store) for spec in target.specs(self.recipe))
            if not self.device.described:
                self.load()
        return self

    def load(self) -> tuple[Binder, Executable]:
        """Make the plan runnable. ExecutionError for a described device, or without a driver."""
        with self._lock:
            if self._ready is None:
                kernels = self.kernels
                if self.device.described:
                    raise ExecutionError(
                        explain(
                            f"plan '{self.name}' was built for a described device and cannot run here",
                            expected="a device that is present",
                            found=f"{self.device.text} ({self.device.name})",
                            fix="serialize() it and deserialize() it on a machine with such a GPU, or build with device='cpu'",
                        )
                    )
                executable, binder = targets.get(self.device).load(self.recipe, [k.binary for k in kernels]), self.binder()
                if hasattr(executable, "set_extents"):  # the simulator checks every access
                    spans = {s.index: (-s.below, s.nbytes) for s in binder.slots if not self.graph.tensors[s.index].ragged}
                    executable.set_extents(spans, self.workspace_bytes)
                if env.nvtx():
                    from graphdnn.plans import ranges

                    executable = ranges.within(executable, self.name)
                executable.arrange(binder.ids)
                if executable.native is not None:
                    from graphdnn.plans.known import Known

                    self.known = Known(binder, cast("CudaExecutable", executable))
                self._ready = (binder, executable)
            return self._ready

    def binder(self) -> Binder:
        """What binds packs for this plan. Lowers it, compiles nothing."""
        graph, regions = self.graph, self.partition
        return slots.prepare(graph, self.device, self.recipe, overlap.elementwise_space(graph, regions), overlap.inplace_pairs(graph, regions))

    # -- running --------------------------------------------------------------------------------------------------------------------------
    def execute(self, pack: variant_pack.Pack, workspace: Any = None, stream: int = 0) -> None:
        """Check and bind the pack, then enqueue the steps on ``stream`` (an address; a CPU finishes before this returns).

        ValidationError or KindError for a pack that does not fit: nothing has run then. ExecutionError if running fails.
        """
        binder, executable = self._ready or self.ready(stream)
        try:
            addresses, numbers, at = binder.place(pack, workspace)
        except (variant_pack.Misaligned, variant_pack.Elsewhere) as error:
            self._instead(pack, workspace, stream, error).execute(pack, workspace, stream)
            return
        executable.run_at(addresses, numbers, at, stream, binder.rooms(pack) if binder.packed else None)

    def bind(
        self, pack: variant_pack.Pack, workspace: Any = None, stream: Any = None, check: Callable[[variant_pack.Pack], object] | None = None
    ) -> Executor:
        """An :class:`Executor`: the plan with these buffers, for many calls. Raises as ``execute``; BuildError before build.

        ``stream``: a CUstream as int, or a stream object; None: the current one of the framework whose arrays these are, 0 for other buffers.
        ``check``: raises for a pack, by uid, that must not be bound although it fits."""
        from graphdnn.plans.executor import Executor

        return Executor(self, pack, workspace, stream, check)

    def placed(self, pack: variant_pack.Pack, workspace: Any, stream: int | None) -> tuple[ExecutionPlan, variant_pack.Placed]:
        """The plan that ``execute`` would run for these buffers, itself as a rule, and what its binder says of them."""
        try:
            return self, self.load()[0].place(pack, workspace)
        except (variant_pack.Misaligned, variant_pack.Elsewhere) as error:
            return self._instead(pack, workspace, stream, error).placed(pack, workspace, stream)

    def _instead(self, pack: variant_pack.Pack, workspace: Any, stream: int | None, error: ValidationError) -> ExecutionPlan:
        """The plan for buffers that this one does not take, or ``error`` where there is none."""
        if isinstance(error, variant_pack.Misaligned):
            return self.guarded(pack, workspace, stream, error)
        assert isinstance(error, variant_pack.Elsewhere)
        return self._on(error.index, stream, error)

    def _on(self, index: int, stream: int | None, error: variant_pack.Elsewhere) -> ExecutionPlan:
        """This plan on GPU ``index``, loaded there when it is first needed. ``error`` for a GPU of another architecture, and in a plan that has
        followed its tensors already: they are on several GPUs then. ExecutionError where the load would happen inside a capture."""
        if self._followed or devices.cuda(index).arch != self.device.arch:
            raise error
        with self._lock:
            plan = self._elsewhere.get(index)
            if plan is None:
                self.refuse_in_capture(stream, f"plan '{self.name}' is not loaded on cuda:{index} yet", "execute() once on that GPU", error)
                there, head = devices.cuda(index), (self.choices, self.name, self.cost, self.numeric_notes)
                plan = ExecutionPlan(
                    self.graph, there, self.partition, *head, self._parts, kernels=self.kernels, candidate=self._candidate, store=self._store
                )
                plan._followed = True
                plan.load()
                self._elsewhere[index] = plan
        return plan

    def ready(self, stream: int) -> tuple[Binder, Executable]:
        """:meth:`load`; ExecutionError where that is work (a plan that came with a pickle) and ``stream`` is captured."""
        if self._ready is None:
            self.refuse_in_capture(stream, f"plan '{self.name}' is not loaded yet", "execute() once before the capture begins")
        return self.load()

    def refuse_in_capture(self, stream: int | None, what: str, fix: str, cause: Exception | None = None) -> None:
        """Raise the error for a step that an execute on ``stream`` would have to do first, if that is being captured. None: no stream is used."""
        if stream is not None and not self.device.described and targets.get(self.device).capturing(stream):
            rule = f"{what}, and the stream is being captured into a CUDA graph, where nothing is built or loaded"
            raise ExecutionError(explain(rule, expected="a plan that is ready before the capture begins", fix=fix)) from cause

    def guarded(self, pack: variant_pack.Pack, workspace: Any, stream: int | None, error: variant_pack.Misaligned) -> ExecutionPlan:
        """The same plan for buffers that are less aligned than declared, built when it is first needed. Raises ``error`` where there is none, and
        ExecutionError where it would have to be built while ``stream`` is captured."""
        candidate, found = self._made_from(), self.load()[0].alignments(pack, workspace)
        if candidate is None or not found:
            raise error
        with self._lock:
            key = tuple(sorted(found.items()))
            plan = self._guards.get(key)
            if plan is None:
                less = f"{error}. A plan for less aligned buffers is not built yet"
                self.refuse_in_capture(stream, less, "execute() once with such a buffer before the capture begins", error)
                log.info(f"plan {self.name}: buffers are less aligned than declared; another plan is built for them ({error})")
                tensors = tuple(replace(t, alignment=found.get(i, t.alignment)) for i, t in enumerate(self.graph.tensors))
                graph = replace(self.graph, tensors=tensors)
                pairs = zip(candidate.partition.regions, candidate.options, strict=True)
                options = [self._guard_option(graph, region, o) for region, o in pairs]
                fitting = [o for o in options if o is not None]
                if len(fitting) < len(options):
                    raise error
                again = heuristics.candidate(candidate.partition, fitting, self.device.kind, candidate.label)
                plan = ExecutionPlan.of(graph, self.device, again, self._store)
                plan = self._guards[key] = (plan if self.forms is None else plan.sharing(self.forms)).build()
        if plan.workspace_bytes > self.workspace_bytes:
            raise error
        return plan

    def _guard_option(self, graph: OperationGraph, region: Region, option: Option) -> Option | None:
        """The option on a graph with smaller alignments; where its engine needs the alignment (TMA), another's that has room in the workspace."""
        if option.engine.check(graph, region, self.device, option.knobs):  # perhaps chosen for another shape: no candidates of this one
            return option
        same = heuristics.option_like(graph, region, self.device, option.engine, repr(option.knobs))
        if same is not None:
            return same
        from graphdnn.engines import ENGINES
        from graphdnn.engines.base import placeholder

        offered = [(e.cost(graph, region, self.device, k), e, k) for e in ENGINES for k in e.candidates(graph, region, self.device)]
        for _, engine, knobs in sorted(offered, key=lambda row: row[0]):
            if engine.lower(graph, region, self.device, knobs, placeholder(region)).workspace <= self.workspace_bytes:
                return heuristics.option_like(graph, region, self.device, engine, repr(knobs))
        return None

    # -- looking in -----------------------------------------------------------------------------------------------------------------------
    @property
    def source(self) -> str:
        """The generated text of all kernels. Needs no build."""
        if self._kernels is not None:
            return "\n\n".join(k.source for k in self._kernels)
        from graphdnn.codegen import render

        return "\n\n".join(render.render(spec).text for spec in self.recipe.kernels)

    @property
    def ptx(self) -> str:
        """PTX of all kernels; "" for a plan of another target."""
        return "\n".join(k.binary.texts.get("ptx", "") for k in self.kernels)

    @property
    def sass(self) -> str:
        """Machine code of all kernels as text. BuildError for a target that has no disassembler, or without cuobjdump."""
        show = getattr(targets.get(self.device), "sass", None)
        if show is None:
            raise BuildError(explain("no machine code can be shown for this device", expected="a CUDA device", found=self.device.text))
        return "\n".join(show(k.binary) for k in self.kernels)

    @property
    def resources(self) -> tuple[dict[str, Any], ...]:
        """What each kernel takes: its name and what the compiler said (registers, shared_bytes, spill_bytes, ...)."""
        return tuple({"name": k.name} | k.binary.facts for k in self.kernels)

    def __repr__(self) -> str:
        state = f"built, {len(self._kernels)} kernels" if self._kernels is not None else "not built"
        return f"<graphdnn plan {self.name} on {self.device.text}: {state}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """A built plan travels as its serialized form, another one as its candidate."""
        if self._kernels is not None:
            from graphdnn.plans import serialize

            return serialize.restore, (serialize.dump(self), self.device)
        candidate = self._made_from()
        if candidate is None:
            raise BuildError(explain(f"plan '{self.name}' has nothing that could be stored", fix="build it first"))
        return ExecutionPlan.of, (self.graph, self.device, candidate)
