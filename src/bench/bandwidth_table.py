"""What the collectives' benchmark found, for people and for programs."""

from dataclasses import asdict
from typing import Any

from rich.table import Table

from src.bench.collectives import EMULATED
from src.bench.timing import Measured


def as_record(row: Measured, backend: str) -> dict[str, Any]:
    """A row as JSON has it. Times in seconds, bandwidths in 10^9 bytes a second."""
    return {
        **asdict(row),
        "algorithm_gb_per_second": row.algorithm_gb_per_second,
        "bus_gb_per_second": row.bus_gb_per_second,
        "remark": EMULATED.get((backend, row.operation)),
    }


def table_seconds(rows: list[Measured]) -> float:
    """What the table's means come to over all timed calls."""
    return sum(row.mean_seconds * row.iterations for row in rows)


def wall_seconds(rows: list[Measured]) -> float:
    """Of the timed parts, by the clock around them."""
    return sum(row.wall_seconds for row in rows)


def table(rows: list[Measured], backend: str) -> Table:
    """A row for each operation and size; a star at what is none of the network's own numbers."""
    made = Table()
    made.add_column("operation")
    for column in ("MB", "mean ms", "fastest", "slowest", "algorithm GB/s", "bus GB/s"):
        made.add_column(column, justify="right")
    for number, row in enumerate(rows):
        times = (row.mean_seconds, row.fastest_seconds, row.slowest_seconds)
        made.add_row(
            f"{row.operation} *" if (backend, row.operation) in EMULATED else row.operation,
            f"{row.num_bytes / 1e6:g}",
            *(f"{seconds * 1e3:.3f}" for seconds in times),
            f"{row.algorithm_gb_per_second:.3f}",
            "n/a" if row.bus_gb_per_second is None else f"{row.bus_gb_per_second:.3f}",
            end_section=number + 1 < len(rows) and rows[number + 1].operation != row.operation,
        )
    return made


def closing_words(rows: list[Measured], backend: str) -> str:
    """What the stars and the columns mean, and how much of the time the table accounts for."""
    operations = dict.fromkeys(row.operation for row in rows)
    lines = [f"* {name}: {EMULATED[backend, name]}" for name in operations if (backend, name) in EMULATED]
    lines.append(
        "A call's time goes from its start until its work is done, on the slowest rank. 1 MB is 10^6 bytes, 1 GB 10^9."
        " Bus bandwidth: by the factors of nccl-tests."
    )
    table, wall = table_seconds(rows), wall_seconds(rows)
    lines.append(
        f"The table's means x calls: {table:.3g} s. The timed parts by the clock: {wall:.3g} s ({table / wall:.1%} of"
        " it is in the table; the rest is how long ranks wait for one another after a row's last call)."
    )
    return "\n".join(lines)
