"""What benchmarks measured, one value a row, as a Parquet file for programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from duokv.kvstore.errors import UsageError


@dataclass(frozen=True, slots=True)
class Sample:
    """One value. limit: what the same took, or was aimed at, in the same run, in the same unit; None if there is none.

    turn: number of the repetition, from 0.
    """

    benchmark: str
    table: str
    case: str
    unit: str
    turn: int
    found: float
    limit: float | None = None


def with_limits(found: Sequence[float], limits: Sequence[float]) -> Iterator[tuple[float, float]]:
    """Each value with the mean of the limits before and after it, of which there is one more."""
    for at, one in enumerate(found):
        yield one, (limits[at] + limits[at + 1]) / 2


def write_parquet(path: Path, samples: Iterable[Sample]) -> None:
    """Write samples, a column for each field. UsageError if pyarrow is missing or the file cannot be written."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise UsageError(f"{path}: Parquet needs pyarrow ({error}); pip install 'duokv[tools]'") from error
    rows = [asdict(sample) for sample in samples]
    kinds = {"turn": pa.int32(), "found": pa.float64(), "limit": pa.float64()}
    schema = pa.schema([(field.name, kinds.get(field.name, pa.string())) for field in fields(Sample)])
    try:
        parquet.write_table(pa.Table.from_pylist(rows, schema=schema), path, compression="zstd")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error}); name a file in a folder of yours") from error
