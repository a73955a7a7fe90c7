"""Tensors: the mutable declaration that a user fills in, and the frozen form that every pass after validate sees."""

from __future__ import annotations

from dataclasses import dataclass

from graphdnn.dtypes import data_type

Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the elements of a tensor are, if its dims and strides cannot say it: read in row-major order, a tensor of ``dim`` and ``stride`` has
    the elements of the declared one, which is padded at the ends of its dims to the extents ``padded``."""

    dim: Dims
    stride: Dims
    padded: Dims


@dataclass(eq=False)
class TensorDecl:
    """What a user has said of a tensor so far. ``dim`` None: not set yet ( ``()`` is rank 0). Compared and hashed by identity. ``placement`` is set
    by infer."""

    name: str = ""
    dim: Dims | None = None
    stride: Dims | None = None
    dtype: data_type = data_type.NOT_SET
    virtual: bool = False
    by_value: bool = False
    constant: bool = False
    value: float | int | None = None
    uid: int | None = None
    alignment: int = 16
    reordering: str = "NONE"
    ragged_offset: TensorDecl | None = None
    vector_count: int = 1
    vector_dimension: int = -1
    placement: Placement | None = None


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of an operation graph; everything resolved. Strides are in elements. ``value`` is a stored scalar (with ``by_value``: the
    default that a variant pack may replace; with ``constant``: baked into the kernel). ``ragged``: its rows are packed, at offsets that a node has
    as an input, so that dims and strides do not say how much memory it takes."""

    name: str
    uid: int
    dim: Dims
    stride: Dims
    dtype: data_type
    virtual: bool = False
    by_value: bool = False
    constant: bool = False
    value: float | int | None = None
    alignment: int = 16
    ragged: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        n = 1
        for d in self.dim:
            n *= d
        return n

    @property
    def strides(self) -> Dims:
        """Effective strides: 0 where the extent is 1, whatever was declared."""
        return tuple(0 if d == 1 else s for d, s in zip(self.dim, self.stride, strict=True))

    @property
    def extent(self) -> int:
        """Elements from the first to one past the last that the strides reach; 0 if empty."""
        if self.size == 0:
            return 0
        return 1 + sum((d - 1) * abs(s) for d, s in zip(self.dim, self.stride, strict=True))
