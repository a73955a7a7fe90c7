"""Class Graph: ops are called on arrays inside a ``with``, the graph is built on exit and then called like a function, with torch or NumPy arrays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from graphdnn.errors import BuildError, ExecutionError, ValidationError, explain
from graphdnn.frontend import allocate
from graphdnn.frontend.arrays import is_array, is_torch
from graphdnn.frontend.enums import heur_mode
from graphdnn.frontend.handle import as_handle
from graphdnn.frontend.pygraph import pygraph
from graphdnn.frontend.tensor import tensor as Tensor
from graphdnn.ir.node import NodeDecl

DECLARING = ("tensor", "tensor_like", "tensor_scalar")
PASSED_ON = (
    "get_workspace_size",
    "get_workspace_size_plan_at_index",
    "serialize",
    "deserialize",
    "query_tensor_attributes_of_uid",
    "explain",
    "draw",
    "plan",
)
BLOCKED = (
    ("build", "build_operation_graph", "build_plan_at_index", "build_plans", "check_support", "create_execution_plan", "create_execution_plans")
    + ("deselect_behavior_notes", "deselect_engines", "deselect_numeric_notes", "deselect_workspace_greater_than", "execute", "execute_plan_at_index")
    + ("get_behavior_notes", "get_behavior_notes_for_plan_at_index", "get_engine_count", "get_execution_plan_count", "get_knobs_for_engine")
    + ("get_plan_name_at_index", "key", "populate_cuda_graph", "select_behavior_notes", "select_numeric_notes", "update_cuda_graph", "validate")
)


def _sequence(what: str, value: Any) -> list[Any] | None:
    if value is None or isinstance(value, list | tuple):
        return None if value is None else list(value)
    raise ValidationError(explain(f"{what} must be a list or a tuple", expected="a list or tuple", found=type(value).__name__))


class Graph:
    """``with Graph(io_data_type=...) as g: y = g.add(a=x, b=b, name="sum")`` declares, and on exit builds, a graph; ``g({"sum::a": x})`` runs it.

    Inputs are addressed as ``<node>::<argument>``, outputs as ``<node>::<port>``, both also by tensor name, tensor object, uid, or the array that was
    passed while declaring. ``handle``: None, a handle, or "auto". ``inputs`` and ``outputs`` name the order for positional calls. Other keywords are
    those of :class:`pygraph`.
    """

    def __init__(
        self,
        *,
        handle: int | str | None = None,
        inputs: Sequence[Any] | None = None,
        outputs: Sequence[Any] | None = None,
        heuristics: Sequence[heur_mode] = (heur_mode.A, heur_mode.FALLBACK),
        workspace_alloc: bool = True,
        **kwargs: Any,
    ) -> None:
        """Nothing is declared before ``with``."""
        if isinstance(handle, str) and handle != "auto":
            raise ValidationError(explain("unknown handle", expected="None, a handle, or 'auto'", found=repr(handle)))
        self._handle = handle if handle is None or isinstance(handle, str) else as_handle(handle)
        self._heuristics = _sequence("heuristics", heuristics) or []
        self._io = (_sequence("inputs", inputs), _sequence("outputs", outputs))
        self._workspace_alloc = workspace_alloc
        self._kwargs = kwargs
        self._graph: pygraph | None = None
        self._built = False
        self._names: dict[str, Tensor] = {}
        self._canonical: dict[Tensor, str] = {}
        self._nodes: set[str] = set()
        self._counts: dict[str, int] = {}
        self._arrays: dict[int, tuple[Any, Tensor]] = {}
        self._order: tuple[list[Tensor], list[Tensor]] | None = None
        self._scratch = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        """All but what belongs to this process: scratch memory and the identities of arrays."""
        return self.__dict__ | {"_arrays": {}, "_scratch": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Fresh scratch memory."""
        self.__dict__.update(state)
        self._scratch = threading.local()

    # ------------------------------------------------------------------------------------------------------------------------- declaring
    def __enter__(self) -> Graph:
        """Begin to declare."""
        if self._graph is not None:
            raise BuildError(explain("a Graph can be entered once", fix="make another Graph"))
        handle = self._handle if not isinstance(self._handle, str) else allocate.thread_handle()
        self._graph = pygraph(handle=handle, **self._kwargs)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Build, unless an error is on its way."""
        if kind is not None:
            return
        graph = self._get()
        if graph.get_execution_plan_count() == 0:  # a plan that was deserialized is kept
            graph.build(self._heuristics)
        self._built = True
        if self._io != (None, None):
            self._order = self._resolved(*self._io)

    def _get(self) -> pygraph:
        if self._graph is None:
            raise BuildError(explain("the Graph has not been entered", fix="use it in a with statement"))
        return self._graph

    def __getattr__(self, name: str) -> Any:
        """Op methods of the graph, and what may be asked of it."""
        if name in BLOCKED:
            raise BuildError(explain(f"Graph does {name} itself", fix="use pygraph to take the steps one by one"))
        if name.startswith("_") or not hasattr(pygraph, name):
            raise AttributeError(f"'Graph' object has no attribute '{name}'")
        if name in PASSED_ON:
            return getattr(self._get(), name)
        if self._built:
            raise BuildError(explain(f"{name}: the graph is built, ops can be added inside the with statement only"))
        if name in DECLARING:
            return getattr(self._get(), name)
        return lambda *args, **kwargs: self._call(name, args, kwargs)

    def _call(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One op: arrays become graph tensors, the node gets a name, its inputs and outputs get keys."""
        method: Callable[..., Any] = getattr(self._get(), op)
        node = kwargs.pop("name", None)
        if not node:
            count = self._counts.get(op, 0)
            self._counts[op], node = count + 1, f"{op}.{count}"
        if node in self._nodes:
            raise ValidationError(explain("two nodes have one name", node=node, expected="unique names"))
        given = [self._convert(f"{node}::{i}", a) for i, a in enumerate(args)]
        named = {k: self._convert(f"{node}::{k}", a) for k, a in kwargs.items()}
        result = method(*given, **named, name=node)
        self._nodes.add(node)
        for i, t in enumerate(result if isinstance(result, list | tuple) else [result]):
            if isinstance(t, Tensor):
                self._register(t.get_name() or f"{node}::{i}", t)
        return result

    def _convert(self, key: str, value: Any) -> Any:
        """``value`` with every array in it as a graph tensor, the same for the same array."""
        if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
            return type(value)(self._convert(f"{key}::{j}", v) for j, v in enumerate(value))
        if isinstance(value, Tensor):
            if not value.virtual:
                self._register(key, value)
            return value
        if not is_array(value):
            return value
        if id(value) not in self._arrays:
            like = value.detach() if getattr(value, "requires_grad", False) else value
            self._arrays[id(value)] = (value, self._get().tensor_like(like))
        made = self._arrays[id(value)][1]
        self._register(key, made)
        return made

    def _register(self, key: str, t: Tensor) -> None:
        self._names.setdefault(key, t)
        self._canonical.setdefault(t, key)

    # --------------------------------------------------------------------------------------------------------------------- names, orders
    def _find(self, key: Any) -> Tensor | None:
        graph = self._get()
        if isinstance(key, Tensor):
            return key if key in graph._tensors else next((t for t in graph._tensors if key.uid is not None and t.uid == key.uid), None)
        if isinstance(key, str):
            return self._names.get(key) or next((t for t in graph._tensors if t.name == key), None)
        if isinstance(key, int):
            return next((t for t in graph._tensors if t.uid == int(key)), None)
        found = self._arrays.get(id(key))
        return None if found is None else found[1]

    def _ends(self) -> tuple[list[Tensor], list[Tensor]]:
        """Non-virtual inputs that a caller must give, and non-virtual outputs."""
        nodes: list[NodeDecl] = self._get()._nodes
        written = dict.fromkeys(t for n in nodes for t in n.outputs.values())
        read = dict.fromkeys(t for n in nodes for t in n.inputs.values())
        read |= dict.fromkeys(t.ragged_offset for t in (*read, *written) if t.ragged_offset is not None)
        inputs = [t for t in read if t not in written and isinstance(t, Tensor) and t.value is None]
        outputs = [t for n in nodes for t in n.outputs.values() if not t.virtual and isinstance(t, Tensor)]
        return inputs, outputs

    def set_io_tuples(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Say in which order a positional call takes inputs and returns outputs; entries are keys as for a call with a dict. Inside the ``with`` they
        are looked up on exit. ValidationError for unknown, repeated, virtual or missing tensors."""
        self._io = (_sequence("inputs", inputs), _sequence("outputs", outputs))
        if self._built:
            self._order = self._resolved(*self._io)

    def _resolved(self, inputs: list[Any] | None, outputs: list[Any] | None) -> tuple[list[Tensor], list[Tensor]]:
        found = []
        for what, keys, all_of in zip(("inputs", "outputs"), (inputs, outputs), self._ends(), strict=True):
            order = []
            for key in keys or []:
                t = self._find(key)
                if t is None:
                    raise ValidationError(
                        explain(f"an entry of {what} is no tensor of the graph", expected=", ".join(map(self._label, all_of)), found=repr(key)[:80])
                    )
                if t not in all_of:
                    raise ValidationError(
                        explain(f"an entry of {what} is not among them", tensor=self._label(t), expected=", ".join(map(self._label, all_of)))
                    )
                if t in order:
                    raise ValidationError(explain(f"{what} name a tensor twice", tensor=self._label(t)))
                order.append(t)
            missing = [t for t in all_of if t not in order]
            if missing:
                raise ValidationError(
                    explain(f"{what} do not name every one", expected=", ".join(map(self._label, missing)), found=f"{len(order)} entries")
                )
            found.append(order)
        return found[0], found[1]

    def _label(self, t: Tensor) -> str:
        return f"'{self._canonical.get(t) or t.name or t.uid}'"

    # ---------------------------------------------------------------------------------------------------------------------------- calling
    def __call__(self, *args: Any, handle: int | str | None = None, workspace: Any = None) -> Any:
        """``graph({key: array})`` runs the graph and returns the dict, outputs that were missing allocated and added; ``graph(array, ...)``, after
        ``set_io_tuples``, takes the inputs in order and returns the output, or the list of them."""
        if not self._built:
            raise BuildError(explain("the graph is not built", fix="leave the with statement first"))
        if len(args) == 1 and isinstance(args[0], dict):
            self._run(args[0], handle, workspace)
            return args[0]
        if self._order is None:
            raise BuildError(explain("a positional call needs an order", fix="call set_io_tuples(inputs, outputs), or pass a dict"))
        inputs, outputs = self._order
        if len(args) != len(inputs):
            raise ValidationError(
                explain("wrong number of inputs", expected=f"{len(inputs)}: {', '.join(map(self._label, inputs))}", found=len(args))
            )
        pack: dict[Any, Any] = dict(zip(inputs, args, strict=True))
        made = self._run(pack, handle, workspace)
        results = [made[t] for t in outputs]
        return results[0] if len(results) == 1 else results

    def _run(self, given: dict[Any, Any], handle: int | str | None, workspace: Any) -> dict[Tensor, Any]:
        pack: dict[Tensor, Any] = {}
        for key, value in given.items():
            t = None if key is None else self._find(key)
            if t is not None:
                pack[t] = value.detach() if getattr(value, "requires_grad", False) else value
        inputs, outputs = self._ends()
        missing = [t for t in inputs if t not in pack]
        if missing:
            raise ExecutionError(
                explain("inputs are missing", expected=", ".join(map(self._label, missing)), found=", ".join(map(repr, given)) or "nothing")
            )
        graph = self._get()
        torch_like = any(map(is_torch, pack.values()))
        device = graph._get_device()
        shaped = graph._of_call(graph.plan, pack) if graph.dims else {}
        for t in outputs:
            if t not in pack:
                made = allocate.empty(shaped.get(t.uid, t), device, torch_like)
                pack[t] = given[self._canonical.get(t) or t.name or t.get_uid()] = made
        if workspace is None:
            workspace = self._workspace(graph.get_workspace_size(), device, torch_like)
        used = self._handle if handle is None else handle
        graph.execute(pack, workspace, allocate.thread_handle(device) if isinstance(used, str) else used)
        return pack

    def _workspace(self, size: int, device: Any, torch_like: bool) -> Any:
        """Scratch memory of this thread, kept between calls if ``workspace_alloc``."""
        if size == 0:
            return None
        kept = getattr(self._scratch, "memory", None)
        if kept is None:
            if not self._workspace_alloc:
                raise ExecutionError(
                    explain("the graph needs a workspace", expected=f"workspace= an array of {size} bytes", found="workspace_alloc=False")
                )
            kept = self._scratch.memory = allocate.scratch(size, device, torch_like)
        return kept

    def __repr__(self) -> str:
        return f"<graphdnn Graph, {'built' if self._built else 'not built'}: {self._graph!r}>"
