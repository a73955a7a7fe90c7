"""One row of the API table: forms of calls, as dicts of arguments, and what they are called on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import graphdnn
from graphdnn import data_type
from graphdnn.frontend import conv_ops, enums
from graphdnn.frontend.tensor import tensor as Tensor
from graphdnn.ir.layout import by_name
from tests.helpers import Data

D = data_type


@dataclass(frozen=True)
class Types:
    """Data types of one graph: of its large tensors, of its outputs, of parameters and statistics, and the compute type that forms pass."""

    io: data_type
    out: data_type | None = None
    parameters: data_type = D.FLOAT
    compute: data_type = D.FLOAT

    @property
    def id(self) -> str:
        """For test names."""
        more = [x.name for x, usual in ((self.out, None), (self.parameters, D.FLOAT), (self.compute, D.FLOAT)) if x is not None and x is not usual]
        return "-".join([self.io.name, *more])


def each(*dtypes: data_type, **more: Any) -> tuple[Types, ...]:
    """One Types for each data type."""
    return tuple(Types(d, **more) for d in dtypes)


FLOATS = (D.FLOAT, D.DOUBLE, D.HALF, D.BFLOAT16)
NARROW = (D.FP8_E4M3, D.FP8_E5M2)
INTEGERS = (D.INT8, D.UINT8, D.INT32, D.INT64)


@dataclass
class Case:
    """A graph in the making: tensors by name, each declared once, and the data and numbers that they are fed with."""

    graph: Any
    types: Types
    data: dict[str, Data] = field(default_factory=dict)
    values: dict[str, float | int] = field(default_factory=dict)

    def known(self, name: str) -> Any:
        """The tensor of this name, if it is there."""
        return next((t for t in self.graph._tensors if t.name == name), None)

    def t(self, name: str, dim: Sequence[int], dtype: data_type | None = None, layout: Any = "row", data: Data | None = None) -> Any:
        """A large tensor."""
        if data is not None:
            self.data[name] = data
        found = self.known(name)
        return found or self.graph.tensor(dim=dim, stride=by_name(tuple(dim), layout), data_type=dtype or self.types.io, name=name)

    def p(self, name: str, dim: Sequence[int], data: Data | None = None) -> Any:
        """A parameter or statistics."""
        return self.t(f"{name}{list(dim)}", dim, self.types.parameters, data=data)

    def by_value(self, name: str, value: float | int, rank: int = 1, dtype: data_type = D.FLOAT) -> Any:
        """A tensor of one element that the variant pack gives as a number."""
        self.values[name] = value
        ones = [1] * rank
        return self.known(name) or self.graph.tensor(dim=ones, stride=ones, data_type=dtype, is_pass_by_value=True, name=name)


Form = dict[str, Any]
"""Arguments of one call by name; those that are not there are left out. A ``partial`` is called for each call: for tensors that the op writes to."""


@dataclass(frozen=True)
class Row:
    """``forms(case)``: pairs of a method and the arguments of one call of it, with the tensors declared on the case's graph.

    ``finish(case, method, arguments, results)``: sets on the results what the API cannot infer (dims, say). ``wide(method, i)``: whether result ``i``
    has the type of parameters. ``types``: every data type it takes. ``may_exclude``: as in ``check_graph``."""

    name: str
    forms: Callable[[Case], Iterator[tuple[str, Form]]]
    types: tuple[Types, ...]
    finish: Callable[[Case, str, Form, list[Any]], None] | None = None
    wide: Callable[[str, int], bool] = lambda method, i: False
    may_exclude: float = 0.05

    def declare(self, case: Case, calls: Calls | None = None) -> None:
        """All forms of all methods on the case's graph, the first of each signature by keyword and by position, with every result an output."""
        seen: list[tuple[str, inspect.Signature]] = []
        for number, (method, form) in enumerate(self.forms(case)):
            signature = method, fitting(method, form)[0]
            for how in ("keyword",) if signature in seen else ("keyword", "position"):
                given = {k: v() if isinstance(v, partial) else v for k, v in form.items()}
                made = invoke(case.graph, method, given, how)
                results = list(made) if isinstance(made, list | tuple) else [made]
                self._deliver(case, f"{method} {number} by {how}", method, form, results)
                if calls is not None:
                    calls.note(method, given, how)
            seen.append(signature)

    def _deliver(self, case: Case, name: str, method: str, form: Form, results: list[Any]) -> None:
        if self.finish is not None:
            self.finish(case, method, form, results)
        for i, t in enumerate(results):
            if t is None:
                continue
            t.set_output(True).set_name(f"{name} -> {i}")
            if t.get_data_type() is D.NOT_SET:
                t.set_data_type(case.types.parameters if self.wide(method, i) else case.types.out or case.types.io)


