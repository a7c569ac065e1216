"""task=formats as a user starts it."""

import dataclasses
from pathlib import Path

import pytest

from src.bench.formats import FORMATS, report
from src.tasks.formats import table
from tests.command import metrics, summary, train


def test_it_prints_all_formats_and_keeps_their_numbers(tmp_path: Path) -> None:
    done = train(tmp_path, "task=formats")
    assert done.code == 0, done.text
    for words in ("FP32", "TF32", "FP16", "BF16", "FP8 E4M3", "FP8 E5M2", "65504", "57344", "448", "derived"):
        assert words in done.stdout
    run_dir = done.run_dir()
    records = metrics(run_dir, "format")
    assert [record["name"] for record in records] == [format.name for format in FORMATS]
    found = summary(run_dir)["formats"]["FP16"]
    assert (found["largest"], found["smallest_normal"], found["epsilon"]) == (65504.0, 2**-14, 2**-10)
    assert not (run_dir / "wandb").exists()


@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_disagreement_is_seen_in_the_table(is_wrong: bool) -> None:
    found = report(FORMATS[2])
    if is_wrong:
        found = dataclasses.replace(found, disagreements=("largest: 1.0, by its bit layout 2.0",))
    [cell] = table([found]).columns[-1].cells
    assert cell == ("differ" if is_wrong else "agree")
