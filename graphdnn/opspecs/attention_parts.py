"""What attention's rules, references and error bounds share: sizes, which scores count, slopes of ALiBi, dropout, steps of a score_mod.

Arrays are logical: a ragged tensor's rows have been put at their batch, and rows at or past a batch's length hold anything. Tensors with pages are in
containers still; :meth:`Problem.rows_of` takes them out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphdnn.ir.tensor import Dims
from graphdnn.opspecs import philox
from graphdnn.opspecs.scalars import Array

MASK_BLOCK = 128
"""Rows and columns that one bit of a block mask stands for."""
SCORE_PORTS = tuple(f"SCORE_MOD_{i}" for i in range(8))
"""Tensors of a score_mod."""
PAGES = {"K": "Page_table_K", "V": "Page_table_V"}
"""Container -> its page table."""
INTEGERS = ("SEQ_LEN_Q", "SEQ_LEN_KV", "Seed", "Offset", *PAGES.values())
"""Ports that take INT32 or INT64."""
Steps = Sequence[tuple[str, Sequence[Any], Sequence[tuple[str, Any]]]]
"""A score_mod: (pointwise mode, references of its inputs, attributes) of every step (:mod:`graphdnn.opspecs.score_steps`)."""


@dataclass(frozen=True)
class Sizes:
    """Extents of one attention. ``s_q`` and ``s_kv`` are the largest lengths of a batch."""

    b: int
    h_q: int
    h_k: int
    h_v: int
    s_q: int
    s_kv: int
    d_qk: int
    d_v: int

    @property
    def scores(self) -> Dims:
        """Dims of the scores."""
        return (self.b, self.h_q, self.s_q, self.s_kv)


def sizes(dims: Mapping[str, Dims], attrs: Mapping[str, Any]) -> Sizes:
    """The sizes of a node whose inputs have these dims (by port, rank 4)."""
    q, k, v = dims["Q"], dims["K"], dims["V"]
    pages = next((dims[table][2] * dims[port][2] for port, table in PAGES.items() if table in dims), k[2])
    most = attrs.get("max_seq_len_kv")
    return Sizes(q[0], q[1], k[1], v[1], q[2], pages if most is None else int(most), q[3], v[3])


def slopes(heads: int) -> Array:
    """Slope of every head (Press, Smith, Lewis, "Train short, test long", 2022): 2**(-8 i / n), i = 1..n, for n heads, a power of two; for other
    counts those of the next smaller power of two, then every second of those of twice that."""
    n = 1 << (heads.bit_length() - 1)
    first = 2.0 ** (-8.0 / n * np.arange(1, n + 1))
    more = 2.0 ** (-4.0 / n * np.arange(1, 2 * n + 1, 2))
    return np.concatenate([first, more])[:heads]


@dataclass(frozen=True)
class Problem:
    """One node with the values of its integer inputs. ``keep``: scores that count, of the dims of the scores; ``rows``, ``cols``: rows of Q and of K
    inside of their batch's length, [b, 1, s, 1]."""

    sizes: Sizes
    attrs: Mapping[str, Any]
    inputs: Mapping[str, Array]
    rows: Array
    cols: Array
    keep: Array

    @classmethod
    def of(cls, attrs: Mapping[str, Any], inputs: Mapping[str, Array]) -> Problem:
        """From arrays by port."""
        size = sizes({p: a.shape for p, a in inputs.items()}, attrs)
        padded = bool(attrs.get("padding_mask"))
        lengths = [
            np.asarray(inputs[port], np.int64).reshape(-1).clip(0, most) if padded and port in inputs else np.full(size.b, most)
            for port, most in (("SEQ_LEN_Q", size.s_q), ("SEQ_LEN_KV", size.s_kv))
        ]
        of_q, of_kv = (n.reshape(-1, 1, 1, 1) for n in lengths)
        row, col = np.arange(size.s_q).reshape(1, 1, -1, 1), np.arange(size.s_kv).reshape(1, 1, 1, -1)
        keep = (row < of_q) & (col < of_kv)
        shift = of_kv - of_q if attrs.get("diagonal_alignment") == "BOTTOM_RIGHT" else 0
        if attrs.get("right_bound") is not None:
            keep = keep & (col <= row + shift + attrs["right_bound"])
        if attrs.get("left_bound") is not None:
            keep = keep & (col > row + shift - attrs["left_bound"])
        if "Block_mask" in inputs:
            keep = keep & _blocks(inputs["Block_mask"], size)
        keep = np.broadcast_to(keep, size.scores)
        return cls(size, attrs, inputs, row < of_q, np.swapaxes(col < of_kv, 2, 3), keep)

    def rows_of(self, port: str, values: Array) -> Array:
        """The rows of K or V, [b, h, s_kv, d], taken out of pages if there are any; ``values``: the tensor at ``port``, or any array of its dims."""
        table = self.inputs.get(PAGES[port])
        if table is None:
            return values
        at = np.arange(self.sizes.s_kv)
        page = np.asarray(table, np.int64)[:, 0, at // values.shape[2], 0].clip(0, values.shape[0] - 1)
        return np.asarray(np.moveaxis(values[page, :, at % values.shape[2], :], 1, 2))

    def all_heads(self, values: Array) -> Array:
        """An array [b, h, ...] of K or V with one entry for every head of Q."""
        return np.repeat(values, self.sizes.h_q // values.shape[1], axis=1)

    def sum_of_groups(self, values: Array, heads: int) -> Array:
        """The opposite: entries of the heads of Q that share a head of K or V added up."""
        b, h = values.shape[:2]
        return np.asarray(values.reshape(b, heads, h // heads, *values.shape[2:]).sum(axis=2))

    def distance(self) -> Array:
        """Column minus row: what a slope of ALiBi is multiplied by."""
        return np.asarray(np.arange(self.sizes.s_kv) - np.arange(self.sizes.s_q)[:, None], np.float64)

    def drawn(self) -> Array:
        """1.0 where a random number keeps a weight (also where a mask hides it), else 0.0."""
        index = np.arange(int(np.prod(self.sizes.scores))).reshape(self.sizes.scores)
        seed, offset = (int(np.asarray(self.inputs[p]).reshape(())) for p in ("Seed", "Offset"))
        return np.asarray(philox.uniform(seed, offset, index) >= self.attrs["dropout_probability"], np.float64)

    def dropout(self) -> Array | None:
        """Factors of the weights, 0 where a mask hides the score; None where none are dropped."""
        if "Dropout_mask" in self.inputs:
            scale = float(self.inputs["Dropout_scale"].reshape(()))
            return np.where(self.keep, self.inputs["Dropout_mask"] * scale, 0.0)
        if "Seed" not in self.inputs:
            return None
        return np.asarray(self.drawn() / (1.0 - self.attrs["dropout_probability"]))


def _blocks(mask: Array, size: Sizes) -> Array:
    """The bits of a block mask: bit j % 8 of byte j // 8 is for the columns 128 * j and on."""
    bits = np.unpackbits(np.asarray(mask).astype(np.uint8), axis=-1, bitorder="little").astype(bool)
    rows = np.repeat(bits, MASK_BLOCK, axis=2)[:, :, : size.s_q]
    return np.repeat(rows, MASK_BLOCK, axis=3)[:, :, :, : size.s_kv]
