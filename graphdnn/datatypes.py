"""Submodule ``datatypes`` of the API: converters between torch's and graphdnn's data types. torch is imported only where it is asked for."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from graphdnn.dtypes import as_data_type, data_type, info

__all__ = ["is_torch_available"]


def is_torch_available() -> bool:
    """Whether torch can be imported. Does not import it."""
    return "torch" in sys.modules or importlib.util.find_spec("torch") is not None


def _is_torch_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _torch_to_cudnn_data_type(torch_data_type: Any) -> data_type:
    """The data type of a torch dtype; KindError (a TypeError) if there is none."""
    return as_data_type(torch_data_type)


def _cudnn_to_torch_data_type(cudnn_data_type: data_type) -> Any:
    """The torch dtype of a data type; None if torch has none."""
    import torch

    if cudnn_data_type is data_type.NOT_SET:
        return None
    name = info(cudnn_data_type).torch
    return None if name is None else getattr(torch, name, None)


def _library_type(value: Any) -> data_type:
    """``value`` (data type of any library, or a name) as a data type."""
    return as_data_type(value)
