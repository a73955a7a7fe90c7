"""A callback that modifies the scores of attention, as data: it is called once, and the pointwise ops that it made are written down as steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from graphdnn.dtypes import data_type
from graphdnn.errors import KindError, NotSupportedError, ValidationError, explain
from graphdnn.frontend.tensor import tensor as Tensor
from graphdnn.ir.node import NodeDecl
from graphdnn.opspecs import score_steps
from graphdnn.opspecs.attention_parts import SCORE_PORTS
from graphdnn.opspecs.score_steps import Step

if TYPE_CHECKING:
    from graphdnn.frontend.pygraph import pygraph

_WHOLE = ("ADD", "SUB", "MUL", "MIN", "MAX", "ABS", "NEG", "IDENTITY", "MOD", "GEN_INDEX", "BINARY_SELECT")
"""Modes that give the same number in floats as in integers (below 2**24)."""


def _tells(mode: str) -> bool:
    return mode.startswith(("CMP_", "LOGICAL_"))


class ScoreTape:
    """What one attention node does to its scores. ``tensors``: ports and tensors of the user's graph that the callbacks use."""

    def __init__(self, node: str, scratch: pygraph, dim: tuple[int, ...] | None) -> None:
        """``scratch``: a graph for the callbacks to add ops to; ``dim``: dims of the scores, if known."""
        self.node, self.scratch, self.dim = node, scratch, dim
        self.tensors: dict[str, Tensor] = {}
        self._known: dict[Tensor, str] = {}
        self._steps: list[Step] = []

    def _virtual(self) -> Tensor:
        made = Tensor()
        made.virtual, made.dim = True, self.dim
        if self.dim is not None:
            b, h, i, j = self.dim
            made.stride = (h * i * j, i * j, j, 1)
        return self.scratch._adopt(made)

    def trace(self, what: str, callback: Callable[..., Any], forward: bool) -> tuple[Step, ...]:
        """Steps of ``callback(graph, tensor)``. With ``forward`` false it modifies the gradient, and scores that an earlier callback has seen are
        "P". KindError and NotSupportedError for results and ops that are none of this."""
        if not callable(callback):
            raise KindError(explain(f"argument '{what}' has the wrong type", node=self.node, expected="a function", found=repr(callback)[:80]))
        start = self._virtual()
        earlier = {} if forward else {t: "P" for t, ref in self._known.items() if ref == "S"}
        self._known, self._steps = {**earlier, start: "S"}, []
        result = callback(self.scratch, start)
        if not isinstance(result, Tensor):
            raise KindError(explain(f"{what} returned something else", node=self.node, expected="a graph tensor", found=repr(result)[:80]))
        producers = {t: n for n in self.scratch._nodes for t in n.outputs.values() if isinstance(t, Tensor)}
        if self._reference(what, result, producers) != score_steps.result(len(self._steps) - 1):
            self._steps.append(("IDENTITY", (self._reference(what, result, producers),), ()))
        return tuple(self._steps)

    def _reference(self, what: str, t: Tensor, producers: dict[Tensor, NodeDecl]) -> Any:
        """What ``t`` is called, after the steps that make it have been written down."""
        todo = [t]
        while todo:
            at = todo[-1]
            node = producers.get(at)
            before = [] if node is None or at in self._known else _tensors(node.inputs.values())
            missing = [x for x in before if x in producers and x not in self._known]
            if missing:
                todo += reversed(missing)
                continue
            todo.pop()
            if node is not None and at not in self._known:
                self._steps.append(self._step(what, node))
                self._known[at] = score_steps.result(len(self._steps) - 1)
        return self._known.get(t) or self._outside(t)

    def _outside(self, t: Tensor) -> Any:
        """A number, or a port for a tensor of the user's graph."""
        if t.constant and t.value is not None:
            return t.value if t._number is None else t._number
        for port, known in self.tensors.items():
            if known is t:
                return score_steps.tensor(port)
        if len(self.tensors) == len(SCORE_PORTS):
            text = "a score_mod may use so many tensors of the graph"
            raise NotSupportedError(explain(text, node=self.node, expected=f"at most {len(SCORE_PORTS)}", found=f"also '{t.name}'"))
        self.tensors[SCORE_PORTS[len(self.tensors)]] = t
        return self._outside(t)

    def _step(self, what: str, node: NodeDecl) -> Step:
        mode, output = node.attrs.get("mode"), node.outputs.get("OUT_0")
        if node.op != "POINTWISE" or not isinstance(mode, str) or output is None:
            text = f"{what} made an op that is not pointwise"
            raise NotSupportedError(explain(text, node=node.label, expected="pointwise ops alone", found=node.op))
        self._check_types(what, node, mode, output.dtype)
        inputs = tuple(self._known.get(t) or self._outside(t) for t in _tensors(node.inputs.values()))
        if mode == "GEN_INDEX":
            self._check_index(what, node, inputs)
        attrs = tuple(sorted((k, v) for k, v in node.attrs.items() if k != "mode" and v is not None))
        return mode, inputs, attrs

    def _check_index(self, what: str, node: NodeDecl, inputs: tuple[Any, ...]) -> None:
        axis = node.attrs["axis"]
        if score_steps.parsed(inputs[0])[0] in ("number", "tensor"):
            text = f"{what} asks for indices of another tensor than the scores"
            raise NotSupportedError(explain(text, node=node.label, expected="gen_index of the scores or of what is made of them", found=inputs[0]))
        if not -4 <= axis < 4:
            raise ValidationError(explain("axis is out of range", node=node.label, expected="-4..3: batch, head, row, column", found=axis))
        node.attrs["axis"] = axis % 4

    def _check_types(self, what: str, node: NodeDecl, mode: str, dtype: data_type) -> None:
        """Values stay in the compute type of the attention: types that would change them are refused."""
        floats = (data_type.NOT_SET, data_type.FLOAT, data_type.DOUBLE)
        whole = (data_type.INT32, data_type.INT64)
        stored = floats + (whole if mode in _WHOLE else ()) + ((data_type.BOOLEAN, *whole) if _tells(mode) else ())
        compute = floats + (whole if mode in _WHOLE or _tells(mode) else ()) + ((data_type.BOOLEAN,) if _tells(mode) else ())
        for word, found, allowed in (("data type", dtype, stored), ("compute type", node.compute, compute)):
            if found not in allowed:
                text = f"{what} rounds a value: the {word} of {mode} is not that of the scores"
                raise NotSupportedError(explain(text, node=node.label, expected=", ".join(d.name for d in allowed), found=found.name))


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    return [t for t in values if isinstance(t, Tensor)]
