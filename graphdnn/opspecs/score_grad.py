"""The derivative of a score_mod for which no score_mod_bprop is given, as the steps of one (reverse mode)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from graphdnn.errors import NotSupportedError, explain
from graphdnn.opspecs.score_steps import Step, result

Emit = Callable[..., str]
Rule = Callable[[Emit, str, tuple[Any, ...], str], tuple[Any, ...]]
"""rule(emit, gradient of the result, references of the inputs, reference of the result): gradients of the inputs; None: there is none."""

_FLAT = ("CEIL", "FLOOR", "GEN_INDEX", "LOGICAL_AND", "LOGICAL_OR", "LOGICAL_NOT", *(f"CMP_{m}" for m in ("EQ", "NEQ", "GT", "GE", "LT", "LE")))
"""Modes whose result does not move with their inputs."""


def _larger(e: Emit, g: str, x: tuple[Any, ...], first: str) -> tuple[Any, ...]:
    wins = e(first, x[0], x[1])
    return e("BINARY_SELECT", g, 0.0, wins), e("BINARY_SELECT", 0.0, g, wins)


def _power(e: Emit, g: str, x: tuple[Any, ...], y: str) -> tuple[Any, ...]:
    slope = e("MUL", x[1], e("POW", x[0], e("SUB", x[1], 1.0)))
    return e("MUL", g, slope), e("MUL", g, e("MUL", y, e("LOG", x[0])))


_RULES: dict[str, Rule] = {
    "IDENTITY": lambda e, g, x, y: (g,),
    "ADD": lambda e, g, x, y: (g, g),
    "SUB": lambda e, g, x, y: (g, e("NEG", g)),
    "MUL": lambda e, g, x, y: (e("MUL", g, x[1]), e("MUL", g, x[0])),
    "DIV": lambda e, g, x, y: (e("DIV", g, x[1]), e("NEG", e("DIV", e("MUL", g, y), x[1]))),
    "ADD_SQUARE": lambda e, g, x, y: (g, e("MUL", g, e("MUL", 2.0, x[1]))),
    "POW": _power,
    "MAX": lambda e, g, x, y: _larger(e, g, x, "CMP_GE"),
    "MIN": lambda e, g, x, y: _larger(e, g, x, "CMP_LE"),
    "NEG": lambda e, g, x, y: (e("NEG", g),),
    "ABS": lambda e, g, x, y: (e("BINARY_SELECT", g, e("NEG", g), e("CMP_GE", x[0], 0.0)),),
    "SQRT": lambda e, g, x, y: (e("DIV", e("MUL", 0.5, g), y),),
    "RSQRT": lambda e, g, x, y: (e("DIV", e("MUL", -0.5, e("MUL", g, y)), x[0]),),
    "RECIPROCAL": lambda e, g, x, y: (e("NEG", e("MUL", g, e("MUL", y, y))),),
    "EXP": lambda e, g, x, y: (e("MUL", g, y),),
    "LOG": lambda e, g, x, y: (e("DIV", g, x[0]),),
    "SIN": lambda e, g, x, y: (e("MUL", g, e("COS", x[0])),),
    "COS": lambda e, g, x, y: (e("NEG", e("MUL", g, e("SIN", x[0]))),),
    "TAN": lambda e, g, x, y: (e("MUL", g, e("ADD_SQUARE", 1.0, y)),),
    "ERF": lambda e, g, x, y: (e("MUL", g, e("MUL", 2 / math.sqrt(math.pi), e("EXP", e("NEG", e("MUL", x[0], x[0]))))),),
    "BINARY_SELECT": lambda e, g, x, y: (e("BINARY_SELECT", g, 0.0, x[2]), e("BINARY_SELECT", 0.0, g, x[2]), None),
    "MOD": lambda e, g, x, y: (g, None),
} | {mode: lambda e, g, x, y: (None,) * len(x) for mode in _FLAT}
_ACTIVATIONS = ("RELU", "TANH", "SIGMOID", "ELU", "GELU", "GELU_APPROX_TANH", "SOFTPLUS", "SWISH")
"""Each has a mode of its own for its gradient, with the same attributes."""
REFUSED = tuple(f"{name}_BWD" for name in _ACTIVATIONS)
"""Modes without a rule: second derivatives of activations. A test holds that every mode of the table is here or has a rule."""


def gradient_steps(attrs: Any) -> tuple[Step, ...]:
    """Steps of the score_mod_bprop of a node with these attributes (a mapping or pairs): given, derived, or none where there is no score_mod."""
    found: Mapping[str, Any] = dict(attrs)
    given = found.get("score_mod_bprop")
    if given or not found.get("score_mod"):
        return tuple(given or ())
    return derived(tuple(found["score_mod"]))


@functools.lru_cache(maxsize=64)
def derived(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The steps of ``steps`` again, on "P", then those of their gradient. NotSupportedError for a mode without a rule."""
    made: list[Step] = [(mode, tuple("P" if x == "S" else x for x in inputs), attrs) for mode, inputs, attrs in steps]

    def emit(mode: str, *inputs: Any, attrs: tuple[tuple[str, Any], ...] = ()) -> str:
        made.append((mode, inputs, attrs))
        return result(len(made) - 1)

    moving = {"P"}
    for i, (_, inputs, _) in enumerate(made):
        if any(x in moving for x in inputs):
            moving.add(result(i))
    gradients: dict[str, str] = {result(len(steps) - 1): "S"}
    for i in range(len(steps) - 1, -1, -1):
        g = gradients.get(result(i))
        if g is None or result(i) not in moving:
            continue
        mode, inputs, attrs = made[i]
        for x, part in zip(inputs, _inputs(emit, g, made[i], result(i), moving), strict=True):
            if part is not None and x in moving:
                gradients[x] = part if x not in gradients else emit("ADD", gradients[x], part)
    last = gradients.get("P")
    emit("IDENTITY", last) if last is not None else emit("MUL", "S", 0.0)
    return tuple(made)


def _inputs(emit: Emit, g: str, step: Step, result: str, moving: set[str]) -> tuple[Any, ...]:
    mode, inputs, attrs = step
    name = mode.removesuffix("_FWD")
    if name in _ACTIVATIONS and mode.endswith("_FWD"):
        return (emit(f"{name}_BWD", g, inputs[0], attrs=attrs),)
    lost = mode == "MOD" and inputs[1] in moving
    if mode not in _RULES or lost:
        text = "there is no rule for the derivative of this step of score_mod"
        found = f"{mode} by what depends on the score" if lost else mode
        raise NotSupportedError(explain(text, expected=", ".join((*_RULES, *_ACTIVATIONS)), found=found, fix="give score_mod_bprop"))
    return _RULES[mode](emit, g, inputs, result)
