"""Rows for programs: the same as those of ``tokcap export``, as an iterator and as a dataset of torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.captured import entry, filled, finish, put_chain
from token_id_capture.errors import UnusableDatabaseError
from token_id_capture.export.dataset import iterate_rows, torch_dataset
from token_id_capture.export.parts import Choice
from token_id_capture.lifecycle import State
from token_id_capture.store import TokenCaptureStore


async def some(store: TokenCaptureStore) -> None:
    for number in range(5):
        await put_chain(store, f"r{number}")
        await finish(store, f"r{number}", "delivered")
    await store.put(entry("open", "only", [1, 2], [3]))


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return filled(tmp_path_factory.mktemp("rows") / "captures.db", some)


def test_rows_come_in_the_order_of_their_ids_with_arrays_of_one_length(database: Path) -> None:
    rows = list(iterate_rows(database))
    assert [row["rollout_id"] for row in rows] == [f"r{number}" for number in range(5)]
    assert all(len(row["token_ids"]) == len(row["loss_mask"]) == len(row["log_probs"]) > 0 for row in rows)


def test_rows_can_be_chosen(database: Path) -> None:
    assert [row["rollout_id"] for row in iterate_rows(database, rollouts=["r3", "r1"])] == ["r1", "r3"]
    assert list(iterate_rows(database, opened_since=9e12)) == []
    calls = list(iterate_rows(database, Choice(per_request=True, states=(State.OPEN,))))
    assert [(row["rollout_id"], row["token_ids"].tolist()) for row in calls] == [("open", [1, 2, 3])]


def test_a_missing_database_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(UnusableDatabaseError):
        next(iterate_rows(tmp_path / "none.db"))


def test_torch_is_loaded_only_for_its_dataset() -> None:
    program = "import sys, token_id_capture.export.dataset; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_gets_each_row_once_as_tensors(database: Path, workers: int) -> None:
    torch = pytest.importorskip("torch")
    loader = torch.utils.data.DataLoader(
        torch_dataset(database),
        batch_size=None,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )
    rows = {row["rollout_id"]: row for row in loader}
    expected = {row["rollout_id"]: row for row in iterate_rows(database)}
    assert rows.keys() == expected.keys()
    for name, row in rows.items():
        assert row["token_ids"].dtype == torch.int64
        assert row["token_ids"].tolist() == expected[name]["token_ids"].tolist()
