"""``graph``, ``jit`` and ``graph_cache``: short ways to declare, build and keep graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from graphdnn.dtypes import data_type
from graphdnn.errors import ValidationError, explain
from graphdnn.frontend.enums import heur_mode
from graphdnn.frontend.pygraph import pygraph
from graphdnn.frontend.tensor import tensor


@contextmanager
def graph(
    handle: int | None,
    name: str = "cudnn_graph",
    io_data_type: Any = data_type.HALF,
    intermediate_data_type: Any = data_type.FLOAT,
    compute_data_type: Any = data_type.FLOAT,
) -> Iterator[tuple[pygraph, list[Any]]]:
    """``with graph(handle) as (g, _):`` declare a graph ``g``. Nothing is built on exit."""
    yield pygraph(name, io_data_type, intermediate_data_type, compute_data_type, handle=handle), []


def jit(
    heur_modes: heur_mode | list[heur_mode] = heur_mode.A, **kwargs: Any
) -> Callable[[Callable[..., tuple[pygraph, list[tensor]]]], Callable[..., tuple[pygraph, list[int]]]]:
    """Decorator of a function that returns ``(graph, [tensors])``: the graph is built if it has no plans yet, and ``(graph, [uids])`` is returned.

    ``kwargs`` are accepted because scripts written for the cuDNN Frontend pass them; as there, they change nothing."""
    modes = list(heur_modes) if isinstance(heur_modes, list | tuple) else [heur_modes]

    def decorate(function: Callable[..., tuple[pygraph, list[tensor]]]) -> Callable[..., tuple[pygraph, list[int]]]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> tuple[pygraph, list[int]]:
            g, tensors = function(*args, **kwargs)
            if g.get_execution_plan_count() <= 0:
                g.build(modes)
            return g, [t.get_uid() if isinstance(t, tensor) else t for t in tensors]

        return wrapper

    return decorate


def graph_cache(key_fn: Callable[..., Hashable], maxsize: int = 256) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that keeps what a function returned under ``key_fn`` of the same arguments, and returns the identical object the next time. The
    oldest of ``maxsize`` entries goes first."""
    if maxsize < 1:
        raise ValidationError(explain("maxsize must be positive", expected="at least 1", found=maxsize))

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        kept: dict[Hashable, Any] = {}

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            key = key_fn(*args, **kwargs)
            if key in kept:
                return kept[key]
            made = function(*args, **kwargs)
            if len(kept) >= maxsize:
                kept.pop(next(iter(kept)), None)
            kept[key] = made
            return made

        return wrapper

    return decorate
