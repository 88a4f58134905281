"""Files of records, whatever their fields: JSON lines and Parquet. What cannot be read is said with file and line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zerogap.gaps.audit.schema import RolloutFileError

Record = Mapping[str, Any]


def json_records(path: Path) -> Iterator[tuple[int, Record]]:
    """(line from 1, record) of each line that is not empty."""
    with path.open("rb") as file:
        for line, raw in enumerate(file, 1):
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                raise RolloutFileError(
                    f"{path} line {line}: byte {error.start + 1} (0x{raw[error.start]:02x}) is not UTF-8; a .jsonl "
                    "file is UTF-8 text, not compressed (Parquet files are named .parquet, Molt's dumps .pt)"
                ) from error
            if not text.strip():
                continue
            try:
                record = json.loads(text)
            except ValueError as error:
                raise RolloutFileError(f"{path} line {line}: not valid JSON (cut short?): {error}") from error
            if not isinstance(record, dict):
                raise RolloutFileError(f"{path} line {line}: holds a {type(record).__name__}, not a mapping")
            yield line, record


def parquet_records(path: Path) -> Iterator[tuple[int, Record]]:
    """(row from 1, record without its nulls)."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise RolloutFileError(f"{path}: Parquet needs pyarrow; pip install 'zerogap[parquet]'") from error
    line = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=64):
            for row in batch.to_pylist():
                line += 1
                yield line, {name: value for name, value in row.items() if value is not None}
    except (pyarrow.ArrowException, OSError) as error:
        where = f" after row {line}" if line else ""
        raise RolloutFileError(f"{path} is not a readable Parquet file{where} (cut short?): {error}") from error
