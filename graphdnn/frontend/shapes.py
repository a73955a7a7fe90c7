"""A graph with dims: the values that a call gives them, and the plan for these values."""

from __future__ import annotations

import copy
import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from graphdnn import targets
from graphdnn.dtypes import info
from graphdnn.errors import ExecutionError, GraphError, ValidationError, explain
from graphdnn.frontend.declare import Declarations, take_back
from graphdnn.frontend.symbols import Dim, DimExpr, collected, parsed
from graphdnn.frontend.tensor import as_integer
from graphdnn.frontend.tensor import tensor as Tensor
from graphdnn.ir import jsontext
from graphdnn.ir.extent import Extent
from graphdnn.ir.layout import like
from graphdnn.ir.tensor import Dims
from graphdnn.plans.variant_pack import expect_mapping

if TYPE_CHECKING:
    from graphdnn.frontend.pygraph import pygraph
    from graphdnn.ir.opgraph import OperationGraph
    from graphdnn.plans.dynamic import ShapePlans, Values
    from graphdnn.plans.plan import ExecutionPlan


@dataclass(frozen=True)
class Source:
    """A tensor that tells values: keys under which a pack may hold it, and its extents. ``bytes_along``: the axis along which its array counts bytes
    and not elements, which tells nothing; -1 if there is none."""

    tensor: Tensor
    keys: tuple[Any, ...]
    shape: tuple[DimExpr | int, ...]
    bytes_along: int


