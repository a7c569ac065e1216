"""The picture of bandwidth over size, drawn by the real matplotlib."""

from pathlib import Path

import pytest

from src.bench.picture import draw
from src.bench.timing import Measured


def row(operation: str, num_bytes: int, seconds: float) -> Measured:
    return Measured(operation, num_bytes, 2, 1, seconds, seconds, seconds, seconds)


def test_each_operation_is_a_line_and_what_is_emulated_is_named_so(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="drawn with matplotlib, where it is installed")
    rows = [row(name, size, size / 1e9) for name in ("all_reduce", "reduce_scatter") for size in (10**6, 10**7)]
    draw(rows, "2 ranks, gloo", "gloo", tmp_path / "bandwidth.svg")
    draw(rows, "2 ranks, gloo", "gloo", tmp_path / "bandwidth.png")
    words = (tmp_path / "bandwidth.svg").read_text()
    for name in ("2 ranks, gloo", "all_reduce", "reduce_scatter (emulated)", "bus bandwidth"):
        assert f"<!-- {name}" in words
    assert (tmp_path / "bandwidth.png").read_bytes().startswith(b"\x89PNG")
