"""Plans built ahead of time: one graph, several architectures, one file; on a machine that need not have any of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from graphdnn import device as devices
from graphdnn.errors import KindError, ValidationError, explain
from graphdnn.frontend.choose import limited
from graphdnn.frontend.enums import heur_mode
from graphdnn.frontend.pygraph import pygraph

if TYPE_CHECKING:
    from graphdnn.device import DeviceProps
    from graphdnn.plans.plan import ExecutionPlan

_MODES = (heur_mode.A, heur_mode.FALLBACK)


def compile_for(graph: pygraph | str, archs: Sequence[str] | str, modes: Sequence[heur_mode] = _MODES) -> bytes:
    """The plans of a graph for several devices as one file, which ``deserialize`` takes on each of them: it loads the plan for the device at hand.

    ``graph``: a pygraph (which is validated and gets its uids) or its JSON text. ``archs``: described GPUs such as "sm_80" and "sm_90a", and "cpu";
    a list or a text with commas. ``modes``: of heuristics, a list or tuple. Needs the compilers, no GPU and no driver. KindError and ValidationError
    for arguments (an unknown or repeated architecture), NotSupportedError where no engine takes the graph, BuildError where a compiler is missing.
    """
    from graphdnn.plans import serialize

    if isinstance(graph, pygraph):
        graph.build_operation_graph()
        graph = str(graph)
    if not isinstance(graph, str):
        raise KindError(explain("graph has the wrong type", expected="a pygraph or its JSON text", found=repr(graph)[:80]))
    return serialize.merge(serialize.dump(plan) for plan in plans_for(graph, archs, modes=modes))


def plans_for(
    text: str, archs: Sequence[str] | str, name: str = "", modes: Sequence[heur_mode] = _MODES, tell: Callable[[str], None] = lambda line: None
) -> list[ExecutionPlan]:
    """A built plan of the graph with JSON text ``text`` for each of ``archs``; see :func:`compile_for`. ``tell`` is called before each build."""
    from graphdnn.plans import serialize

    plans = []
    for place in _places(archs):
        graph = pygraph(name=name, device=place)
        graph.deserialize(text)
        serialize.expect_fixed(graph.dims)
        graph._device = limited(place, graph._sm_count)
        graph.build_operation_graph()
        graph.create_execution_plans(modes)
        graph.check_support()
        tell(f"{graph.get_execution_plan_count()} candidate plans on {place.text}; building the first that builds")
        graph.build_plans()
        plans.append(graph.plan)
    return plans


def _places(archs: Any) -> list[DeviceProps]:
    names = archs.split(",") if isinstance(archs, str) else archs
    if not isinstance(names, Sequence) or not all(isinstance(n, str) for n in names):
        raise KindError(explain("archs has the wrong type", expected="a list of texts such as 'sm_90a'", found=repr(archs)[:80]))
    places = [devices.parse(n) for n in names]
    seen = [(p.kind, p.arch) for p in places]
    if not places or len(set(seen)) < len(seen):
        raise ValidationError(
            explain("a file of plans holds one plan for each architecture", expected="different architectures", found=", ".join(names) or "none")
        )
    return places
