"""Files of rows in the libraries that people load them with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import duckdb
import pandas
import polars
import torch


def readers(lines: Path, columns: Path) -> dict[str, int]:
    """How many rows each library reads of both files, which have to be equal for it."""
    pairs: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
        "datasets": (
            datasets.load_dataset("json", data_files=str(lines), split="train").to_list(),
            datasets.load_dataset("parquet", data_files=str(columns), split="train").to_list(),
        ),
        "pandas": (
            pandas.read_json(lines, lines=True, precise_float=True).to_dict("records"),
            pandas.read_parquet(columns).to_dict("records"),
        ),
        "polars": (polars.read_ndjson(lines).to_dicts(), polars.read_parquet(columns).to_dicts()),
        "duckdb": (
            duckdb.read_json(str(lines)).pl().to_dicts(),
            duckdb.read_parquet(str(columns)).pl().to_dicts(),
        ),
    }
    for name, (first, second) in pairs.items():
        for one, other in zip(told(first), told(second), strict=True):
            assert one == other, (name, {key for key in one.keys() | other.keys() if one.get(key) != other.get(key)})
    ids = datasets.load_dataset("parquet", data_files=str(columns), split="train").with_format("torch")[0]["token_ids"]
    assert ids.dtype in (torch.int32, torch.int64), ids.dtype
    return {name: len(first) for name, (first, _) in pairs.items()}


def told(value: Any) -> Any:
    """A value without what is null or empty, as a struct has the keys of all rows; some parsers miss a last bit."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: told(item) for key, item in value.items() if told(item) not in (None, {})}
    if isinstance(value, list):
        return [told(item) for item in value]
    if value is pandas.NA or value != value:
        return None
    return round(value, 6) if isinstance(value, float) else value
