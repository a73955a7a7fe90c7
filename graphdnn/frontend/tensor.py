"""Class tensor: what a user declares of one tensor, with the setters and getters of the API."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from numbers import Complex, Real
from typing import Any

from graphdnn.dtypes import as_data_type, data_type
from graphdnn.errors import KindError, ValidationError, explain
from graphdnn.frontend.enums import tensor_reordering
from graphdnn.frontend.symbols import DimExpr, Extents, at_hint, symbolic
from graphdnn.ir import jsontext
from graphdnn.ir.extent import Extent, varies
from graphdnn.ir.layout import by_name
from graphdnn.ir.tensor import Dims, TensorDecl


def as_integer(what: str, value: Any) -> int:
    """``value`` as an int; KindError, which names ``what``, for anything that is not an integer (bool is not one)."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise KindError(explain(f"{what} has the wrong type", expected="an integer", found=repr(value)[:80]))


def as_number(what: str, value: Any) -> float:
    """``value``, a real number of any kind (NumPy's scalars too), as a float. KindError, which names ``what``, for anything else (bool is none);
    ValidationError for a number beyond every float."""
    if isinstance(value, Real) or (hasattr(value, "__float__") and not isinstance(value, Complex)):
        try:
            if not isinstance(value, bool) and str(getattr(value, "dtype", "")) != "bool":
                return float(value)
        except OverflowError:
            raise ValidationError(explain(f"{what} is out of range", expected="a number that a float can hold", found="a larger one")) from None
        except (TypeError, ValueError):
            pass
    raise KindError(explain(f"{what} has the wrong type", expected="a number", found=repr(value)[:80]))


def as_dims(what: str, values: Any) -> Dims:
    """A list, tuple or torch.Size of integers as a tuple; KindError, which names ``what``, for anything else."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise KindError(explain(f"{what} has the wrong type", expected="a list or tuple of integers", found=repr(values)))
    return tuple(as_integer(f"an entry of {what}", v) for v in values)


def as_name(value: Any, op: str = "") -> str:
    """``value`` if it is text that can be written as UTF-8; KindError or ValidationError otherwise. ``op``: whose name it is, if an op's."""
    if not isinstance(value, str):
        fix = "pass what follows the tensors by keyword; the dims of a result are set on it: .set_dim(...)" if op else None
        raise KindError(explain("a name has the wrong type", node=op or None, expected="a str", found=repr(value)[:80], fix=fix))
    if not value.isascii() and any(0xD800 <= ord(c) <= 0xDFFF for c in value):
        raise ValidationError(explain("a name holds a lone surrogate, which no file can store", found=ascii(value)))
    return value


