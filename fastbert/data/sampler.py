"""Batches of about the same number of tokens, the same on every rank, resumable at any step.

The slowest rank sets the pace of a step, so the sequences of a step are shared out by length:
longest first, one to each rank at a time and the longer to the emptier (after Graham 1969, "Bounds
on multiprocessing timing anomalies"); then pairs of sequences are exchanged while that brings the
fullest and the emptiest rank closer.
"""

from collections.abc import Iterator

import numpy as np

from fastbert.data.noise import generator

# Exchanges end here: a smaller difference, as a share of the fullest rank, makes no step faster.
_CLOSE = 0.005
_EXCHANGES = 64
# Steps back to which `state_dict` can go: more than any loader prepares ahead.
_REMEMBERED = 4096


class TokenBudgetSampler:
    """A batch sampler for `torch.utils.data.DataLoader(batch_sampler=...)`.

    Every rank makes the same plan from (seed, epoch) and yields its own part, so nothing is
    communicated and every rank has the same number of batches. A step takes the next sequences of
    the shuffled order whose tokens fill the budgets of all ranks; each sequence appears once in an
    epoch, but for fewer than `num_ranks` at the end, which would leave a rank without work.

    Args:
        lengths: `(N,)` tokens of each sequence.
        tokens_per_batch: of one rank; no batch exceeds it.
        rank, num_ranks: this process and all of them.
        seed: of the order.
        shuffle: False keeps the data's order.
        drop_last: leave out the step with which the data ends, which may be a small one.

    Raises:
        ValueError: a sequence longer than the budget or empty, a rank that does not exist, a
            budget below 1.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        tokens_per_batch: int,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ):
        self.lengths = np.asarray(lengths, np.int64)
        if tokens_per_batch < 1:
            raise ValueError(f"tokens_per_batch must be at least 1, got {tokens_per_batch}")
        if not 0 <= rank < num_ranks:
            raise ValueError(f"rank must lie in 0 to {num_ranks - 1}, got {rank}")
        shortest, longest = 1, 1
        if len(self.lengths):
            shortest, longest = int(self.lengths.min()), int(self.lengths.max())
        if shortest < 1 or longest > tokens_per_batch:
            raise ValueError(
                f"lengths must lie in 1 to tokens_per_batch={tokens_per_batch}, got {shortest} to "
                f"{longest}"
            )
        # Of every batch's plan and state: a sum over the data set is not taken for each again.
        self._num_tokens = int(self.lengths.sum())
        self.tokens_per_batch = tokens_per_batch
        self.rank, self.num_ranks = rank, num_ranks
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        self.epoch = 0
        self._begin_epoch()

    def _begin_epoch(self, step: int = 0, place: int = 0) -> None:
        # The place in the order at which each step begins, up to the next step's.
        self._places = {step: place}
        self._step = step

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch with an order of its own; the current epoch is left as it is."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._begin_epoch()

    def __iter__(self) -> Iterator[list[int]]:
        """The rest of the epoch, from `load_state_dict`'s step on; then the next epoch is due."""
        order = self._order()
        while (plan := self._plan(order, self._places[self._step])) is not None:
            batches, following = plan
            self._step += 1
            self._places[self._step] = following
            self._places.pop(self._step - _REMEMBERED, None)
            yield batches[self.rank].tolist()
        self.set_epoch(self.epoch + 1)

    def __len__(self) -> int:
        """Batches of the whole epoch, counted by planning it."""
        order, place, count = self._order(), 0, 0
        while (plan := self._plan(order, place)) is not None:
            place, count = plan[1], count + 1
        return count

    def state_dict(self, step: int | None = None) -> dict[str, int]:
        """What `load_state_dict` needs to go on.

        Args:
            step: of this epoch, the first one to repeat; default: the one behind the last batch
                yielded. A loader with workers has asked for more batches than were trained on, so
                say how many were.

        Raises:
            ValueError: a step that was not reached, or is more than 4,095 steps ago.
        """
        step = self._step if step is None else step
        if step not in self._places:
            raise ValueError(
                f"step must lie in {min(self._places)} to {max(self._places)} of epoch "
                f"{self.epoch}, got {step}"
            )
        return {**self._identity(), "epoch": self.epoch, "step": step, "place": self._places[step]}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on at a step: the batches that follow are those of an uninterrupted run.

        Raises:
            ValueError: the state of another data set, seed, budget or number of ranks.
        """
        mine = self._identity()
        changed = [key for key, value in mine.items() if state.get(key) != value]
        if changed:
            raise ValueError(
                f"the state is of a sampler with other "
                f"{', '.join(f'{k} ({state.get(k)} instead of {mine[k]})' for k in changed)}"
            )
        self.epoch = state["epoch"]
        self._begin_epoch(state["step"], state["place"])

    def _identity(self) -> dict[str, int]:
        return {
            "num_sequences": len(self.lengths),
            "num_tokens": self._num_tokens,
            "tokens_per_batch": self.tokens_per_batch,
            "num_ranks": self.num_ranks,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
        }

    def _order(self) -> np.ndarray:
        if not self.shuffle:
            return np.arange(len(self.lengths))
        return generator(self.seed, self.epoch).permutation(len(self.lengths))

    def _plan(self, order: np.ndarray, place: int) -> tuple[list[np.ndarray], int] | None:
        """Each rank's sequences for the step that begins at `place`, and the next step's place."""
        ahead, ends = self._window(order, place)
        target = self.tokens_per_batch * self.num_ranks
        count = int(np.searchsorted(ends, target, side="right"))
        if self.drop_last and place + count == len(order):
            return None
        while count >= self.num_ranks:
            lengths = self.lengths[ahead[:count]]
            batches = balance(lengths, self.num_ranks)
            excess = max(int(lengths[b].sum()) for b in batches) - self.tokens_per_batch
            if excess <= 0:
                return [np.sort(ahead[batch]) for batch in batches], place + count
            # The sum fits, but not every share of it: leave as much room on every rank. One
            # sequence for each always fits.
            target = int(ends[count - 1]) - excess * self.num_ranks
            count = max(int(np.searchsorted(ends, target, side="right")), self.num_ranks)
        return None

    def _window(self, order: np.ndarray, place: int) -> tuple[np.ndarray, np.ndarray]:
        """More sequences from `place` on than a step can hold, if there are, and running sums."""
        budget = self.tokens_per_batch * self.num_ranks
        # Lengths are 1 at least, so only an empty data set has no tokens.
        reach = 2 * (budget * len(order) // max(self._num_tokens, 1)) + 1
        while True:
            ahead = order[place : place + reach]
            ends = np.cumsum(self.lengths[ahead])
            if len(ahead) < reach or ends[-1] > budget:
                return ahead, ends
            reach *= 2


def balance(lengths: np.ndarray, num_ranks: int) -> list[np.ndarray]:
    """Shares sequences out so that ranks have nearly the same number of tokens.

    Args:
        lengths: `(N,)` tokens of each, N at least `num_ranks`.
        num_ranks: how many parts.

    Returns:
        For every rank the indices of its sequences, at least one.

    Raises:
        ValueError: fewer sequences than ranks.
    """
    if len(lengths) < num_ranks:
        raise ValueError(f"{len(lengths)} sequences are too few for {num_ranks} ranks")
    if num_ranks == 1:
        return [np.arange(len(lengths))]
    lengths = np.asarray(lengths)
    parts = _longest_first(lengths, num_ranks)
    sums = np.array([lengths[part].sum() for part in parts])
    for _ in range(_EXCHANGES):
        full, empty = int(sums.argmax()), int(sums.argmin())
        difference = int(sums[full] - sums[empty])
        if difference <= _CLOSE * sums[full]:
            break
        if not _exchange(lengths, parts, full, empty, difference):
            break
        for rank in (full, empty):
            sums[rank] = lengths[parts[rank]].sum()
    return parts


def _longest_first(lengths: np.ndarray, num_ranks: int) -> list[np.ndarray]:
    order = np.argsort(-lengths, kind="stable")
    rank_of = np.empty(len(lengths), np.int64)
    sums = np.zeros(num_ranks, np.int64)
    for first in range(0, len(order), num_ranks):
        row = order[first : first + num_ranks]
        ranks = np.argsort(sums, kind="stable")[: len(row)]
        rank_of[row] = ranks
        sums[ranks] += lengths[row]
    by_rank = np.argsort(rank_of, kind="stable")
    return np.split(by_rank, np.cumsum(np.bincount(rank_of, minlength=num_ranks))[:-1])


def _exchange(lengths, parts: list[np.ndarray], full: int, empty: int, difference: int) -> bool:
    """Swaps the two sequences that bring two ranks closest; False if none brings them closer."""
    give, take = parts[full], parts[empty]
    gains = lengths[give][:, None] - lengths[take]
    left = np.abs(difference - 2 * gains)
    row, column = np.unravel_index(left.argmin(), left.shape)
    if left[row, column] >= difference:
        return False
    give[row], take[column] = take[column], give[row]
    return True
