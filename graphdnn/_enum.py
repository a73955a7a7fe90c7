"""Base of the API's enums: members compare only within their type, ``int(x)`` works, printed as pybind prints them."""

from __future__ import annotations

from enum import Enum


class ApiEnum(Enum):
    """``str(x)`` is "data_type.HALF", ``repr(x)`` is "<data_type.HALF: 3>", ``int(x)`` is 3; ``T(3)`` gives the member."""

    def __int__(self) -> int:
        return int(self.value)

    def __index__(self) -> int:
        return int(self.value)

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__}.{self.name}: {self.value}>"
