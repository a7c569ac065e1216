"""metrics.jsonl and summary.json: JSON that any reader takes, whole at every moment."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.tracking.files import SUMMARY_KEYS, MetricsFile, strict, write_summary

values = st.one_of(st.floats(), st.integers(), st.none(), st.booleans(), st.just("word"))
names = st.sampled_from(["loss", "eval", "peaks"])
nested = st.recursive(values, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner), max_leaves=8)


def refuse(word: str) -> Any:
    raise AssertionError(f"{word} is no JSON")


@given(st.dictionaries(names, nested))
def test_every_record_is_strict_json_and_finite_values_survive(record: dict[str, Any]) -> None:
    written = json.loads(json.dumps(strict(record), allow_nan=False), parse_constant=refuse)
    written.pop("non_finite", None)
    assert written.keys() == record.keys()
    for key, value in record.items():
        if isinstance(value, float):
            assert written[key] == (value if math.isfinite(value) else None)


def test_numbers_that_json_has_not_become_null_and_are_named() -> None:
    record = {"loss": math.nan, "grad_norm": None, "eval": {"loss": math.inf}, "peaks": [1, -math.inf]}
    assert strict(record) == {
        "loss": None,
        "grad_norm": None,  # not measured: null, but not named below
        "eval": {"loss": None},
        "peaks": [1, None],
        "non_finite": {"loss": "nan", "eval.loss": "inf", "peaks.1": "-inf"},
    }
    assert strict({"loss": 1.5}) == {"loss": 1.5}


def test_each_line_can_be_read_as_soon_as_it_is_written(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path)
    for step in (1, 2):
        metrics.write({"kind": "train", "step": step})
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(1, step + 1))
    metrics.close()


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    for step in (1, 2):
        metrics = MetricsFile(tmp_path)
        metrics.write({"step": step})
        metrics.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_full_disk_is_an_error_and_not_a_gap(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    metrics = MetricsFile(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        metrics.write({"step": 1})
    with pytest.raises(OSError, match="No space left"):
        metrics.close()


def test_a_summary_has_every_key_and_null_for_what_nobody_knows(tmp_path: Path) -> None:
    write_summary(tmp_path, {"status": "failed", "train_loss": math.nan})
    summary = json.loads((tmp_path / "summary.json").read_text(), parse_constant=refuse)
    assert summary.keys() - {"non_finite"} == set(SUMMARY_KEYS)
    assert summary["status"] == "failed"
    assert summary["wandb"] is None
    assert summary["non_finite"] == {"train_loss": "nan"}


def test_a_summary_that_cannot_be_written_leaves_the_old_one_whole(tmp_path: Path) -> None:
    write_summary(tmp_path, {"status": "interrupted"})
    (tmp_path / "summary.json.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write_summary(tmp_path, {"status": "finished"})
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "interrupted"
