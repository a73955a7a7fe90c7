"""A pipeline as text: its graphs, its buffers, its workspace."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphdnn.plans.pipeline import Buffer, Program


def text(name: str, program: Program) -> str:
    """A table of the stages, one of the buffers, one of the blocks of the workspace, and what sharing memory saves."""
    stages = [
        [str(n), s.plan.graph.name, s.plan.name, str(len(s.plan.recipe.kernels)), str(s.plan.workspace_bytes)] for n, s in enumerate(program.stages)
    ]
    buffers = [
        [b.name, _kind(b, program), b.dtype.name, str(b.nbytes), _stages(b.writes), _stages(b.reads)] for b in program.buffers.values()
    ]
    blocks = [
        [str(b.offset), str(b.nbytes), b.name or f"workspace of stage {b.first}", f"{b.first} to {b.last}"]
        for b in sorted(program.layout.blocks, key=lambda b: (b.offset, b.first))
        if b.nbytes
    ]
    apart = sum(b.nbytes for b in program.layout.blocks)
    return "\n\n".join(
        (
            f"pipeline '{name}' on {program.stages[0].plan.device.text}: {len(stages)} graphs, {program.layout.nbytes} bytes of workspace "
            f"({apart} if nothing shared memory)",
            _table(["stage", "graph", "plan", "kernels", "workspace"], stages),
            _table(["buffer", "is", "type", "bytes", "written by", "read by"], buffers),
            _table(["offset", "bytes", "holds", "stages"], blocks),
        )
    )


def _kind(buffer: Buffer, program: Program) -> str:
    if buffer.name in program.layout.places:
        return "intermediate"
    if buffer.number:
        return "number"
    if not buffer.writes:
        return "input"
    return "input and output" if buffer.reads and min(buffer.reads) <= min(buffer.writes) else "output"


def _stages(numbers: list[int]) -> str:
    return ", ".join(map(str, dict.fromkeys(numbers)))


def _table(head: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[c]) for row in (head, *rows)) for c in range(len(head))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in (head, *rows))