# ------------------------------------------------------------------------------------------------------------------------------------- signatures
def signatures(method: str) -> tuple[inspect.Signature, ...]:
    """The documented forms of a method's signature: two for a convolution."""
    if method.upper() in conv_ops.OPERANDS:
        return conv_ops.signatures(method.upper())
    return (inspect.signature(getattr(graphdnn.pygraph, method)),)


def parameters(signature: inspect.Signature) -> list[inspect.Parameter]:
    """Without self."""
    return [p for p in signature.parameters.values() if p.name != "self"]


def fitting(method: str, form: Form) -> list[inspect.Signature]:
    """The signatures that take these arguments."""
    return [s for s in signatures(method) if set(form) <= set(s.parameters)]


def invoke(graph: Any, method: str, form: Form, how: str) -> Any:
    """Call ``method``: all arguments by keyword; or all by position, up to the last one that is given, with defaults in between."""
    call = getattr(graph, method)
    if how == "keyword":
        return call(**form)
    signature = fitting(method, form)[0]
    names = [p.name for p in parameters(signature)]
    last = max(names.index(n) for n in form)
    return call(*(form[p.name] if p.name in form else p.default for p in parameters(signature)[: last + 1]))


@dataclass
class Calls:
    """What the rows have used of each method: (argument, how it was given) pairs."""

    seen: dict[str, set[tuple[str, str]]] = field(default_factory=dict)

    def note(self, method: str, form: Form, how: str) -> None:
        """One call."""
        found = self.seen.setdefault(method, set())
        for signature in fitting(method, form):
            for p in parameters(signature):
                if p.name not in form:
                    found.add((p.name, "left out"))
                    continue
                found |= {(p.name, how), (p.name, kind_of(form[p.name]))}

    def missing(self, method: str) -> list[str]:
        """What no row does with ``method``: arguments by keyword and by position (of many, those that are required), optional ones left out, every
        member of an enum."""
        found, wanted = self.seen.get(method, set()), set()
        few = all(len(s.parameters) <= FEW for s in signatures(method))
        for p in (p for s in signatures(method) for p in parameters(s)):
            wanted |= {(p.name, "keyword")} | ({(p.name, "position")} if p.default is p.empty or few else set())
            if p.default is not p.empty and p.name not in REQUIRED.get(method, ()):
                wanted.add((p.name, "left out"))
            kinds = {e for e in ENUMS if type(p.default) is e or p.annotation in (e, e.__name__)}
            wanted |= {(p.name, str(m)) for e in kinds for m in e if m.name != "NOT_SET"}
        operands = [p for s in signatures(method) for p in parameters(s) if "Tensor | float" in str(p.annotation)]
        for p in operands:
            wanted |= {(p.name, "tensor")} | ({(p.name, "number")} if p is not operands[0] or len(operands) > 1 else set())
        return sorted(f"{name}: {what}" for name, what in wanted - found)


FEW = 11
"""Parameters of a method, self among them, that can all be given in one call."""
_LISTS = ("padding", "pre_padding", "post_padding", "stride", "dilation")
REQUIRED = {
    "rmsnorm": ("epsilon",),
    "sdpa_mxfp8": ("generate_stats",),
    "adalayernorm": ("epsilon",),
    "instancenorm_backward": ("inv_variance",),
    **dict.fromkeys(("conv_fprop", "conv_dgrad", "conv_wgrad"), _LISTS),
}
"""Arguments with a default, None or (), that are required all the same."""
ENUMS: tuple[type[Enum], ...] = tuple(e for e in vars(enums).values() if isinstance(e, type) and issubclass(e, Enum) and len(e))


def kind_of(value: Any) -> str:
    """How an argument was given: "tensor", "number", an enum's member."""
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, Enum):
        return str(value)
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__
