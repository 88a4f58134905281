"""Weights as plain numpy arrays, so that Ray maps them into a receiver without a copy."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import numpy as np
import torch

Arrays = dict[str, tuple[str, np.ndarray]]  # name -> (torch dtype, values; bfloat16 as the int16 of the same bits)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class WeightDeliveryError(RuntimeError):
    """Weights arrived other than they were sent; the receiver keeps the version it has."""


def to_arrays(tensors: Mapping[str, torch.Tensor]) -> Arrays:
    """No copy: the arrays share the tensors' memory."""
    arrays: Arrays = {}
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _DTYPES:
            raise ValueError(f"tensor {name} has dtype {dtype}; weights travel as {' or '.join(_DTYPES)}")
        arrays[name] = (dtype, (tensor.view(torch.int16) if dtype == "bfloat16" else tensor).numpy())
    return arrays


def from_arrays(arrays: Arrays) -> dict[str, torch.Tensor]:
    """No copy, and only to be read: arrays that came through Ray are read-only memory."""
    with warnings.catch_warnings():  # torch warns of memory that cannot be written to, which is the point here
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return {name: torch.from_numpy(values).view(_DTYPES[dtype]) for name, (dtype, values) in arrays.items()}