class Shapes(Declarations):
    """What a graph does with the dims in its declarations. ``_shape_plans``: by name of a plan of the list."""

    _device: Any
    _opgraph: Any
    _kernel_cache: Any
    _filled: list[tuple[Any, str, Any, Any]]
    _shape_plans: dict[str, ShapePlans]
    _sources: tuple[dict[str, Dim], tuple[Source, ...]] | None

    def _twin(self) -> pygraph:
        """A copy of the declarations, without what passes have filled in and without plans."""
        twin: pygraph = object.__new__(type(self))  # type: ignore[assignment]
        twin.__dict__.update(copy.deepcopy(self._state(False) | {"_opgraph": None}))
        take_back(twin._filled)
        twin._filled = []
        return twin

    @abstractmethod
    def _state(self, with_plan: bool) -> dict[str, Any]:
        """What a copy has of the graph."""

    # ------------------------------------------------------------------------------------------------------------------------------- text
    def _text_with_dims(self) -> str:
        """The JSON text of what was declared, with ranges in "dims" and extents and strides of tensors as texts in "extents". What passes filled in
        is left out: it belongs to one shape."""
        graph = self._twin()._text()
        whole = json.loads(jsontext.dumps(graph))
        whole["dims"] = {n: {"min": d.min, "max": d.max, "multiple_of": d.multiple_of, "hint": d.hint} for n, d in self.dims.items()}
        whole["extents"] = {}
        for t, key in jsontext.keys_of(graph).items():
            shapes = {"dim": t.symbolic_dim, "stride": t.symbolic_stride} if isinstance(t, Tensor) else {}
            texts = {k: [str(e) for e in v] for k, v in shapes.items() if v is not None}
            whole["extents"] |= {str(key): texts} if texts else {}
        return json.dumps(whole, sort_keys=True, separators=(",", ":"))

    def _take_dims(self, text: str) -> None:
        """The dims of such a text. ValidationError for what is malformed or does not belong to the tensors."""
        whole = json.loads(text)
        if "dims" not in whole and "extents" not in whole:
            return
        try:
            dims = {n: Dim(n, d["min"], d["max"], multiple_of=d["multiple_of"], hint=d["hint"]) for n, d in whole["dims"].items()}
            tensors = dict(zip(whole["tensors"], self._tensors, strict=True))
            for key, shapes in whole["extents"].items():
                t, before = tensors[key], (tensors[key].dim, tensors[key].stride)
                if "dim" in shapes:
                    t.set_dim([parsed(e, dims) for e in shapes["dim"]])
                if "stride" in shapes:
                    t.set_stride([parsed(e, dims) for e in shapes["stride"]])
                if (t.dim, t.stride) != before:
                    raise ValueError(f"extents of '{t.name}' at their hints are not its dims and strides")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            found = f"{type(error).__name__}: {str(error)[:80]}"
            raise ValidationError(explain("the dims of the graph text are malformed", expected="the text of str(graph)", found=found)) from error

    # -------------------------------------------------------------------------------------------------------------------------- the dims
    @property
    def dims(self) -> dict[str, Dim]:
        """The dims that tensors of the graph are declared with, by name; empty for a graph of fixed shapes."""
        return collected(shape for t in self._tensors for shape in (t.symbolic_dim, t.symbolic_stride) if shape is not None)

    def _graph_at(self, values: Values) -> OperationGraph:
        """The operation graph for values of the dims."""
        named = dict(zip(self.dims, values, strict=True))
        try:
            return self._frozen_at({n: Extent(v) for n, v in named.items()})
        except GraphError:  # an extent of 1 means something to an op (it is broadcast), or the shape is wrong, and then this says so
            return self._frozen_at(named)

    def _frozen_at(self, named: Mapping[str, int]) -> OperationGraph:
        twin = self._built_at(named, {})
        layouts = self._as_hinted(twin._tensors)
        if layouts:
            twin = self._built_at(named, layouts)
        assert twin._opgraph is not None, "it was built"
        return twin._opgraph

    def _built_at(self, named: Mapping[str, int], layouts: Mapping[int, tuple[Any, Any]]) -> pygraph:
        twin = self._twin()
        for i, t in enumerate(twin._tensors):
            t.at(named)
            if i in layouts:
                t.dim, t.stride = layouts[i]
        twin.build_operation_graph()
        return twin

    def _as_hinted(self, tensors: Iterable[Tensor]) -> dict[int, tuple[Any, Any]]:
        """Dims and strides of outputs whose order of axes was inferred, and is another one at the hints: an extent of 1 has the stride of the axis
        beside it, and strides alone do not tell their order then. By position among the tensors."""
        inferred, found = {id(t) for t, field, _, _ in self._filled if field == "stride"}, {}
        for i, (hinted, t) in enumerate(zip(self._tensors, tensors, strict=False)):
            if id(hinted) not in inferred or t.virtual or None in (hinted.dim, hinted.stride, t.dim, t.stride):
                continue
            wanted = like(t.dim, hinted.stride)  # type: ignore[arg-type]
            packed = hinted.stride == like(hinted.dim, hinted.stride) and t.stride == like(t.dim, t.stride)  # type: ignore[arg-type]
            if packed and wanted != t.stride:
                found[i] = (t.dim, wanted)
        return found

    def _neighbours(self, values: Values, odd: bool) -> list[Values]:
        """Other shapes, which show what numbers change with a dim: every dim smaller in its own way, each dim alone smaller, and alone small; as
        round as ``values`` may be, or (``odd``) of odd extents."""
        dims = list(self.dims.values())
        found = [tuple(_moved(d, v, odd, 3 * i + 1) for i, (d, v) in enumerate(zip(dims, values, strict=True)))]
        for i, d in enumerate(dims):
            found += [(*values[:i], n, *values[i + 1 :]) for n in (_moved(d, values[i], odd, 2), _small(d, odd))]
        return list(dict.fromkeys(found))

    def _shaped(self, plan: ExecutionPlan) -> ExecutionPlan:
        """The plan of the list, built for the dims' hints with kernels that other extents can use; for a graph of fixed shapes just built, with the
        kernels of a kernel cache where it has one."""
        dims = self.dims
        if not dims:
            return plan.build() if self._kernel_cache is None else plan.sharing(self._kernel_cache.shared()).build()
        from graphdnn.plans.dynamic import ShapePlans

        hints = tuple(d.hint for d in dims.values())
        kept = self._kernel_cache
        shared = {} if kept is None else {"store": kept.store, "forms": kept.shared()}
        plans = ShapePlans(plan.device, plan.candidate, self._graph_at, self._neighbours, hints, **shared)
        made = plans.plan(hints)
        self._shape_plans[made.name] = plans
        return made

    def _largest_workspace(self, plan: ExecutionPlan) -> int:
        """Bytes that any shape in the dims' ranges may need, as far as the hints, the largest and the smallest extents, and each dim alone at these
        show. A shape whose every plan needs more raises what says so, and then this is larger."""
        plans = self._shape_plans.get(plan.name)
        if plans is None:
            return plan.workspace_bytes
        dims = list(self.dims.values())
        hints, ends = [d.hint for d in dims], ([d.max // d.multiple_of * d.multiple_of for d in dims], [_small(d, True) for d in dims])
        alone = [[*hints[:i], extent, *hints[i + 1 :]] for end in ends for i, extent in enumerate(end)]
        return plans.largest(dict.fromkeys(map(tuple, (*ends, hints, *alone))))

    # ------------------------------------------------------------------------------------------------------------------- values of a call
    def _for_call(
        self,
        plan: ExecutionPlan,
        pack: Mapping[Any, Any],
        given: Mapping[Any, int] | None,
        stream: int,
        told: Mapping[int | None, Dims] | None = None,
    ) -> ExecutionPlan:
        """The plan for the shapes in ``pack``, or for those ``told`` by uid. ExecutionError where it would have to be made while the stream is
        captured."""
        plans = self._shape_plans.get(plan.name)
        if given is not None:
            expect_mapping(given, "dims", "names or Dims to extents")
        if plans is None:
            if given:
                fix = "leave dims= out, or declare extents with graphdnn.Dim"
                raise ValidationError(explain("the graph has no dims", expected="none", found=repr(given)[:80], fix=fix))
            return plan
        expect_mapping(pack)
        values = self._values(pack, given or {}, told or {})
        if not plans.known(values) and not plan.device.described and targets.get(plan.device).capturing(stream):
            named = dict(zip(self.dims, values, strict=True))
            raise ExecutionError(
                explain(
                    "a plan for another shape is made when it is first needed, and the stream is being captured",
                    expected="a shape that was executed before the capture",
                    found=", ".join(f"{n} = {v}" for n, v in named.items()),
                    fix="execute once with this shape before the capture",
                )
            )
        made = plans.plan(values)
        if plans.promised is not None and made.workspace_bytes > plans.promised:
            raise ValidationError(
                explain(
                    "this shape needs more workspace than get_workspace_size() has said",
                    expected=f"{made.workspace_bytes} bytes",
                    found=f"{plans.promised} bytes",
                    fix="call get_workspace_size() again, which now knows this shape",
                )
            )
        return made

    def _of_call(self, plan: ExecutionPlan, pack: Mapping[Any, Any]) -> dict[int | None, Any]:
        """The graph's tensors by uid, with the dims and strides of the shapes in ``pack``. Raises what ``execute`` raises."""
        return self._at_shape(self._for_call(plan, pack, None, 0))

    @staticmethod
    def _at_shape(plan: ExecutionPlan) -> dict[int | None, Any]:
        """Tensors by uid, with the dims and strides of a plan for one shape."""
        from graphdnn.plans.dynamic import numbered

        return {t.uid: t for t in numbered(plan.graph).tensors}

    def _values(self, pack: Mapping[Any, Any], given: Mapping[Any, int], told: Mapping[int | None, Dims]) -> Values:
        """Extents of the dims, from ``given``, from the shapes ``told`` by uid, and from those of the arrays. ValidationError for one that is
        missing, contradicted, or outside its range."""
        if self._sources is None:  # once: what is declared does not change between calls
            self._sources = self.dims, tuple(self._told_by())
        dims, sources = self._sources
        found: dict[str, tuple[int, str]] = {}
        for key, value in given.items():
            name = key.name if isinstance(key, Dim) else key
            if name not in dims:
                fix = "leave it out, or spell it as declared"
                raise ValidationError(explain("no such dim", expected=f"one of {list(dims)}", found=repr(name), fix=fix))
            extent = as_integer(f"dim '{name}'", value)
            if found.setdefault(name, (extent, "dims"))[0] != extent:
                raise _contradiction(name, found[name], extent, "dims")
        shapes = [(s, shape) for s in sources if s.tensor.uid not in told and (shape := _shape(s, pack)) is not None]
        counted = [(replace(s, bytes_along=-1), told[s.tensor.uid]) for s in sources if s.tensor.uid in told]  # elements, of every type
        shapes += [(s, shape) for s, shape in counted if len(shape) == len(s.shape)]
        for s, shape in shapes:
            for a, (e, n) in enumerate(zip(s.shape, shape, strict=True)):
                if isinstance(e, Dim) and a != s.bytes_along:
                    first = found.setdefault(e.name, (n, f"'{s.tensor.name}'"))
                    if first[0] != n:
                        raise _contradiction(e.name, first, n, f"'{s.tensor.name}'")
        if len(found) < len(dims):
            _solve(shapes, found)
        for name, dim in dims.items():
            if name not in found:
                fix = f"say dims={{'{name}': ...}} in the call, or give arrays of the declared rank instead of addresses"
                rule = f"the extent of dim '{name}' is not known"
                raise ValidationError(explain(rule, expected="an array whose shape tells it", found="none", fix=fix))
            dim.check(*found[name])
        named = {n: v for n, (v, _) in found.items()}
        for s, shape in shapes:
            _check_shape(s, shape, named)
        return tuple(named[n] for n in dims)

    def _same_extents(self, pack: Mapping[Any, Any], given: Mapping[Any, int] | None) -> Callable[[Mapping[Any, Any]], object]:
        """What raises ValidationError for a pack whose arrays tell other extents than ``pack`` does now."""
        named = dict(zip(self.dims, self._values(pack, given or {}, {}), strict=True))
        return lambda other: self._values(other, named, {})

    def _told_by(self) -> list[Source]:
        made = []
        for t in self._tensors:
            if t.symbolic_dim is not None and not t.virtual and not t.by_value:
                packed = t.dtype is not None and info(t.dtype).bits < 8
                along = next((a for a in reversed(range(len(t.dim or ()))) if t.stride and t.stride[a] == 1), -1) if packed else -1
                made.append(Source(t, tuple(k for k in (t, t.uid, t.name or None) if k is not None), t.symbolic_dim, along))
        return made


def _shape(source: Source, pack: Mapping[Any, Any]) -> Sequence[int] | None:
    """Shape of the array that the pack holds for a tensor; None for an address and for another rank."""
    for key in source.keys:
        if key in pack:
            shape = getattr(pack[key], "shape", None)
            if not isinstance(shape, tuple | list) or len(shape) != len(source.shape):
                return None
            return [n if type(n) is int else as_integer(f"an extent of the array for '{source.tensor.name}'", n) for n in shape]
    return None


def _solve(shapes: Sequence[tuple[Source, Sequence[int]]], found: dict[str, tuple[int, str]]) -> None:
    """Add the dims that sums and products in ``shapes`` tell: those of which all other dims are known."""
    told = [(e, n, f"'{s.tensor.name}'") for s, shape in shapes for a, (e, n) in enumerate(zip(s.shape, shape, strict=True)) if a != s.bytes_along]
    before = -1
    while before < len(found):
        before = len(found)
        for e, n, where in told:
            unknown = [name for name in e.dims if name not in found] if isinstance(e, DimExpr) else []
            if len(unknown) == 1 and isinstance(e, DimExpr):
                value = e.solved(unknown[0], {name: v for name, (v, _) in found.items()}, n)
                found |= {} if value is None else {unknown[0]: (value, where)}


def _check_shape(source: Source, shape: Sequence[int], named: Mapping[str, int]) -> None:
    wanted = [e.value(named) if isinstance(e, DimExpr) else e for e in source.shape]
    if any(n != w for a, (n, w) in enumerate(zip(shape, wanted, strict=True)) if a != source.bytes_along):
        values = ", ".join(f"{n} = {v}" for n, v in named.items())
        raise ValidationError(
            explain(
                f"the array for '{source.tensor.name}' has another shape than the dims say",
                tensor=source.tensor.name,
                expected=f"{wanted} ({values})",
                found=list(shape),
                fix="give an array of this shape, or declare with a Dim what differs",
            )
        )


def _contradiction(name: str, first: tuple[int, str], second: int, where: str) -> ValidationError:
    rule, fix = f"dim '{name}' is bound to two extents", "give arrays of one size, or declare two dims"
    return ValidationError(explain(rule, expected=f"{first[0]} (from {first[1]})", found=f"{second} (from {where})", fix=fix))


def _moved(dim: Dim, value: int, odd: bool, by: int) -> int:
    """Another extent of ``dim`` near ``value``."""
    step = dim.multiple_of if odd else max(dim.multiple_of, 64 // dim.multiple_of * dim.multiple_of)
    shift = (2 * by if value % 2 else 2 * by - 1) if odd else by
    for moved in (value - shift * step, value + shift * step, value - step, value + step):
        if max(dim.min, 2) <= moved <= dim.max:
            return moved
    return value


def _small(dim: Dim, odd: bool) -> int:
    """A small extent of ``dim``: the smallest above 0, or (not ``odd``) the smallest multiple of 8."""
    step = dim.multiple_of if odd or dim.multiple_of >= 8 else 8 // dim.multiple_of * dim.multiple_of
    return min(-(-max(dim.min, 1) // step) * step, dim.max // dim.multiple_of * dim.multiple_of)
