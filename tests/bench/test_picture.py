"""The picture of bandwidth over size, drawn by the real plotly."""

from pathlib import Path

from src.bench.picture import draw
from src.bench.timing import Measured


def row(operation: str, num_bytes: int, seconds: float) -> Measured:
    return Measured(operation, num_bytes, 2, 1, seconds, seconds, seconds, seconds)


def test_each_operation_is_a_line_and_what_is_emulated_is_named_so(tmp_path: Path) -> None:
    rows = [row(name, size, size / 1e9) for name in ("all_reduce", "reduce_scatter") for size in (10**6, 10**7)]
    draw(rows, "2 ranks, gloo", "gloo", tmp_path / "bandwidth.html")
    page = (tmp_path / "bandwidth.html").read_text()
    for words in ("2 ranks, gloo", '"name":"all_reduce"', '"name":"reduce_scatter (emulated)"', "bus bandwidth"):
        assert words in page


def test_the_page_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    draw([row("broadcast", 10**6, 0.1)], "title", "gloo", tmp_path / "bandwidth.html")
    assert "<script src=" not in (tmp_path / "bandwidth.html").read_text()
