"""Data types: the ``data_type`` enum and one row of facts per member. Everything that depends on a dtype reads it here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphdnn._enum import ApiEnum
from graphdnn.errors import KindError, NotSupportedError, explain

if TYPE_CHECKING:
    import numpy as np


class data_type(ApiEnum):
    """Element types; values as in the cuDNN Frontend."""

    NOT_SET = 0
    FLOAT = 1
    DOUBLE = 2
    HALF = 3
    INT8 = 4
    INT32 = 5
    INT8x4 = 6
    UINT8 = 7
    UINT8x4 = 8
    INT8x32 = 9
    BFLOAT16 = 10
    INT64 = 11
    BOOLEAN = 12
    FP8_E4M3 = 13
    FP8_E5M2 = 14
    FAST_FLOAT_FOR_FP8 = 15
    FP8_E8M0 = 16
    FP4_E2M1 = 17
    INT4 = 18


@dataclass(frozen=True, slots=True)
class DTypeInfo:
    """Facts of one data type.

    ``bits``: bits of one element in memory. ``storage``: numba name of the element a kernel pointer has (bytes for sub-byte types).
    ``register``: type of the value in a kernel, one of float32, float64, int32, int64; every value of the dtype is exact in it.
    ``decode`` / ``encode``: format strings from a stored element to the register value and back ("{}": the value itself; encode is given a
    register value that is already rounded, see ``codegen.dialect.convert``). ``numpy``: NumPy (or ml_dtypes) name. ``kind``: "f", "i" or "b".
    ``eps``: unit roundoff (0 for integers). ``limits``: smallest and largest finite value.
    """

    bits: int
    storage: str
    register: str
    decode: str
    encode: str
    numpy: str
    kind: str
    eps: float
    limits: tuple[float, float]
    torch: str | None = None


_F = {"decode": "{}", "encode": "{}"}
_TABLE: dict[data_type, DTypeInfo] = {
    data_type.FLOAT: DTypeInfo(32, "float32", "float32", "{}", "{}", "float32", "f", 2.0**-24, (-3.4028234663852886e38, 3.4028234663852886e38), "float32"),
    data_type.DOUBLE: DTypeInfo(64, "float64", "float64", "{}", "{}", "float64", "f", 2.0**-53, (-1.7976931348623157e308, 1.7976931348623157e308), "float64"),
    data_type.HALF: DTypeInfo(16, "uint16", "float32", "decode_HALF({})", "encode_HALF({})", "float16", "f", 2.0**-11, (-65504.0, 65504.0), "float16"),
    data_type.BFLOAT16: DTypeInfo(
        16, "uint16", "float32", "decode_BFLOAT16({})", "encode_BFLOAT16({})", "bfloat16", "f", 2.0**-8, (-3.3895313892515355e38, 3.3895313892515355e38), "bfloat16"
    ),
    data_type.FP8_E4M3: DTypeInfo(8, "uint8", "float32", "decode_FP8_E4M3({})", "encode_FP8_E4M3({})", "float8_e4m3fn", "f", 2.0**-4, (-448.0, 448.0), "float8_e4m3fn"),
    data_type.FP8_E5M2: DTypeInfo(8, "uint8", "float32", "decode_FP8_E5M2({})", "encode_FP8_E5M2({})", "float8_e5m2", "f", 2.0**-3, (-57344.0, 57344.0), "float8_e5m2"),
    data_type.FP8_E8M0: DTypeInfo(8, "uint8", "float32", "decode_FP8_E8M0({})", "encode_FP8_E8M0({})", "float8_e8m0fnu", "f", 0.5, (2.0**-127, 2.0**127), "float8_e8m0fnu"),
    data_type.FP4_E2M1: DTypeInfo(4, "uint8", "float32", "decode_FP4_E2M1({})", "encode_FP4_E2M1({})", "float4_e2m1fn", "f", 2.0**-2, (-6.0, 6.0)),
    data_type.INT4: DTypeInfo(4, "uint8", "int32", "decode_INT4({})", "encode_INT4({})", "int4", "i", 0.0, (-8, 7)),
    data_type.INT8: DTypeInfo(8, "int8", "int32", "int32({})", "int8({})", "int8", "i", 0.0, (-128, 127), "int8"),
    data_type.UINT8: DTypeInfo(8, "uint8", "int32", "int32({})", "uint8({})", "uint8", "i", 0.0, (0, 255), "uint8"),
    data_type.INT32: DTypeInfo(32, "int32", "int32", "{}", "{}", "int32", "i", 0.0, (-(2**31), 2**31 - 1), "int32"),
    data_type.INT64: DTypeInfo(64, "int64", "int64", "{}", "{}", "int64", "i", 0.0, (-(2**63), 2**63 - 1), "int64"),
    data_type.BOOLEAN: DTypeInfo(8, "uint8", "int32", "int32({} != uint8(0))", "uint8({})", "bool", "b", 0.0, (0, 1), "bool"),
}
COMPUTE_TYPES = (data_type.FLOAT, data_type.DOUBLE, data_type.INT32, data_type.INT64)
"""Types in which kernels calculate. Other legal compute types are carried by the next wider one (:func:`compute_carrier`)."""


def info(dtype: data_type) -> DTypeInfo:
    """The row of ``dtype``; NotSupportedError for the vectorized types (INT8x4 ...), which have no element of their own."""
    try:
        return _TABLE[dtype]
    except KeyError:
        raise NotSupportedError(
            explain(f"data type {dtype.name} cannot be stored or calculated with", expected=", ".join(d.name for d in _TABLE), found=dtype.name)
        ) from None


def storable() -> tuple[data_type, ...]:
    """Every data type that a tensor may have."""
    return tuple(_TABLE)


def numpy_dtype(dtype: data_type) -> np.dtype[Any]:
    """NumPy dtype of ``dtype`` (ml_dtypes for bfloat16, fp8, fp4, int4)."""
    import numpy as np

    name = info(dtype).numpy
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return found


def compute_carrier(dtype: data_type) -> data_type:
    """The compute type that calculates for ``dtype``: HALF, BFLOAT16, fp8 and FAST_FLOAT_FOR_FP8 in FLOAT, small integers and BOOLEAN in INT32."""
    if dtype in COMPUTE_TYPES:
        return dtype
    if dtype is data_type.FAST_FLOAT_FOR_FP8:
        return data_type.FLOAT
    return data_type.FLOAT if info(dtype).kind == "f" else data_type.INT32


_ALIASES = {"float": data_type.FLOAT, "double": data_type.DOUBLE, "half": data_type.HALF, "bf16": data_type.BFLOAT16, "fp16": data_type.HALF, "fp32": data_type.FLOAT}
_BY_NAME: dict[str, data_type] = {d.name.lower(): d for d in data_type} | {i.numpy: d for d, i in _TABLE.items()} | _ALIASES


def as_data_type(value: object) -> data_type:
    """``data_type`` of an enum member, a NumPy dtype or scalar type, a torch dtype, or a name such as "bfloat16".

    Raises KindError (a TypeError) for anything else. None means NOT_SET. torch is not imported: its dtypes are known by their text.
    """
    if isinstance(value, data_type):
        return value
    if value is None:
        return data_type.NOT_SET
    if isinstance(value, str):
        name = value
    elif type(value).__module__.split(".")[0] == "torch":
        name = str(value).removeprefix("torch.")
    else:
        import numpy as np

        try:
            name = np.dtype(value).name  # type: ignore[call-overload]
        except TypeError:
            name = ""
    found = _BY_NAME.get(name.lower())
    if found is None:
        raise KindError(explain("cannot be converted to a data_type", expected="graphdnn.data_type, a NumPy or torch dtype, or its name", found=repr(value)))
    return found
