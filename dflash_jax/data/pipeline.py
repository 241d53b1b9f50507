"""Training rows to batches of few shapes, in an order that a seed decides and a small state resumes exactly.

The whole epoch is planned from (seed, epoch), so every batch holds rows of one padded length, all batches are full, and
the state is two integers. Batches are made of rows in memory here, and of prepared sets, by grain, in loader.py. A row
is a sequence of its own here; packing.py puts several into one.
"""

import bisect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NotRequired, TypedDict

import numpy as np

from dflash_jax.data.rows import TrainingRow


class Batch(TypedDict):
    """tokens_BT int32 (0 after a row's end), loss_mask_BT bool, length_B int32, row_index_B int32 (into the rows).

    Where rows are packed, row_index_B is the first of a pack's, and there are row_index_BP int32, all of them in order
    and -1 behind them, and starts_BT int32, where the row that a token belongs to starts (padding is a row, too).
    """

    tokens_BT: np.ndarray
    loss_mask_BT: np.ndarray
    length_B: np.ndarray
    row_index_B: np.ndarray
    row_index_BP: NotRequired[np.ndarray]
    starts_BT: NotRequired[np.ndarray]


class EpochPlan:
    """Which rows stand together in which batch, for every epoch; known from the lengths of the rows alone.

    A row is padded to the shortest bucket that holds it. Rows left over in a bucket, fewer than a batch, move up to the
    next; what is left in the last, len(lengths) modulo rows_per_step, sits this epoch out. Every epoch shuffles anew,
    so these are other rows each time. Rows occur at most once an epoch, and the order of batches is shuffled too.
    """

    def __init__(self, lengths: Sequence[int], rows_per_step: int, length_buckets: Sequence[int], seed: int = 0):
        """Sorts the rows into buckets.

        Args:
          lengths: tokens of each row.
          rows_per_step: rows of a batch.
          length_buckets: padded lengths, ascending; each is one shape to compile for.
          seed: decides the order of every epoch.

        Raises:
          ValueError: a row is longer than the last bucket, there are too few rows, or the buckets don't ascend.
        """
        _check(lengths, rows_per_step, length_buckets)
        self.rows_per_step = rows_per_step
        self.buckets = tuple(length_buckets)
        self._seed = seed
        self._lengths = np.asarray(lengths)
        self._bucket_of_row = np.searchsorted(self.buckets, lengths).tolist()
        self.steps_per_epoch = len(lengths) // rows_per_step

    def batches(self, epoch: int) -> list[tuple[int, list[Any]]]:
        """(padded length, row indices) of every batch of an epoch, in order."""
        rng = np.random.default_rng([self._seed, epoch])
        waiting: list[list[int]] = [[] for _ in self.buckets]
        for row in rng.permutation(len(self._bucket_of_row)).tolist():
            waiting[self._bucket_of_row[row]].append(row)
        plan = []
        left_over: list[int] = []
        for length, rows in zip(self.buckets, waiting, strict=True):
            rows = left_over + rows
            full = len(rows) - len(rows) % self.rows_per_step
            plan += [(length, rows[i : i + self.rows_per_step]) for i in range(0, full, self.rows_per_step)]
            left_over = rows[full:]
        return [plan[i] for i in rng.permutation(len(plan))]

    def padding(self) -> float:
        """The share of tokens that is padding, in the first epoch."""
        plan = self.batches(0)
        held = self._lengths[np.hstack([row for _, members in plan for row in members])].sum()
        return 1 - held / sum(length * len(members) for length, members in plan)

    def collate(self, rows: Sequence[TrainingRow], members: Sequence[Any], length: int) -> Batch:
        """A batch of what `batches` names, or of some of it."""
        return collate(rows, members, length)

    def check_state(self, state: Mapping[str, int]) -> tuple[int, int]:
        """(epoch, position) of a saved state.

        Raises:
          ValueError: the state does not belong to these rows and this batch size.
        """
        epoch, position = state["epoch"], state["position"]
        if epoch < 0 or not 0 <= position < self.steps_per_epoch:
            raise ValueError(
                f"data position {dict(state)} lies outside the {self.steps_per_epoch} steps of an epoch; it was saved "
                "with other rows or another rows_per_step"
            )
        return epoch, position


