"""NVTX ranges around the runs of a plan: GRAPHDNN_NVTX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from graphdnn import log
from graphdnn.targets.base import Executable
from graphdnn.targets.limits import Rooms

if TYPE_CHECKING:
    from graphdnn.targets.cuda_graph import Nodes


class _Ranged(Executable):
    """An executable whose runs are NVTX ranges."""

    def __init__(self, inner: Executable, name: str, nvtx: Any) -> None:
        self._inner, self._name, self._nvtx = inner, name, nvtx

    def arrange(self, ids: Sequence[int]) -> None:
        """See the base class."""
        super().arrange(ids)
        self._inner.arrange(ids)

    def run(
        self, pointers: Mapping[int, int], scalars: Mapping[int, float | int], workspace: int, stream: int, rooms: Rooms | None = None
    ) -> None:
        """Run inside a range."""
        self._nvtx.push_range(self._name)
        try:
            self._inner.run(pointers, scalars, workspace, stream, rooms)
        finally:
            self._nvtx.pop_range()

    def graph_nodes(self, pointers: Mapping[int, int], scalars: Mapping[int, float | int], workspace: int) -> Nodes:
        """Those of the executable: a CUDA graph has no ranges."""
        return self._inner.graph_nodes(pointers, scalars, workspace)


def within(executable: Executable, name: str) -> Executable:
    """The executable, with ranges where package nvtx is installed."""
    if find_spec("nvtx") is None:
        log.warning("GRAPHDNN_NVTX is set but package nvtx is not installed; no ranges are written (pip install nvtx)")
        return executable
    return _Ranged(executable, f"graphdnn {name}", import_module("nvtx"))