class tensor(TensorDecl):
    """A tensor of a graph. Setters return the tensor itself, so that they chain. Compared and hashed by identity.

    Made by :meth:`pygraph.tensor`, :meth:`pygraph.tensor_like`, :meth:`pygraph.tensor_scalar` or an op; ``tensor()`` makes one that belongs to
    the first graph that uses it. Strides and extents are in elements, alignment in bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._owner: object | None = None
        self.symbolic_dim: Extents | None = None
        self.symbolic_stride: Extents | None = None
        self._number: float | int | None = None  # a number given as an operand: its data type follows the other operands

    # ------------------------------------------------------------------------------------------------------------------- name, type, shape
    def get_name(self) -> str:
        """The name; empty if none was given."""
        return self.name

    def set_name(self, name: str) -> tensor:
        """Set the name. Names need not be unique, but only unique ones can address a tensor in a variant pack."""
        self.name = as_name(name)
        return self

    def get_data_type(self) -> data_type:
        """The data type; NOT_SET until it is set or ``validate`` has filled it in."""
        return self.dtype

    def set_data_type(self, data_type: Any) -> tensor:
        """Set the data type: a graphdnn.data_type, a NumPy or torch dtype, or a name such as "bfloat16"."""
        self.dtype = as_data_type(data_type)
        return self

    def get_dim(self) -> list[int]:
        """The extents; empty until set or inferred by ``validate`` (and for rank 0)."""
        return list(self.dim or ())

    def set_dim(self, dim: Iterable[int | DimExpr]) -> tensor:
        """Set the extents: integers, and :class:`graphdnn.Dim` where they differ from call to call; ``()`` is rank 0."""
        self.symbolic_dim = tuple(dim) if symbolic(dim) else None
        self.dim = as_dims("dim", dim if self.symbolic_dim is None else at_hint(self.symbolic_dim))
        return self

    def get_stride(self) -> list[int]:
        """The strides in elements; empty until set or inferred by ``validate`` (and for rank 0)."""
        return list(self.stride or ())

    def set_stride(self, stride: Iterable[int | DimExpr]) -> tensor:
        """Set the strides, in elements: integers, or sums and products of :class:`graphdnn.Dim`."""
        self.symbolic_stride = tuple(stride) if symbolic(stride) else None
        self.stride = as_dims("stride", stride if self.symbolic_stride is None else at_hint(self.symbolic_stride))
        return self

    def set_layout(self, layout: str | Sequence[int]) -> tensor:
        """Set packed strides for the extents that are set: "row" (last dim fastest), "column" (last two swapped), "channels_last", or the dims in
        order, fastest first."""
        return self.set_stride(by_name(self.symbolic_dim or self.dim or (), layout))  # type: ignore[arg-type]

    def at(self, values: Mapping[str, int]) -> None:
        """Give the dims in the declaration these extents."""
        if self.symbolic_dim is not None:
            self.dim = tuple(e.value(values) if isinstance(e, DimExpr) else e for e in self.symbolic_dim)
        if self.symbolic_stride is not None:
            some = {n: v or (Extent(1) if varies(v) else 1) for n, v in values.items()}  # an empty tensor has the strides of its shape with ones
            empty = self.dim is not None and 0 in self.dim
            at = [(e, e.value(values)) if isinstance(e, DimExpr) else (e, e) for e in self.symbolic_stride]
            unknown = self.dim is None  # a result whose dims are inferred later is empty where a stride is 0
            self.stride = tuple(e.value(some) if isinstance(e, DimExpr) and (empty or (unknown and n == 0)) else n for e, n in at)

    # ------------------------------------------------------------------------------------------------------------------------------- roles
    def get_is_virtual(self) -> bool:
        """Whether the tensor exists only inside the graph."""
        return self.virtual

    def set_is_virtual(self, is_virtual: bool) -> tensor:
        """Say whether the tensor exists only inside the graph."""
        self.virtual = bool(is_virtual)
        return self

    def set_output(self, is_output: bool) -> tensor:
        """``set_output(True)`` makes the result of an op an output of the graph."""
        self.virtual = not is_output
        return self

    def get_is_pass_by_value(self) -> bool:
        """Whether the one element is read on the host when the plan is executed."""
        return self.by_value

    def set_is_pass_by_value(self, is_pass_by_value: bool) -> tensor:
        """Say whether the one element is read on the host when the plan is executed."""
        self.by_value = bool(is_pass_by_value)
        return self

    def get_has_compile_time_constant(self) -> bool:
        """Whether the value is printed in the kernel."""
        return self.constant

    def get_uid(self) -> int:
        """The unique id; 0 until it is set or ``build_operation_graph`` has assigned one."""
        return self.uid or 0

    def set_uid(self, uid: int) -> tensor:
        """Set the unique id (0 is legal)."""
        self.uid = as_integer("uid", uid)
        return self

    # -------------------------------------------------------------------------------------------------------------------------- in memory
    def get_reordering_type(self) -> tensor_reordering:
        """Special order of the elements in memory."""
        return tensor_reordering[self.reordering]

    def set_reordering_type(self, reordering_type: tensor_reordering) -> tensor:
        """Set the special order of the elements in memory."""
        if not isinstance(reordering_type, tensor_reordering):
            raise KindError(
                explain("reordering_type has the wrong type", tensor=self.name, expected="graphdnn.tensor_reordering", found=repr(reordering_type))
            )
        self.reordering = reordering_type.name
        return self

    def set_ragged_offset(self, ragged_offset: tensor) -> tensor:
        """Set the tensor of (batch + 1) element offsets at which the sequences of a packed tensor start."""
        if not isinstance(ragged_offset, tensor):
            raise KindError(explain("ragged_offset has the wrong type", tensor=self.name, expected="graphdnn.tensor", found=repr(ragged_offset)))
        self.ragged_offset = ragged_offset
        return self

    def get_alignment(self) -> int:
        """Bytes by which the pointer is a multiple, promised to the kernels; 16 by default."""
        return self.alignment

    def set_alignment(self, alignment: int) -> tensor:
        """Promise that the pointer is a multiple of ``alignment`` bytes (a power of two)."""
        value = as_integer("alignment", alignment)
        if value < 1 or value & (value - 1):
            raise ValidationError(explain("alignment must be a power of two", tensor=self.name, expected="1, 2, 4, 8, 16, ...", found=value))
        self.alignment = value
        return self

    def get_vector_count(self) -> int:
        """Elements of one vector of a vectorized layout; 1 if there is none."""
        return self.vector_count

    def get_vector_dimension(self) -> int:
        """The vectorized dim; -1 if there is none."""
        return self.vector_dimension

    def set_vector_count_and_dimension(self, count: int, dim: int) -> tensor:
        """Set the vectorized layout."""
        self.vector_count, self.vector_dimension = as_integer("count", count), as_integer("dim", dim)
        return self

    def __repr__(self) -> str:
        """JSON text: a one-element list that holds the tensor as in the graph's JSON text."""
        return jsontext.tensor_text(self)
