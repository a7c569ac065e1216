"""A picture of bandwidth over size."""

from collections.abc import Sequence
from pathlib import Path

from src.bench.collectives import EMULATED
from src.bench.timing import Measured


def draw(rows: Sequence[Measured], title: str, backend: str, path: Path) -> None:
    """One line an operation, of the measured sizes only, as a page that needs no network.

    rows: of two ranks or more.
    """
    import plotly.graph_objects as go  # 0.3 s, and only this picture needs it

    figure = go.Figure()
    for operation in dict.fromkeys(row.operation for row in rows):
        points = sorted((row.num_bytes / 1e6, row.bus_gb_per_second) for row in rows if row.operation == operation)
        sizes, bandwidths = zip(*points, strict=True)
        name = f"{operation} (emulated)" if (backend, operation) in EMULATED else operation
        figure.add_trace(go.Scatter(x=sizes, y=bandwidths, name=name, mode="lines+markers"))
    figure.update_layout(title=title)
    figure.update_xaxes(type="log", title="size (MB, 10⁶ bytes)")
    figure.update_yaxes(type="log", title="bus bandwidth (GB/s, 10⁹ bytes)")
    figure.write_html(path, include_plotlyjs=True)
