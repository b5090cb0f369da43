"""Rotary position embedding of packed queries and keys: the specification of `rotary`.

Su et al. 2021, "RoFormer", eq. 34: the pair (u, v) of a head is turned by the angle of its row's
position. As in transformers, the two elements of pair i are i and i + D/2.

Letters: T rows, N heads, D head dim, P rows of the tables.
"""

import torch

from fastbert.reference.precision import accumulation_dtype


def rotary_reference(
    qkv: torch.Tensor,
    num_heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    index: torch.Tensor,
    inverse: bool,
) -> torch.Tensor:
    """(u, v) to (u·cos - v·sin, v·cos + u·sin) in queries and keys; values as they are.

    2·T·3·N·D elements are moved, 6·T·N·D FLOPs. The transposed map, which is the gradient, has
    the angles' signs turned round.

    Args:
        qkv: `(T, 3·N·D)`: queries, keys, values; D even.
        num_heads: N.
        cos, sin: `(P, D/2)`.
        index: `(T,)` int64, the tables' row of each row.
        inverse: turn by the negative angles.

    Returns:
        `(T, 3·N·D)` in the dtype of qkv, rounded once.
    """
    kind = accumulation_dtype(qkv.dtype)
    turned, values = qkv.unflatten(-1, (3, num_heads, -1)).split((2, 1), dim=1)
    u, v = turned.to(kind).chunk(2, dim=-1)
    c, s = (table[index][:, None, None].to(kind) for table in (cos, sin))
    if inverse:
        s = -s
    turned = torch.cat([u * c - v * s, v * c + u * s], dim=-1).to(qkv.dtype)
    return torch.cat([turned, values], dim=1).view(qkv.shape)
