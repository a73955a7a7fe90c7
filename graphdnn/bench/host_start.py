"""A new process of ``graphdnn bench host``: ``python -m graphdnn.bench.host_start build|load DEVICE FILE`` prints what it took as JSON.

What is timed is what a program does after its imports: the five steps for a graph whose kernels lie in the disk cache, or ``deserialize`` of a plan,
to the point where ``execute`` finds everything loaded. On a GPU the CUDA context is made before, as a program that has tensors there has one.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main(what: str, device: str, path: str) -> dict[str, Any]:
    """Milliseconds ("ms"), those of the imports before, and where the kernels came from."""
    start = time.perf_counter()
    import graphdnn

    fe: Any = graphdnn
    graph, modes = fe.pygraph(device=device), [fe.heur_mode.A, fe.heur_mode.FALLBACK]
    imported = time.perf_counter()
    if device.startswith("cuda"):
        from graphdnn.targets.cuda_driver import primary_context

        primary_context(int(device.partition(":")[2] or 0))
    data: Any = Path(path).read_text() if what == "build" else Path(path).read_bytes()
    if what == "build":
        graph.deserialize(data)
    begun = time.perf_counter()
    if what == "build":
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans(modes)
        graph.check_support()
        graph.build_plans()
    else:
        graph.deserialize(data)
    graph.plan.load()
    done = time.perf_counter()
    return {"ms": 1e3 * (done - begun), "import_ms": 1e3 * (imported - start), "origins": sorted({k.origin for k in graph.plan.kernels})}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
