"""What attention requires of the integers that it reads when it runs: lengths within the tensors, pages within the containers."""

from __future__ import annotations

from collections.abc import Mapping

from graphdnn.codegen.spec import Buffer, Limits, Listing
from graphdnn.engines.attention_parts import AttentionProblem

_PAGED = (("Page_table_K", "K"), ("Page_table_V", "V"))


def limits(p: AttentionProblem, memory: Mapping[int, Buffer]) -> tuple[Limits, ...]:
    """Checks of lengths and page tables that the graph is given. Kernels take a number outside as the nearest inside, so that they stay in bounds."""

    def listing(port: str, axis: int) -> Listing | None:
        t = p.tensor(port)
        if t.by_value or t.constant or p.ports[port] in p.graph.producer:
            return None
        return Listing(memory[p.ports[port]], t.dtype, t.dim[axis], t.strides[axis], t.name)

    found = []
    lengths = {port: listing(port, 0) for port in ("SEQ_LEN_Q", "SEQ_LEN_KV") if p.has(port)} if p.node.attr("padding_mask") else {}
    for port, most in (("SEQ_LEN_Q", p.s_q), ("SEQ_LEN_KV", p.s_kv)):
        values = lengths.get(port)
        if values is not None:
            found.append(Limits(values, 1, 0, 0, most, "the length of a sequence is out of range"))
    for table, container in _PAGED:
        values = listing(table, 2) if p.has(table) else None
        starts = listing(f"Ragged_{table}", 0) if p.has(f"Ragged_{table}") else None
        if values is None or (starts is None) == p.has(f"Ragged_{table}"):
            continue
        t, blocks, rows = p.tensor(table), p.tensor(container).dim[0], p.tensor(container).dim[2]
        rule = "the number of a page is out of range"
        found.append(Limits(values, p.b, t.strides[0], 0, blocks - 1, rule, lengths.get("SEQ_LEN_KV"), rows, starts))
    return tuple(found)
