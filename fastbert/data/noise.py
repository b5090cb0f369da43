"""The random bits that masking reads: a pure function of (seed, epoch, index of the sequence).

Every token owns four 32-bit words, drawn by Philox (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", SC 2011), whose counter is set to the sequence: the worker, the batch and the
order in which sequences are read do not matter.
"""

import numpy as np

WORDS = 4
SELECT, ACTION, REPLACEMENT, LENGTH = range(WORDS)


def generator(seed: int, epoch: int = 0, index: int = 0) -> np.random.Generator:
    """A generator of its own for each (seed, epoch, index), 2¹²⁸ numbers apart from the others.

    Args:
        seed, epoch, index: from 0 to 2⁶⁴ - 1.

    Raises:
        ValueError: a seed or an epoch outside of that.
    """
    _check(seed, epoch)
    return np.random.Generator(np.random.Philox(key=[seed, 0], counter=[0, 0, index, epoch]))


def token_noise(rng: np.random.Generator, num_tokens: int) -> np.ndarray:
    """`(num_tokens, 4)` uint32, drawn in one go."""
    raw = rng.integers(0, 1 << 64, num_tokens * WORDS // 2, dtype=np.uint64)
    return raw.view(np.uint32).reshape(num_tokens, WORDS)


def sequence_noise(seed: int, epoch: int, indices: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """`(T, 4)` uint32 for a batch: each sequence's rows depend on (seed, epoch, its index) alone.

    Args:
        seed, epoch: as in `generator`.
        indices: `(N,)` the sequences' numbers in the data set.
        lengths: `(N,)` their tokens; T is the sum.

    Raises:
        ValueError: as in `generator`.
    """
    _check(seed, epoch)
    bits = np.random.Philox(key=[seed, 0])
    state = bits.state
    rows = []
    for index, length in zip(indices.tolist(), lengths.tolist(), strict=True):
        # Setting the counter takes a tenth of the time of a new generator.
        state["state"]["counter"][:] = (0, 0, index, epoch)
        bits.state = state
        rows.append(bits.random_raw(length * WORDS // 2))
    raw = np.concatenate(rows) if rows else np.empty(0, np.uint64)
    return raw.view(np.uint32).reshape(-1, WORDS)


def _check(seed: int, epoch: int) -> None:
    for name, value in (("seed", seed), ("epoch", epoch)):
        if not 0 <= value < 1 << 64:
            raise ValueError(f"{name} must lie in 0 to 2**64 - 1, got {value}")
