"""Run a graph through the public API on guarded buffers and compare every output with the float64 reference.

A test gives a builder, a function that declares tensors and ops on a ``pygraph`` and marks outputs; :func:`check_graph` does the rest on any device:
random inputs with the declared strides inside guarded buffers, outputs and workspace full of 0xFF, the five steps, one or several executions,
comparison, and a check that no byte outside the outputs' elements has changed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import graphdnn
from graphdnn.dtypes import data_type, info
from tests.buffers import GUARD, Array, Guarded, aligned_bytes, decode, encode

Builder = Callable[[Any], Any]
DEVICES = ("cpu", "cudasim", "cuda:0")


# ------------------------------------------------------------------------------------------------------------------------------------ input data
@dataclass(frozen=True)
class Data:
    """How one input is filled. ``kind``: normal (mean 0, deviation ``hi``), uniform, grid (multiples of ``step`` in lo..hi), special (uniform with
    infinities, NaN, both zeros, the largest and the smallest value mixed in), full (every value of an integer type), values (given)."""

    kind: str = "normal"
    lo: float = -1.0
    hi: float = 1.0
    step: float = 1.0
    values: Any = None


def default_data(dtype: data_type) -> Data:
    """Small integers for integer types, N(0, 1) for the others."""
    kind = info(dtype).kind
    if kind == "f":
        return Data("normal")
    if kind == "b":
        return Data("grid", 0, 1)
    return Data("grid", max(-8, info(dtype).limits[0]), 7)


def draw(rng: np.random.Generator, dim: tuple[int, ...], dtype: data_type, data: Data) -> Array:
    """Values of shape ``dim`` that ``dtype`` represents exactly, as float64 or int64."""
    row = info(dtype)
    if data.kind == "values":
        values = np.broadcast_to(np.asarray(data.values), dim)
    elif dtype is data_type.FP8_E8M0:
        values = 2.0 ** rng.integers(-3, 4, dim)
    elif data.kind == "normal":
        values = rng.standard_normal(dim) * data.hi
    elif data.kind == "grid":
        values = rng.integers(round(data.lo / data.step), round(data.hi / data.step) + 1, dim) * data.step
    elif data.kind == "full":
        values = rng.integers(int(row.limits[0]), int(row.limits[1]), dim, endpoint=True)
    else:
        values = rng.uniform(data.lo, data.hi, dim)
    if data.kind == "special":
        smallest = 2.0**-149 if row.bits == 32 else float(np.abs(row.limits[0])) ** -1
        extremes = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, row.limits[1], row.limits[0], smallest, -smallest, 1.0])
        values = np.where(rng.random(dim) < 0.4, extremes[rng.integers(0, len(extremes), dim)], values)
    return representable(np.asarray(values), dtype)


def representable(values: Array, dtype: data_type) -> Array:
    """``values`` rounded into ``dtype`` (clipped to its finite range; NaN and infinities stay where the type has them)."""
    row = info(dtype)
    if row.kind == "b":
        return (np.asarray(values) != 0).astype(np.int64)
    if row.kind == "i":
        return np.asarray(values).astype(np.int64).clip(*(int(x) for x in row.limits))
    if row.bits < 16:  # fp8 and fp4: no infinity is stored by us, NaN where the type has one
        values = np.clip(np.nan_to_num(values, nan=0.0) if row.bits == 4 else values, *row.limits)
    with np.errstate(over="ignore", invalid="ignore"):
        return decode(encode(values, dtype), dtype)


# -------------------------------------------------------------------------------------------------------------------------------------- tolerance
SLACK_ULPS: dict[data_type, float] = {}
"""See :func:`tolerance`."""


@dataclass
class Outcome:
    """What a run gave: logical values of each output by tensor name, the graph, and how many elements could not be compared."""

    graph: Any
    outputs: dict[str, Array]
    raw: dict[str, Array] = field(default_factory=dict)
    expected: dict[str, Array] = field(default_factory=dict)
    elements: int = 0
    excluded: int = 0
    kernels: int = 0
