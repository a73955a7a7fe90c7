"""The op method of random numbers. It is ours: the cuDNN Frontend has RNG in C++ only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from graphdnn.dtypes import data_type
from graphdnn.errors import KindError, ValidationError, explain
from graphdnn.frontend.declare import Declarations
from graphdnn.frontend.enums import scalar_type
from graphdnn.frontend.tensor import as_dims, as_integer, as_number
from graphdnn.frontend.tensor import tensor as Tensor


class RandomOps(Declarations):
    """Philox 4x32-10, by logical position."""

    def rng(
        self,
        distribution: str,
        seed: Tensor | int,
        offset: Tensor | int,
        dim: Iterable[int] | None = None,
        probability: float | None = None,
        minimum: float | None = None,
        maximum: float | None = None,
        mean: float | None = None,
        standard_deviation: float | None = None,
        compute_data_type: Any = data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """Random numbers of dims ``dim`` (or of those set on the output): "BERNOULLI" is 1 with ``probability``, else 0; "UNIFORM" lies in
        ``minimum`` (0) .. ``maximum`` (1), "NORMAL" has ``mean`` (0) and ``standard_deviation`` (1).

        ``seed`` and ``offset`` are integers or tensors of one INT32 or INT64 element, in device memory or passed by value. An element depends on
        them and on its row-major position alone: every target, layout and fusion gives the same numbers, and so does a backward graph. A Bernoulli
        mask of probability 1 - p is the mask of ``sdpa`` with ``dropout=(p, seed, offset)``."""
        n = self._node_name("RNG", name)
        if not isinstance(distribution, str):
            expected = "a string: BERNOULLI, UNIFORM or NORMAL"
            raise KindError(explain("argument 'distribution' has the wrong type", node=n, expected=expected, found=repr(distribution)[:80]))
        given = {"probability": probability, "minimum": minimum, "maximum": maximum, "mean": mean, "standard_deviation": standard_deviation}
        own = _PARAMETERS.get(distribution.upper(), {})
        for argument, value in given.items():
            if value is not None and argument not in own and own:
                rule = f"argument '{argument}' belongs to another distribution"
                raise ValidationError(explain(rule, node=n, expected=f"for {distribution.upper()}: {', '.join(own)}", found=value))
        attrs: dict[str, Any] = {"distribution": distribution.upper(), "dim": None if dim is None else as_dims("dim", dim)}
        numbers = {a: None if value is None else as_number(f"node '{n}': argument '{a}'", value) for a, value in given.items()}
        attrs |= {attribute: numbers[argument] for argument, attribute in own.items()}
        inputs = {"Seed": self._integer_operand(n, "seed", seed), "Offset": self._integer_operand(n, "offset", offset)}
        return self._add("RNG", n, inputs, ("Y",), attrs, compute_data_type)[0]

    def _integer_operand(self, node: str, argument: str, value: Any) -> Tensor:
        if isinstance(value, Tensor):
            return self._operand(node, argument, value)
        return self._scalar(as_integer(f"node '{node}': argument '{argument}'", value), scalar_type.COMPILE_TIME_CONST)


_PARAMETERS = {
    "BERNOULLI": {"probability": "bernoulli_probability"},
    "UNIFORM": {"minimum": "uniform_minimum", "maximum": "uniform_maximum"},
    "NORMAL": {"mean": "normal_mean", "standard_deviation": "normal_standard_deviation"},
}
"""Distribution -> keyword -> attribute."""
