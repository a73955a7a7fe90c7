"""What is stored of a plan beside its graph and its machine code: partition, engines, knobs, recipe, name, cost, notes; as JSON, and back.

Reading creates only the dataclasses of those (see ``codec``) and checks that they fit together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from graphdnn import device as devices
from graphdnn.codegen.recipes import launches
from graphdnn.codegen.spec import Buffer, DescriptorParam, Launch, PointerParam, Recipe, ScalarParam, TensorMap, TensorScalar
from graphdnn.errors import SerializationError, explain
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.passes.regions import Partition
from graphdnn.plans import codec
from graphdnn.plans.assemble import buffers
from graphdnn.plans.cache import Kernel
from graphdnn.plans.heuristics import Candidate
from graphdnn.plans.plan import Choice, ExecutionPlan, Owned

if TYPE_CHECKING:
    from graphdnn.device import DeviceProps

_NUMBER = (int, float)


def encoded(made: ExecutionPlan) -> dict[str, Any]:
    """The JSON values of a plan; lowers it."""
    return {
        "partition": codec.encode(made.partition),
        "name": made.name,
        "cost": float(made.cost),
        "notes": list(map(str, made.numeric_notes)),
        "choices": [codec.encode(c) for c in made.choices],
        "recipe": codec.encode(made.recipe),
        "region_kernels": codec.encode(made.region_kernels),
    }


def plan(
    content: dict[str, Any],
    of: OperationGraph,
    device: DeviceProps,
    kernels: Callable[[Recipe], tuple[Kernel, ...]],
    candidate: Callable[[], Candidate] | None = None,
) -> ExecutionPlan:
    """The plan of graph ``of`` that :func:`encoded` took apart. ``kernels``: the compiled kernels of its recipe; ``candidate``: what the plan was
    made from, where that can be told. SerializationError, or KeyError, TypeError, ValueError, IndexError, AttributeError, for what fits nowhere."""
    partition, chosen = choices(content, of)
    recipe = codec.decode(Recipe, content["recipe"], "recipe")
    _check_recipe(recipe, of)
    owned: Owned = tuple(tuple(int(k) for k in row) for row in content["region_kernels"])
    found = kernels(recipe)
    need(len(owned) == len(partition.regions) and all(0 <= k < len(found) for row in owned for k in row), "kernels of the regions")
    name, cost, notes = facts(content)
    return ExecutionPlan(of, device, partition, chosen, name, cost, notes, lambda: (recipe, owned), kernels=found, candidate=candidate)


def facts(content: dict[str, Any]) -> tuple[str, float, tuple[str, ...]]:
    """Name, cost and numerical notes."""
    need(
        isinstance(content["name"], str) and type(content["cost"]) in _NUMBER and all(isinstance(n, str) for n in content["notes"]),
        "name, cost and notes",
    )
    return content["name"], float(content["cost"]), tuple(content["notes"])


def graph(content: dict[str, Any]) -> OperationGraph:
    """The graph in ``content``, of a file that has it."""
    found = codec.decode(OperationGraph, content["graph"], "graph")
    tensors = range(len(found.tensors))
    for t in found.tensors:
        need(len(t.dim) == len(t.stride) and all(d >= 0 for d in t.dim), f"dims and strides of '{t.name}'")
    need(all(t in tensors for n in found.nodes for t in (*n.input_ids, *n.output_ids)), "tensor ids of the nodes")
    return found


def choices(content: dict[str, Any], of: OperationGraph) -> tuple[Partition, tuple[Choice, ...]]:
    """The partition of a graph, and what runs each region."""
    partition = codec.decode(Partition, content["partition"], "partition")
    found = codec.decode_all(Choice, content["choices"], "choices")
    tensors, nodes = range(len(of.tensors)), range(len(of.nodes))
    for r in partition.regions:
        need(
            all(t in tensors for t in (*r.reads, *r.stores)) and all(n in nodes for n in (*r.nodes, *r.anchors, *r.epilogue_reductions)),
            "ids of the regions",
        )
        need(all(t in tensors and source in r.reads for t, source in r.views), "views of the regions")
    need(all(t in tensors for t in partition.materialized), "ids of stored tensors")
    need(len(found) == len(partition.regions), "one engine for each region")
    return partition, found


def _check_recipe(recipe: Recipe, of: OperationGraph) -> None:
    """Whether the recipe only names kernels, tensors and workspace that exist."""
    need(recipe.workspace >= 0, "the workspace size")
    for b in buffers(recipe):
        inside = 0 <= b.offset <= recipe.workspace if b.kind == "workspace" else 0 <= b.index < len(of.tensors) and b.offset >= 0
        need(inside, f"buffer {b}")
    for x in launches(recipe):
        need(0 <= x.kernel < len(recipe.kernels) and x.grid >= 0 and x.grain >= 1, f"launch {x.kernel}")
        _check_args(x, recipe, of)


def _check_args(launch: Launch, recipe: Recipe, of: OperationGraph) -> None:
    params = recipe.kernels[launch.kernel].params
    need(len(params) == len(launch.args), f"arguments of '{recipe.kernels[launch.kernel].name}'")
    for param, arg in zip(params, launch.args, strict=True):
        fits = {Buffer: PointerParam, TensorMap: DescriptorParam}.get(type(arg), ScalarParam)
        known = not isinstance(arg, TensorScalar) or 0 <= arg.index < len(of.tensors)
        need(isinstance(param, fits) and known, f"argument '{param.name}'")


def unfit(kind: str, arch: str, shared: int, here: DeviceProps) -> str | None:
    """Why a plan does not run on ``here``; None if it does. ``kind``, ``arch``: what it was built for; ``shared``: bytes of its largest block.

    A CPU takes every plan for a CPU: what was compiled for another one is compiled again. Machine code for a GPU runs on its own architecture and on
    later ones of the same generation (sm_80 on 8.6 and 8.9), with an "a" (sm_90a) on that one alone.
    """
    if kind != here.kind:
        return f"a plan for kind {kind} does not run on kind {here.kind}"
    if kind == "cpu" or arch == here.arch:
        return None
    if kind == "cudasim" or not devices.runs_on(arch, here.capability):
        return f"code for {arch} does not run on {here.arch}"
    if shared > here.shared_per_block_optin:
        return f"a block takes {shared} bytes of shared memory where {here.arch} has {here.shared_per_block_optin}"
    return None


def need(condition: bool, what: str) -> None:
    """SerializationError unless ``condition``; ``what`` does not fit."""
    if not condition:
        raise SerializationError(explain(f"stored data does not fit together: {what}", fix="build the graph again and serialize the new plan"))
