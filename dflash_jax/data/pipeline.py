"""Training rows to batches of few shapes, in an order that a seed decides and a small state resumes exactly.

grain shuffles and resumes too, but groups rows by arrival; here the whole epoch is planned from (seed, epoch), so every
batch holds rows of one padded length, all batches are full, and the state is two integers.
"""

import bisect
from collections.abc import Iterator, Sequence
from typing import TypedDict

import numpy as np

from dflash_jax.data.rows import TrainingRow


class Batch(TypedDict):
    """tokens_BT int32 (0 after a row's end), loss_mask_BT bool, length_B int32, row_index_B int32 (into the rows)."""

    tokens_BT: np.ndarray
    loss_mask_BT: np.ndarray
    length_B: np.ndarray
    row_index_B: np.ndarray


class Batches(Iterator[Batch]):
    """An endless iterator over batches, epoch after epoch.

    A row is padded to the shortest bucket that holds it. Rows left over in a bucket, fewer than a batch, move up to the
    next; what is left in the last, len(rows) modulo rows_per_step, sits this epoch out. Every epoch shuffles anew, so
    these are other rows each time. Rows occur at most once an epoch, and the order of batches is shuffled too.
    """

    def __init__(self, rows: Sequence[TrainingRow], rows_per_step: int, length_buckets: Sequence[int], seed: int = 0):
        """Prepares the first epoch.

        Args:
          rows: token ids and loss mask of each chat.
          rows_per_step: rows of a batch.
          length_buckets: padded lengths, ascending; each is one shape to compile for.
          seed: decides the order of every epoch.

        Raises:
          ValueError: a row is longer than the last bucket, there are too few rows, or the buckets don't ascend.
        """
        _check(rows, rows_per_step, length_buckets)
        self._rows = rows
        self._rows_per_step = rows_per_step
        self._buckets = tuple(length_buckets)
        self._seed = seed
        self._bucket_of_row = [bisect.bisect_left(self._buckets, len(row.tokens)) for row in rows]
        self._start_epoch(0)
        self._position = 0

    @property
    def steps_per_epoch(self) -> int:
        """Batches of one epoch; the same for every epoch."""
        return len(self._rows) // self._rows_per_step

    def state(self) -> dict[str, int]:
        """Where the next batch stands: {"epoch", "position"}. Save it with the checkpoint."""
        return {"epoch": self._epoch, "position": self._position}

    def set_state(self, state: dict[str, int]) -> None:
        """Goes to a saved state; the batches that follow are those that would have followed it.

        Raises:
          ValueError: the state does not belong to these rows and this batch size.
        """
        epoch, position = state["epoch"], state["position"]
        if epoch < 0 or not 0 <= position < self.steps_per_epoch:
            raise ValueError(
                f"data position {state} lies outside the {self.steps_per_epoch} steps of an epoch; it was saved with "
                "other rows or another rows_per_step"
            )
        self._start_epoch(epoch)
        self._position = position

    def __next__(self) -> Batch:
        """Returns the next batch."""
        bucket, indices = self._plan[self._position]
        self._position += 1
        if self._position == self.steps_per_epoch:
            self._start_epoch(self._epoch + 1)
            self._position = 0
        return collate(self._rows, indices, self._buckets[bucket])

    def _start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._plan = self._plan_epoch(epoch)

    def _plan_epoch(self, epoch: int) -> list[tuple[int, list[int]]]:
        """(bucket, row indices) of every batch of an epoch, in order."""
        rng = np.random.default_rng([self._seed, epoch])
        waiting: list[list[int]] = [[] for _ in self._buckets]
        for row in rng.permutation(len(self._rows)).tolist():
            waiting[self._bucket_of_row[row]].append(row)
        plan = []
        left_over: list[int] = []
        for bucket, rows in enumerate(waiting):
            rows = left_over + rows
            full = len(rows) - len(rows) % self._rows_per_step
            plan += [(bucket, rows[i : i + self._rows_per_step]) for i in range(0, full, self._rows_per_step)]
            left_over = rows[full:]
        return [plan[i] for i in rng.permutation(len(plan))]


def collate(rows: Sequence[TrainingRow], indices: Sequence[int], length: int) -> Batch:
    """Pads the rows of the given indices to `length` and stacks them, with their lengths and indices."""
    tokens_BT = np.zeros((len(indices), length), np.int32)
    loss_mask_BT = np.zeros((len(indices), length), bool)
    length_B = np.asarray([len(rows[index].tokens) for index in indices], np.int32)
    for slot, index in enumerate(indices):
        tokens_BT[slot, : length_B[slot]] = rows[index].tokens
        loss_mask_BT[slot, : length_B[slot]] = rows[index].loss_mask
    return Batch(
        tokens_BT=tokens_BT,
        loss_mask_BT=loss_mask_BT,
        length_B=length_B,
        row_index_B=np.asarray(indices, np.int32),
    )


def _check(rows: Sequence[TrainingRow], rows_per_step: int, length_buckets: Sequence[int]) -> None:
    if rows_per_step < 1:
        raise ValueError(f"rows_per_step={rows_per_step} must be at least 1")
    if len(rows) < rows_per_step:
        raise ValueError(f"{len(rows)} rows are too few for one batch of rows_per_step={rows_per_step}")
    if not length_buckets or length_buckets[0] < 1 or list(length_buckets) != sorted(set(length_buckets)):
        raise ValueError(f"length_buckets={tuple(length_buckets)} must be positive lengths in ascending order")
    longest = max(rows, key=lambda row: len(row.tokens))
    if len(longest.tokens) > length_buckets[-1]:
        raise ValueError(
            f"row {longest.id} has {len(longest.tokens)} tokens and the last of length_buckets={tuple(length_buckets)} "
            "is shorter; truncate rows to it, or add a longer bucket"
        )
