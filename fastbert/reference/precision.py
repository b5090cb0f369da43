"""The dtype of the arithmetic inside the reference implementations."""

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64 (the oracle of the tests), else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
