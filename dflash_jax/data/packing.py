"""Several rows packed into one sequence of a fixed length, so that little of a batch is padding.

Each row is a document of its sequence and is trained on as if it stood alone: batches say where documents start, and
neither attention nor a block reaches across a start.
"""

import bisect
import collections
from collections.abc import Sequence

import numpy as np

from dflash_jax.data.pipeline import Batch, EpochPlan
from dflash_jax.data.rows import TrainingRow


class PackedPlan(EpochPlan):
    """Which rows are packed together, and which packs stand together in which batch, for every epoch.

    Every pack is padded to the last bucket. Rows are packed best-fit, longest first, which depends on lengths alone; so
    all epochs have equally many packs, filled alike, and rows of one length change places from epoch to epoch. Fewer
    packs than a batch are left over; they sit this epoch out, other ones each time.
    """

    def __init__(self, lengths: Sequence[int], rows_per_step: int, length_buckets: Sequence[int], seed: int = 0):
        """Packs the rows. Arguments as for EpochPlan; rows_per_step counts packs.

        Raises:
          ValueError: as EpochPlan; or there are fewer packs than a batch.
        """
        super().__init__(lengths, rows_per_step, length_buckets, seed)
        self._packs = best_fit(np.sort(self._lengths)[::-1].tolist(), self.buckets[-1])
        self._most_rows = max(map(len, self._packs))
        self.steps_per_epoch = len(self._packs) // rows_per_step
        if not self.steps_per_epoch:
            raise ValueError(
                f"{len(lengths)} rows make {len(self._packs)} packs of {self.buckets[-1]} tokens, too few for one "
                f"batch of rows_per_step={rows_per_step}"
            )

    def batches(self, epoch: int) -> list[tuple[int, list[list[int]]]]:
        """(padded length, the row indices of each pack) of every batch of an epoch, in order."""
        rng = np.random.default_rng([self._seed, epoch])
        shuffled = rng.permutation(len(self._lengths))
        longest_first = shuffled[np.argsort(-self._lengths[shuffled], kind="stable")]
        packs = [longest_first[places].tolist() for places in self._packs]
        order = rng.permutation(len(packs)).tolist()
        size = self.rows_per_step
        steps = [order[step * size : (step + 1) * size] for step in range(self.steps_per_epoch)]
        return [(self.buckets[-1], [packs[pack] for pack in step]) for step in steps]

    def collate(self, rows: Sequence[TrainingRow], members: Sequence[Sequence[int]], length: int) -> Batch:
        """Lays out packs, given by the indices of their rows."""
        B, P = len(members), self._most_rows
        tokens_BT, loss_mask_BT = np.zeros((B, length), np.int32), np.zeros((B, length), bool)
        starts_BT = np.zeros((B, length), np.int32)
        row_index_BP = np.full((B, P), -1, np.int32)
        length_B = np.zeros(B, np.int32)
        for slot, pack in enumerate(members):
            row_index_BP[slot, : len(pack)] = pack
            start = 0
            for index in pack:
                row = rows[index]
                end = start + len(row.tokens)
                tokens_BT[slot, start:end] = row.tokens
                # A first token has no context: it is never an anchor, and here it ends the block of the row before.
                loss_mask_BT[slot, start + 1 : end] = row.loss_mask[1:]
                starts_BT[slot, start:end] = start
                start = end
            starts_BT[slot, start:] = length_B[slot] = start
        return Batch(
            tokens_BT=tokens_BT,
            loss_mask_BT=loss_mask_BT,
            length_B=length_B,
            row_index_B=row_index_BP[:, 0].copy(),
            row_index_BP=row_index_BP,
            starts_BT=starts_BT,
        )


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Places in `lengths` that share a pack; each goes to the pack that it leaves the least room in.

    Args:
      lengths: from the longest to the shortest, none above `capacity`.
      capacity: tokens of a pack.
    """
    packs: list[list[int]] = []
    with_room: dict[int, list[int]] = collections.defaultdict(list)  # room → packs that have so much
    rooms: list[int] = []  # its keys, ascending
    for place, length in enumerate(lengths):
        fitting = bisect.bisect_left(rooms, length)
        if fitting == len(rooms):
            packs.append([])
            pack, room = len(packs) - 1, capacity
        else:
            room = rooms[fitting]
            pack = with_room[room].pop()
            if not with_room[room]:
                del rooms[fitting]
        packs[pack].append(place)
        room -= length
        if not with_room[room]:
            bisect.insort(rooms, room)
        with_room[room].append(pack)
    return packs
