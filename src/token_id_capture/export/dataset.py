"""Rows for programs: an iterator, and a dataset of torch that its loader's workers share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from token_id_capture.errors import CorruptCaptureError
from token_id_capture.export.parts import Choice, read_parts
from token_id_capture.export.rows import Row
from token_id_capture.store.read.evidence import Scope, rollout_ids
from token_id_capture.store.reading import location_of, reading

if TYPE_CHECKING:
    from torch.utils.data import IterableDataset


def iterate_rows(
    database: str | Path,
    choice: Choice | None = None,
    *,
    rollouts: Iterable[str] = (),
    opened_since: float | None = None,
) -> Iterator[Row]:
    """The rows that ``tokcap export`` writes, in the order of the rollouts' ids; one rollout is in memory at a time.

    A row has the fields of ``columns``; ``token_ids`` and ``log_probs`` are packed sequences, ``loss_mask`` bytes,
    all of one length in tokens. ``opened_since`` is in seconds since the epoch.

    Raises:
        UnusableDatabaseError: the database is missing or cannot be read.
        CorruptCaptureError: a rollout is damaged; leave it out by naming the others.
    """
    return _rows(database, choice or Choice(), Scope(tuple(rollouts), opened_since), 0, 1)


def _rows(database: str | Path, choice: Choice, scope: Scope, worker: int, workers: int) -> Iterator[Row]:
    with reading(location_of(database)) as connection:
        found = islice(rollout_ids(connection, choice.states, scope), worker, None, workers)
        for part in read_parts(connection, choice, ((rollout_id, None) for rollout_id in found)):
            if part.damage is not None:
                raise CorruptCaptureError(part.damage)
            yield from part.rows


def torch_dataset(
    database: str | Path,
    choice: Choice | None = None,
    *,
    rollouts: Iterable[str] = (),
    opened_since: float | None = None,
) -> IterableDataset[dict[str, Any]]:
    """The same rows as a ``torch.utils.data.IterableDataset``; workers of a loader take turns with the rollouts.

    ``token_ids`` is an int64 tensor, ``loss_mask`` int8 and ``log_probs`` float64; other fields stay as they are.

    Raises:
        ImportError: torch is not installed.
    """
    import torch
    from torch.utils.data import IterableDataset, get_worker_info

    wanted, scope = choice or Choice(), Scope(tuple(rollouts), opened_since)

    class Rows(IterableDataset):  # type: ignore[misc,type-arg,unused-ignore]
        def __iter__(self) -> Iterator[dict[str, Any]]:
            info = get_worker_info()
            turn = (0, 1) if info is None else (info.id, info.num_workers)
            for row in _rows(database, wanted, scope, *turn):
                yield {
                    **row,
                    "token_ids": torch.tensor(row["token_ids"].tolist(), dtype=torch.int64),
                    "loss_mask": torch.tensor(list(row["loss_mask"]), dtype=torch.int8),
                    "log_probs": torch.tensor(row["log_probs"].tolist(), dtype=torch.float64),
                }

    return Rows()
