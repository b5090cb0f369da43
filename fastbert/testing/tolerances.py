"""Every tolerance of the project, each with its reason. A change here is a commit of its own.

The rule (of two): our error against a float64 reference may be twice the error of plain PyTorch in
the same dtype, plus twice the rounding of that dtype, plus an absolute term for the cases where
plain PyTorch happens to be exact. The mean error may be 1.5 times plain PyTorch's.
"""

import torch

MAX_FACTOR = 2.0
MEAN_FACTOR = 1.5

EPS = {
    torch.float64: 2.0**-52,
    torch.float32: 2.0**-23,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
}

ATOL = {
    # Values of order one after a sum of a few hundred products: another order of summation.
    "default": {torch.float32: 2e-6, torch.bfloat16: 1e-5, torch.float16: 1e-5},
    # Elementwise, no sums: only the rounding of erf or tanh.
    "bias_gelu": {torch.float32: 2e-7, torch.bfloat16: 1e-6, torch.float16: 1e-6},
    "geglu": {torch.float32: 2e-7, torch.bfloat16: 1e-6, torch.float16: 1e-6},
    "rotary": {torch.float32: 2e-7, torch.bfloat16: 1e-6, torch.float16: 1e-6},
    # Gathers and scatters are exact.
    "unpad": {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 0.0},
    # Gradients of a whole model: small ones sit far below the largest, cancellation differs.
    "model": {torch.float32: 1e-5, torch.bfloat16: 1e-3, torch.float16: 1e-3},
}


def atol(op: str | None, dtype: torch.dtype) -> float:
    """The absolute term for `op` in `dtype`."""
    return ATOL.get(op or "default", ATOL["default"]).get(dtype, 0.0)
