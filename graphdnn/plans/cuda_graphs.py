"""Plans as nodes of a CUDA graph: what ``populate_cuda_graph`` and ``update_cuda_graph`` do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphdnn.plans import variant_pack
from graphdnn.plans.plan import ExecutionPlan
from graphdnn.targets.base import no_cuda_graph

if TYPE_CHECKING:
    from graphdnn.targets.cuda_graph import Nodes


def nodes(plan: ExecutionPlan, pack: variant_pack.Pack, workspace: Any) -> Nodes:
    """The steps of ``plan`` on these buffers, checked as ``execute`` checks them. NotSupportedError unless it is a plan of a CUDA device.

    A buffer less aligned than declared gets the steps of the plan that ``execute`` would run for it, which may have to be built."""
    if plan.device.kind != "cuda":
        raise no_cuda_graph(f"plan '{plan.name}' of {plan.device.text}")
    plan, (addresses, numbers, at) = plan.placed(pack, workspace, None)
    binder, executable = plan.load()
    return executable.graph_nodes(dict(zip(binder.ids, addresses, strict=True)), numbers, at)
