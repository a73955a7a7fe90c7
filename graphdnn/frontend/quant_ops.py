"""Op methods of block scaling and of grouped matmuls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from graphdnn.dtypes import data_type
from graphdnn.errors import KindError, explain
from graphdnn.frontend.declare import Declarations
from graphdnn.frontend.enums import moe_grouped_matmul_mode
from graphdnn.frontend.tensor import as_dims, as_integer
from graphdnn.frontend.tensor import tensor as Tensor


class QuantOps(Declarations):
    """Small types with one scale for every block of neighbouring elements: MXFP8 (blocks of 32, scales FP8_E8M0), NVFP4 (16, FP8_E4M3), and any other
    block that divides the extent. Scales may be in the order ``tensor_reordering.F8_128x4``."""

    def block_scale_quantize(
        self,
        input: Tensor,
        block_size: int,
        axis: int | None = None,
        transpose: bool = False,
        compute_data_type: Any = data_type.NOT_SET,
        name: str = "",
    ) -> list[Tensor]:
        """[Y, scale]: for every block of ``block_size`` elements along ``axis`` (the last) scale = max |x| / largest value of Y's data type,
        rounded to the scale's data type (upward for FP8_E8M0), and Y = x / scale; 0 where the scale is 0.

        Set both data types on the results. ``transpose`` makes ``axis`` the fastest in memory, of Y and of the scales."""
        n = self._node_name("BLOCK_SCALE_QUANTIZE", name)
        attrs = {
            "block_size": as_integer(f"node '{n}': argument 'block_size'", block_size),
            "axis": None if axis is None else as_integer(f"node '{n}': argument 'axis'", axis),
            "transpose": bool(transpose),
        }
        return self._add("BLOCK_SCALE_QUANTIZE", n, {"X": self._operand(n, "input", input)}, ("Y", "scale"), attrs, compute_data_type)

    def block_scale_dequantize(
        self,
        input: Tensor,
        descale: Tensor,
        block_size: int | Iterable[int],
        is_negative_scale: bool = False,
        compute_data_type: Any = data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """Every element of ``input`` times the scale of its block, or divided by it if ``is_negative_scale``.

        ``block_size``: the extents of a block, for the last dims of ``input`` ([1, 32]: along the last; [32, 1]: along the one before); a single one
        belongs to the axis along which ``descale`` has fewer elements. ``descale`` has one element a block."""
        n = self._node_name("BLOCK_SCALE_DEQUANTIZE", name)
        what = f"node '{n}': argument 'block_size'"
        sizes = (as_integer(what, block_size),) if hasattr(block_size, "__index__") else as_dims(what, block_size)
        inputs = {"X": self._operand(n, "input", input), "scale": self._operand(n, "descale", descale)}
        attrs = {"block_size": sizes, "is_negative_scale": bool(is_negative_scale)}
        return self._add("BLOCK_SCALE_DEQUANTIZE", n, inputs, ("Y",), attrs, compute_data_type)[0]


class GroupedOps(Declarations):
    """Rows grouped by expert (mixture of experts), sorted: ``first_token_offset``[e] is the first row of expert e, the last one's end where the rows
    end, and rows before the first offset have results of 0. Offsets and indices are INT32 or INT64, read when the graph runs: on a CPU a wrong one
    is an ExecutionError, on a GPU it is clamped, so that nothing outside of a tensor is touched."""

    def moe_grouped_matmul(
        self,
        token: Tensor,
        weight: Tensor,
        first_token_offset: Tensor,
        token_index: Tensor | None = None,
        token_ks: Tensor | None = None,
        mode: moe_grouped_matmul_mode = moe_grouped_matmul_mode.NONE,
        compute_data_type: Any = data_type.FLOAT,
        top_k: int = 0,
        name: str = "",
    ) -> Tensor:
        """Rows of ``token`` [1, M, K] times the weight of their expert ``weight`` [E, K, N]: [1, rows, N].

        NONE: row i of token makes row i. GATHER: row ``token_index``[i] of token makes row i, one for each index (a token that goes to top_k experts
        is read top_k times). SCATTER: row i of token makes row ``token_index``[i], or ``token_index``[i] * ``top_k`` + ``token_ks``[i] if
        ``token_ks`` numbers the choices of a token; no row may be made twice, and one that is not made is 0.

        Offsets and indices are read when the plan runs: a CPU reports offsets that decrease, what is out of range, and with SCATTER two rows that
        make one row, as an ExecutionError; a GPU does with ``GRAPHDNN_CHECK_VALUES=1``. Without it a row that two rows make is either of them, and
        not always the same; nothing outside of a buffer is read or written."""
        n = self._node_name("MOE_GROUPED_MATMUL", name)
        if not isinstance(mode, moe_grouped_matmul_mode):
            expected = "graphdnn.moe_grouped_matmul_mode"
            raise KindError(explain("argument 'mode' has the wrong type", node=n, expected=expected, found=repr(mode)[:80]))
        given = {
            "Token": ("token", token),
            "Weight": ("weight", weight),
            "FirstTokenOffset": ("first_token_offset", first_token_offset),
            "TokenIndex": ("token_index", token_index),
            "TokenKs": ("token_ks", token_ks),
        }
        optional = ("TokenIndex", "TokenKs")
        inputs = {p: self._operand(n, argument, t) for p, (argument, t) in given.items() if t is not None or p not in optional}
        attrs = {"mode": mode.name, "top_k": as_integer(f"node '{n}': argument 'top_k'", top_k)}
        return self._add("MOE_GROUPED_MATMUL", n, inputs, ("Output",), attrs, compute_data_type)[0]

    def moe_grouped_matmul_bwd(
        self, doutput: Tensor, token: Tensor, first_token_offset: Tensor, compute_data_type: Any = data_type.FLOAT, name: str = ""
    ) -> Tensor:
        """Gradient of the weights of ``moe_grouped_matmul``, from that of its output [1, M, N] and its tokens [1, M, K], both sorted by expert:
        [E, K, N], K contiguous; 0 for an expert without rows. (That of the tokens is ``moe_grouped_matmul`` with the weights transposed.)"""
        n = self._node_name("MOE_GROUPED_MATMUL_BWD", name)
        given = {"DOutput": ("doutput", doutput), "Token": ("token", token), "FirstTokenOffset": ("first_token_offset", first_token_offset)}
        inputs = {p: self._operand(n, argument, t) for p, (argument, t) in given.items()}
        return self._add("MOE_GROUPED_MATMUL_BWD", n, inputs, ("DWeight",), {}, compute_data_type)[0]
