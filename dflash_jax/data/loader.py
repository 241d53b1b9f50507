"""Batches of a prepared set by grain: the plan of pipeline.py, read ahead by threads or worker processes.

The plan is of the whole batch, the same in every process, and a process can read its share of each batch's rows (the
trainer lets every process read all of them: tokens are small). So all processes pad a step to the same length, and
neither the order of rows nor the saved position depends on how many processes or workers there are: a run may go on
with another number of either.
"""

import functools
import signal
import sys
from collections.abc import Iterator, Sequence

import grain
from absl import flags

from dflash_jax.data.pipeline import Batch, EpochPlan
from dflash_jax.data.prepared import PreparedSplit


class PreparedBatches(Iterator[Batch]):
    """An endless iterator over this process's share of the batches of a prepared set.

    Its batches are those of pipeline.Batches over the same rows, by slices: process p of P gets the p-th of P equal
    parts of the rows of each.
    """

    def __init__(
        self,
        rows: PreparedSplit,
        rows_per_step: int,
        length_buckets: Sequence[int],
        seed: int = 0,
        *,
        plan: type[EpochPlan] = EpochPlan,
        max_rows: int | None = None,
        process_index: int = 0,
        process_count: int = 1,
        workers: int = 0,
        read_ahead: int = 4,
    ):
        """Prepares the first epoch.

        Args:
          rows: a split of a prepared set.
          rows_per_step: rows of a batch over all processes.
          length_buckets, seed: as for EpochPlan; the same in every process.
          plan: EpochPlan, or PackedPlan to pack the rows.
          max_rows: use only so many rows, the first ones.
          process_index, process_count: whose share this is.
          workers: processes that read ahead; 0 reads in threads of this one.
          read_ahead: batches kept ready (by each worker).

        Raises:
          ValueError: as EpochPlan; or rows_per_step can't be shared equally.
        """
        if not 0 <= process_index < process_count:
            raise ValueError(f"process_index={process_index} must be from 0 to below process_count={process_count}")
        if rows_per_step % process_count:
            raise ValueError(f"rows_per_step={rows_per_step} is not a multiple of the {process_count} processes")
        self.epochs = plan(rows.lengths[:max_rows].tolist(), rows_per_step, length_buckets, seed)
        share = rows_per_step // process_count
        self._read = _BatchReader(rows, self.epochs, slice(process_index * share, (process_index + 1) * share))
        self._workers, self._read_ahead = workers, read_ahead
        self._start(0)

    @property
    def steps_per_epoch(self) -> int:
        """Batches of one epoch; the same for every epoch."""
        return self.epochs.steps_per_epoch

    def state(self) -> dict[str, int]:
        """Where the next batch stands: {"epoch", "position"}. Save it with the checkpoint."""
        epoch, position = divmod(self._step, self.steps_per_epoch)
        return {"epoch": epoch, "position": position}

    def set_state(self, state: dict[str, int]) -> None:
        """Goes to a saved state, of any number of processes; the batches that follow are those that would have.

        Raises:
          ValueError: the state does not belong to these rows and this batch size.
        """
        epoch, position = self.epochs.check_state(state)
        self._start(epoch * self.steps_per_epoch + position)

    def __next__(self) -> Batch:
        """Returns the next batch."""
        batch = next(self._batches)
        self._step += 1
        return batch

    def _start(self, step: int) -> None:
        self._step = step
        ahead = grain.ReadOptions(num_threads=2, prefetch_buffer_size=self._read_ahead)
        batches = grain.MapDataset.range(step, sys.maxsize).map(self._read).to_iter_dataset(ahead)
        if self._workers:
            if not flags.FLAGS.is_parsed():  # grain reads settings of its own there
                flags.FLAGS.mark_as_parsed()
            options = grain.MultiprocessingOptions(self._workers, per_worker_buffer_size=self._read_ahead)
            batches = batches.mp_prefetch(options, worker_init_fn=_ignore_interrupts)
        self._batches = iter(batches)


def _ignore_interrupts(index: int, count: int) -> None:
    """In a worker: Ctrl-C goes to all processes of a terminal, and it is for the run to say when reading ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _BatchReader:
    """Step → this process's share of its batch. Goes to worker processes as it is."""

    def __init__(self, rows: PreparedSplit, epochs: EpochPlan, share: slice):
        self._rows, self._epochs, self._share = rows, epochs, share
        self._forget_plans()

    def __call__(self, step: int) -> Batch:
        epoch, position = divmod(int(step), self._epochs.steps_per_epoch)
        length, members = self._plan(epoch)[position]
        return self._epochs.collate(self._rows, members[self._share], length)

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "_plan"}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        self._forget_plans()

    def _forget_plans(self) -> None:
        # Reading ahead crosses from one epoch to the next.
        self._plan = functools.lru_cache(maxsize=2)(self._epochs.batches)