class Batches(Iterator[Batch]):
    """An endless iterator over batches of rows in memory, epoch after epoch; see EpochPlan for what they hold."""

    def __init__(
        self,
        rows: Sequence[TrainingRow],
        rows_per_step: int,
        length_buckets: Sequence[int],
        seed: int = 0,
        *,
        plan: type[EpochPlan] = EpochPlan,
    ):
        """Prepares the first epoch.

        Args:
          rows: token ids and loss mask of each chat.
          rows_per_step, length_buckets, seed: as for EpochPlan.
          plan: EpochPlan, or PackedPlan to pack the rows.

        Raises:
          ValueError: a row is longer than the last bucket, there are too few rows, or the buckets don't ascend.
        """
        self.epochs = plan([len(row.tokens) for row in rows], rows_per_step, length_buckets, seed)
        self._rows = rows
        self._start_epoch(0)
        self._position = 0

    @property
    def steps_per_epoch(self) -> int:
        """Batches of one epoch; the same for every epoch."""
        return self.epochs.steps_per_epoch

    def state(self) -> dict[str, int]:
        """Where the next batch stands: {"epoch", "position"}. Save it with the checkpoint."""
        return {"epoch": self._epoch, "position": self._position}

    def set_state(self, state: dict[str, int]) -> None:
        """Goes to a saved state; the batches that follow are those that would have followed it.

        Raises:
          ValueError: the state does not belong to these rows and this batch size.
        """
        epoch, position = self.epochs.check_state(state)
        self._start_epoch(epoch)
        self._position = position

    def __next__(self) -> Batch:
        """Returns the next batch."""
        length, members = self._plan[self._position]
        self._position += 1
        if self._position == self.steps_per_epoch:
            self._start_epoch(self._epoch + 1)
            self._position = 0
        return self.epochs.collate(self._rows, members, length)

    def _start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._plan = self.epochs.batches(epoch)


def collate(rows: Sequence[TrainingRow], indices: Sequence[int], length: int) -> Batch:
    """Pads the rows of the given indices to `length` and stacks them, with their lengths and indices."""
    found = [rows[index] for index in indices]  # each is read once: rows may lie on disk
    tokens_BT = np.zeros((len(indices), length), np.int32)
    loss_mask_BT = np.zeros((len(indices), length), bool)
    length_B = np.asarray([len(row.tokens) for row in found], np.int32)
    for slot, row in enumerate(found):
        tokens_BT[slot, : length_B[slot]] = row.tokens
        loss_mask_BT[slot, : length_B[slot]] = row.loss_mask
    return Batch(
        tokens_BT=tokens_BT,
        loss_mask_BT=loss_mask_BT,
        length_B=length_B,
        row_index_B=np.asarray(indices, np.int32),
    )


def check_fit(lengths: Sequence[int], length_buckets: Sequence[int]) -> None:
    """Raises ValueError if a row is longer than the last bucket. Rows of files were cut to data.max_length, which is
    not; those of a prepared set when it was made."""
    longest = int(np.argmax(lengths))
    if lengths[longest] > length_buckets[-1]:
        raise ValueError(
            f"row {longest} has {lengths[longest]} tokens, and the last of data.length_buckets="
            f"{tuple(length_buckets)} is shorter; add a longer one (data.max_length does not cut a prepared set, "
            "--max_length of data.prepare does)"
        )


def padded_length(length: int, length_buckets: Sequence[int]) -> int:
    """The shortest bucket that holds a row of this length; `check_fit` says whether there is one."""
    return length_buckets[bisect.bisect_left(length_buckets, length)]


def _check(lengths: Sequence[int], rows_per_step: int, length_buckets: Sequence[int]) -> None:
    if rows_per_step < 1:
        raise ValueError(f"rows_per_step={rows_per_step} must be at least 1")
    if len(lengths) < rows_per_step:
        raise ValueError(f"{len(lengths)} rows are too few for one batch of rows_per_step={rows_per_step}")
    if not length_buckets or length_buckets[0] < 1 or list(length_buckets) != sorted(set(length_buckets)):
        raise ValueError(f"length_buckets={tuple(length_buckets)} must be positive lengths in ascending order")
    check_fit(lengths, length_buckets)
