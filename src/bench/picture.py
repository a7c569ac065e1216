"""A picture of bandwidth over size."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from src.bench.collectives import EMULATED
from src.bench.timing import Measured

INCHES, DOTS_PER_INCH = (8, 5), 120


def can_draw() -> bool:
    return find_spec("matplotlib") is not None


def draw(rows: Sequence[Measured], title: str, backend: str, path: Path) -> None:
    """One line an operation, of the measured sizes only, in the format that the path's ending names.

    rows: of two ranks or more. Needs matplotlib.
    """
    # 0.3 s, and only this picture needs it. Not through pyplot, which looks for a window to draw in.
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

    figure = Figure(figsize=INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.add_subplot()
    for operation in dict.fromkeys(row.operation for row in rows):
        points = sorted((row.num_bytes / 1e6, row.bus_gb_per_second) for row in rows if row.operation == operation)
        axes.plot(
            *zip(*points, strict=True),
            marker="o",
            label=f"{operation} (emulated)" if (backend, operation) in EMULATED else operation,
        )
    axes.set(xscale="log", yscale="log", xlabel="size (MB, 10⁶ bytes)", ylabel="bus bandwidth (GB/s, 10⁹ bytes)")
    axes.set_title(title, fontsize="medium")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path)
