"""Class Pipeline: several built graphs as one thing to run, capture and store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from graphdnn.device import DeviceProps
from graphdnn.errors import BuildError, ExecutionError, KindError, NotSupportedError, SerializationError, ValidationError, explain
from graphdnn.frontend.copies import plan_bytes
from graphdnn.frontend.handle import Handle, as_handle, resolve_device
from graphdnn.frontend.planning import Planning, members, stream_of
from graphdnn.frontend.tensor import as_name

if TYPE_CHECKING:
    from graphdnn.plans.pipeline import Program, Stage
    from graphdnn.targets.cuda_graph import Replay


class Pipeline:
    """Built graphs that run one after another, on buffers with names and one workspace.

    ``add`` the graphs in their order, ``build``, then ``execute``; on a GPU ``capture`` once and ``replay``. What one graph writes and a later one
    reads lies in the workspace, and so do the graphs' own workspaces; what is not alive at the same time shares memory.
    """

    def __init__(self, name: str = "pipeline", handle: int | None = None) -> None:
        """``handle``: of the graphs' device; its stream of the moment is used where ``execute`` and ``replay`` are given no other."""
        self.name = as_name(name)
        self._handle: Handle | None = None if handle is None else as_handle(handle)
        self._stages: list[Stage] = []
        self._keep: tuple[str, ...] = ()
        self._program: Program | None = None
        self._captured: Replay | None = None

    # ----------------------------------------------------------------------------------------------------------------------------- making
    def add(self, graph: Planning, buffers: Mapping[Any, str] | None = None) -> Pipeline:
        """Append the chosen plan of a built graph; returns the pipeline. Later changes of the graph do not concern it.

        ``buffers``: tensor, uid or name of the graph -> name of a buffer of the pipeline; a tensor that is not in it lies in the buffer of its own
        name; one that nobody has named, in "1/0::OUT_0" of stage 1. By-value tensors have names in the same way. Two graphs that name the same
        buffer share it. BuildError for a graph that is not built, NotSupportedError for one with dims, ValidationError for an unknown tensor or
        another device than that of the graphs before, or of the handle."""
        from graphdnn.plans import pipeline

        if not isinstance(graph, Planning):
            raise KindError(explain("graph has the wrong type", expected="a graphdnn.pygraph", found=repr(graph)[:80]))
        if not isinstance(buffers, Mapping | None):
            expected = "a dict of tensor, uid or name to the name of a buffer"
            raise KindError(explain("buffers has the wrong type", expected=expected, found=repr(buffers)[:80]))
        if graph.dims:
            rule, fix = "a pipeline lays out its buffers once", "build the graph for fixed extents"
            raise NotSupportedError(explain(rule, expected="a graph of fixed shapes", found=f"dims {', '.join(graph.dims)}", fix=fix))
        plan = graph.plan
        plan.kernels  # noqa: B018  raises for a plan that is not built
        there = self.device if self._stages else plan.device if self._handle is None else self._handle.device
        if _place(plan.device) != _place(there):
            rule, fix = "the graphs of a pipeline, and its handle, are of one device", "build the graph for that device, or make two pipelines"
            raise ValidationError(explain(rule, expected=there.text, found=plan.device.text, fix=fix))
        self._stages.append(pipeline.stage(plan, buffers or {}, len(self._stages)))
        self._program = self._captured = None
        return self

    def build(self, keep: Iterable[str] = ()) -> Pipeline:
        """Lay out the workspace; returns the pipeline. Compiles nothing.

        ``keep``: names of buffers that the caller wants to see although a later graph reads them; they are outputs then. ValidationError where two
        graphs do not agree on a buffer, BuildError without a graph."""
        from graphdnn.plans.pipeline import Program

        kept = tuple(members("keep", keep, str))
        if not self._stages:
            raise BuildError(explain("the pipeline has no graphs", expected="at least one", found="none", fix="call add(graph) first"))
        self._program, self._keep, self._captured = Program.of(self._stages, kept), kept, None
        return self

    def _built(self) -> Program:
        if self._program is None:
            raise BuildError(explain("the pipeline is not built", fix="call build() after the last add()"))
        return self._program

    # ------------------------------------------------------------------------------------------------------------------------------ facts
    @property
    def device(self) -> DeviceProps:
        """The device of its graphs. BuildError without a graph."""
        if not self._stages:
            raise BuildError(explain("the pipeline has no graphs", fix="call add(graph) first"))
        return self._stages[0].plan.device

    @property
    def workspace_bytes(self) -> int:
        """Bytes of workspace that ``execute`` needs. BuildError before build."""
        return self._built().layout.nbytes

    def get_workspace_size(self) -> int:
        """``workspace_bytes``, under the name that graphs have for it."""
        return self.workspace_bytes

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the buffers that the caller provides and graphs read, by-value numbers among them. BuildError before build."""
        return tuple(name for name, b in self._built().external.items() if b.reads and (not b.writes or min(b.reads) <= min(b.writes)))

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the buffers that the caller provides and graphs write. BuildError before build."""
        return tuple(name for name, b in self._built().external.items() if b.writes)

    @property
    def intermediates(self) -> tuple[str, ...]:
        """Names of the buffers that lie in the workspace. BuildError before build."""
        return tuple(b.name for b in self._built().within)

    def explain(self) -> str:
        """The graphs, the buffers, and what lies where in the workspace, as text. BuildError before build."""
        from graphdnn.inspection.pipeline import text

        return text(self.name, self._built())

    def __repr__(self) -> str:
        state = f"{self.workspace_bytes} bytes of workspace" if self._program is not None else "not built"
        return f"<graphdnn pipeline '{self.name}': {len(self._stages)} graphs, {state}>"

    # ---------------------------------------------------------------------------------------------------------------------------- running
    def execute(self, pack: Mapping[str, Any], workspace: Any = None, handle: int | None = None) -> None:
        """Run the graphs in their order.

        ``pack``: name of a buffer -> array or address, or number for a by-value tensor; every buffer that is no intermediate. ``workspace``: array
        or address of ``workspace_bytes`` bytes. All buffers are checked before anything runs. A CPU has finished on return; a GPU's work is enqueued
        on the stream of the handle, or the framework's current one. Raises as a graph's ``execute``."""
        self._built().execute(_pack(pack), workspace, stream_of(self._handle, handle, pack, self.device))

    def capture(self, pack: Mapping[str, Any], workspace: Any = None, handle: int | None = None) -> Replay:
        """Make one CUDA graph of all graphs on these buffers; nothing runs. :meth:`replay`, or ``launch(stream)`` of the result, which needs neither
        the pipeline nor the graphs any more, runs it as often as you like; inputs are changed in place. By-value numbers stay those of the capture.

        ExecutionError while the stream is being captured by somebody else, NotSupportedError on a CPU and in the simulator."""
        program, stream = self._built(), stream_of(self._handle, handle, pack, self.device)
        from graphdnn import targets

        if not self.device.described and targets.get(self.device).capturing(stream):
            rule, fix = "a capture is under way on this stream already", "call capture() before it begins; execute() can be captured"
            raise ExecutionError(explain(rule, expected="a stream that is not being captured", found=f"stream {stream:#x}", fix=fix))
        self._captured = program.capture(_pack(pack), workspace)
        return self._captured

    def replay(self, handle: int | None = None) -> None:
        """Run what was captured last. ExecutionError if nothing was since build."""
        if self._captured is None:
            raise ExecutionError(explain("nothing was captured since build", expected="a capture", fix="call capture(pack, workspace) first"))
        self._captured.launch(stream_of(self._handle, handle, self._captured.keep[0], self.device))

    # --------------------------------------------------------------------------------------------------------------------------- as bytes
    def serialize(self) -> bytes:
        """The built pipeline as one file: its graphs' plans, machine code among it, and the names of its buffers. BuildError before build."""
        from graphdnn.plans import pipeline_file

        self._built()
        return pipeline_file.dump(self.name, self._stages, self._keep)

    @classmethod
    def deserialize(cls, data: Any, handle: int | None = None, device: Any = None) -> Pipeline:
        """The built pipeline that :meth:`serialize` wrote, ready to execute; needs no compiler where a plan from a file needs none.

        ``handle``, or ``device`` ("cuda:1"): where it will run; by default a device of the kind that it was built for. SerializationError for damaged
        data, another version, or a device that its plans do not run on; ValidationError for a handle of another device than ``device``."""
        from graphdnn.plans import pipeline_file

        made, place = cls(handle=handle), None if device is None else resolve_device(device)
        if made._handle is not None:
            if place is not None and _place(place) != _place(made._handle.device):
                raise ValidationError(explain("the handle and the device disagree", expected=place.text, found=made._handle.device.text))
            place = made._handle.device
        made.name, made._stages, keep = pipeline_file.load(plan_bytes(data), place)
        try:
            return made.build(keep)
        except ValidationError as error:
            raise SerializationError(explain(f"the stored pipeline does not fit together: {error}", fix="build it again and serialize it")) from error

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is what the file gives: built, without handle and capture. BuildError before build."""
        return type(self).deserialize, (self.serialize(), None, self.device)


def _place(device: DeviceProps) -> tuple[str, str, int]:
    return device.kind, device.arch, device.index


def _pack(pack: Any) -> Mapping[str, Any]:
    if not isinstance(pack, Mapping) or not all(isinstance(name, str) for name in pack):
        raise KindError(explain("the pack of a pipeline has the wrong type", expected="a dict of names of buffers to arrays", found=repr(pack)[:80]))
    return pack
