"""What attention requires of the integers that it reads when it runs: lengths within the tensors, batches of packed tensors within their buffers,
pages within the containers."""

from __future__ import annotations

from collections.abc import Mapping

from graphdnn.codegen.spec import Buffer, Limits, Listing, Packed
from graphdnn.dtypes import info
from graphdnn.engines.attention_parts import AttentionProblem

_TABLES = {"Page_table_K": "K", "Page_table_V": "V"}
_OF_KV = ("K", "V", "dK", "dV", *_TABLES)


def limits(p: AttentionProblem, memory: Mapping[int, Buffer]) -> tuple[Limits | Packed, ...]:
    """Checks of lengths, offsets and page tables. Kernels take a length or a page outside as the nearest inside, so that these stay in bounds."""

    def listing(port: str, axis: int) -> Listing | None:
        t = p.tensor(port)
        if t.by_value or t.constant:
            return None
        return Listing(memory[p.ports[port]], t.dtype, t.dim[axis], t.strides[axis], t.name)

    found: list[Limits | Packed] = []
    lengths = {port: listing(port, 0) for port in ("SEQ_LEN_Q", "SEQ_LEN_KV") if p.has(port)} if p.node.attr("padding_mask") else {}
    for port, most in (("SEQ_LEN_Q", p.s_q), ("SEQ_LEN_KV", p.s_kv)):
        values = lengths.get(port)
        if values is not None:
            found.append(Limits(values, 1, 0, 0, most, "the length of a sequence is out of range"))
    for ragged in (n for n in p.ports if n.startswith("Ragged_")):
        port = ragged.removeprefix("Ragged_")
        starts, used = listing(ragged, 0), lengths.get("SEQ_LEN_KV" if port in _OF_KV else "SEQ_LEN_Q")
        if starts is not None and used is not None:
            found.append(_packed(p, port, starts, used))
    for table, container in _TABLES.items():
        values = listing(table, 2) if p.has(table) else None
        starts = listing(f"Ragged_{table}", 0) if p.has(f"Ragged_{table}") else None
        if values is None or (starts is None) == p.has(f"Ragged_{table}"):
            continue
        t, blocks, rows = p.tensor(table), p.tensor(container).dim[0], p.tensor(container).dim[2]
        rule = "the number of a page is out of range"
        found.append(Limits(values, p.b, t.strides[0], 0, blocks - 1, rule, lengths.get("SEQ_LEN_KV"), rows, starts))
    return tuple(found)


def _packed(p: AttentionProblem, port: str, starts: Listing, used: Listing) -> Packed:
    t = p.tensor(port)
    per = p.tensor(_TABLES[port]).dim[2] if port in _TABLES else 1
    row = ((t.dim[1], t.strides[1]), (t.dim[3], t.strides[3]))
    written = p.ports[port] in p.graph.producer
    rows = t.dim[2] if t.size else 0
    return Packed(starts, used, per, rows, t.strides[2], row, p.ports[port], info(t.dtype).bits, t.name, written)
