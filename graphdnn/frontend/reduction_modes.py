"""The enum of reduction modes, one member a row of the reduction table; written out for type checkers in reduction_modes.pyi."""

from __future__ import annotations

from graphdnn._enum import ApiEnum
from graphdnn.opspecs.reduction import REDUCTION

reduction_mode = ApiEnum("reduction_mode", {"NOT_SET": 0} | {mode: n for n, mode in enumerate(REDUCTION, 1)}, module=__name__)
reduction_mode.__doc__ = "What a reduction calculates."
