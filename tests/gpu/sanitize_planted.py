"""A graph on a GPU with a planted fault, or none: what the sanitizer has to notice.

Usage: python -m tests.gpu.sanitize_planted none|write|read|race. ``write``, ``read``: the output, or an input, ends 64 bytes before the tensor does.
``race``: the barriers of a kernel that sums over a block are gone.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

BARRIER = "cuda.syncthreads()"


def without_barriers() -> None:
    """Kernels that are compiled from now on have none."""
    from graphdnn.codegen import render

    right = render.render

    def wrong(spec: Any) -> Any:
        source = right(spec)
        return replace(source, text=source.text.replace(BARRIER, "pass"))

    render.render = wrong


def run(fault: str, device: str) -> None:
    """Execute the graph twice. Errors that the fault leads to are of no interest: the sanitizer's word counts."""
    from tests import hammer

    if fault == "race":
        without_barriers()
    kind = "total" if fault == "race" or fault == "none" else "pointwise"
    g = hammer.built(kind, device)
    import torch

    expected = hammer.values(g, kind, device, 1)
    given = dict(expected.given) | {uid: hammer.place(g, uid, device) for uid in expected.wanted}
    short = {"write": hammer.Y, "read": hammer.A}.get(fault)
    if short is not None:
        whole = given[short].reshape(-1)
        kept = whole[: whole.numel() - 16].clone()
        del whole
        given[short] = kept.data_ptr()
    for _ in range(2):
        g.execute(given, hammer.workspace(g, device))
        torch.cuda.synchronize()


if __name__ == "__main__":
    os.environ["GRAPHDNN_CACHE"] = "0"
    try:
        run(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "cuda:0")
    except RuntimeError as error:
        print(f"{type(error).__name__}: {str(error)[:300]}")
    print("done")
