"""The plan list of a graph that was loaded instead of built: one plan, already built. It answers what a PlanSet answers about its plans."""

from __future__ import annotations

from typing import Any

from graphdnn.errors import BuildError, explain
from graphdnn.frontend.tensor import tensor as Tensor
from graphdnn.ir.node import NodeDecl
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.ir.tensor import Tensor as Frozen
from graphdnn.plans.plan import ExecutionPlan
from graphdnn.plans.planset import Rejection


class LoadedPlans:
    """One built plan. There is nothing left to choose, so filters and custom plans are refused by those who would call them."""

    chosen_index = 0
    rejections: tuple[Rejection, ...] = ()

    def __init__(self, plan: ExecutionPlan) -> None:
        """Wrap ``plan``, which is built."""
        self.chosen = self.ready = plan

    def count(self) -> int:
        """One."""
        return 1

    def plan_at(self, index: int) -> ExecutionPlan:
        """The plan, for index 0."""
        if index != 0:
            raise BuildError(explain(f"Plan index {index} is invalid.", expected="0, the loaded plan", found=index))
        return self.chosen

    def name_at(self, index: int) -> str:
        """Name of the plan, for index 0."""
        return self.plan_at(index).name

    def check_support(self) -> None:
        """A built plan is supported."""

    def build(self, policy: str, make: Any = None) -> None:
        """It is built."""

    def build_at(self, index: int, make: Any = None) -> None:
        """It is built."""
        self.plan_at(index)


def declarations(graph: OperationGraph) -> tuple[list[Tensor], list[NodeDecl]]:
    """Tensors and nodes as a user could have declared them, everything set."""
    tensors = [_declaration(t) for t in graph.tensors]
    nodes = [
        NodeDecl(n.op, n.name, {p: tensors[t] for p, t in n.inputs}, {p: tensors[t] for p, t in n.outputs}, dict(n.attrs), n.compute)
        for n in graph.nodes
    ]
    return tensors, nodes


def _declaration(t: Frozen) -> Tensor:
    made = Tensor()
    made.name, made.uid, made.dim, made.stride, made.dtype = t.name, t.uid, t.dim, t.stride, t.dtype
    made.virtual, made.by_value, made.constant, made.value, made.alignment = t.virtual, t.by_value, t.constant, t.value, t.alignment
    return made
