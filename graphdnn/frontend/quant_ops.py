"""Op methods of block scaling."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from graphdnn.dtypes import data_type
from graphdnn.frontend.declare import Declarations
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
