"""Barriers in shared memory that count arrivals and bytes (mbarrier), and the base of dynamic shared memory.

A barrier has a phase, 0 at first. A phase ends when as many threads have arrived as ``barrier_init`` said and every byte that ``barrier_expect``
announced has landed. ``barrier_wait(bar, p)`` returns once the phase of parity ``p`` has ended: on a fresh barrier parity 1 passes at once.
Addresses are 32-bit shared-memory addresses; a barrier is 8 bytes.

Blocks of a cluster see each other's barriers: ``barrier_arrive_remote(bar, rank)`` arrives at the barrier of that address in block ``rank``.
``cluster_sync()``: all threads of the cluster; what was written before it is seen after it. ``cluster_rank()``: place of the block in its cluster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphdnn.intrinsics import simasync as sim
from graphdnn.intrinsics.instruction import Instruction, statement

if TYPE_CHECKING:
    from graphdnn.intrinsics.emit import Emit, Value

_DYNAMIC = "graphdnn_shared"
_WAIT = (
    "{\n.reg .pred done;\nWAIT_${:uid}:\nmbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;\n@done bra READY_${:uid};\n"
    "bra WAIT_${:uid};\nREADY_${:uid}:\n}"
)


def _shared_base(o: Emit) -> Value:
    from llvmlite import ir

    module = o.builder.module
    found = module.globals.get(_DYNAMIC)
    if found is None:
        found = ir.GlobalVariable(module, ir.ArrayType(ir.IntType(8), 0), _DYNAMIC, addrspace=3)
        found.linkage = "external"
        found.align = 1024
    return o.value(o.builder.trunc(o.builder.ptrtoint(found, ir.IntType(64)), ir.IntType(32)))


def _init(o: Emit, bar: Value, count: int) -> None:
    statement(o, f"mbarrier.init.shared::cta.b64 [$0], {count};", "r", bar)


def _expect(o: Emit, bar: Value, count: int) -> None:
    statement(o, f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {count};", "r", bar)


def _arrive(o: Emit, bar: Value) -> None:
    statement(o, "mbarrier.arrive.shared::cta.b64 _, [$0];", "r", bar)


def _arrive_remote(o: Emit, bar: Value, rank: Value) -> None:
    text = "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, $0, $1;\nmbarrier.arrive.shared::cluster.b64 _, [there];\n}"
    statement(o, text, "r,r", bar, rank)


def _cluster_sync(o: Emit) -> None:
    statement(o, "barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;")


def _cluster_rank(o: Emit) -> Value:
    return o.ptx("mov.u32 $0, %cluster_ctarank;", "=r", "i32")


def _wait(o: Emit, bar: Value, parity: Value) -> None:
    statement(o, _WAIT, "r,r", bar, parity)


def _fence(o: Emit) -> None:
    statement(o, "fence.mbarrier_init.release.cluster;")


INSTRUCTIONS: tuple[Any, ...] = (
    Instruction("shared_base", (), "u32", _shared_base, sim.shared_base),
    Instruction("barrier_init", ("u32", "literal"), "void", _init, sim.barrier_init),
    Instruction("barrier_init_fence", (), "void", _fence, sim.barrier_init_fence),
    Instruction("barrier_expect", ("u32", "literal"), "void", _expect, sim.barrier_expect),
    Instruction("barrier_arrive", ("u32",), "void", _arrive, sim.barrier_arrive),
    Instruction("barrier_arrive_remote", ("u32", "u32"), "void", _arrive_remote, sim.barrier_arrive_remote),
    Instruction("cluster_sync", (), "void", _cluster_sync, sim.cluster_sync),
    Instruction("cluster_rank", (), "u32", _cluster_rank, sim.cluster_rank),
    Instruction("barrier_wait", ("u32", "u32"), "void", _wait, sim.barrier_wait),
)
"""The rows of this file."""
