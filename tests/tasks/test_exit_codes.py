"""A task that looks at the machine and finds a wrong result has failed, with what it found in the last lines."""

from pathlib import Path

import pytest

from tests.command import REPOSITORY, summary, train

#: Tasks whose measurements are made wrong.
WRONG = """
import dataclasses
from src.tasks import formats, matmul

measured, reported = matmul.measure, formats.report
matmul.measure = lambda *arguments: dataclasses.replace(measured(*arguments), error=1.0)
formats.report = lambda format: dataclasses.replace(reported(format), disagreements=("largest: 1.0",))

class MatMul(matmul.MatMul):
    pass

class Formats(formats.Formats):
    pass
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["task=matmul", "task._target_=own.MatMul", "task.dtypes=[fp32]", "task.size=64"], "fp32 is off by 1"),
        (["task=formats", "task._target_=own.Formats"], "FP32: largest: 1.0"),
    ],
)
def test_a_wrong_result_is_a_failure_that_names_it(tmp_path: Path, words: list[str], said: str) -> None:
    (tmp_path / "own.py").write_text(WRONG)
    options = ["launch.device=cpu", "tracking=off", "hydra.run.dir=out"]
    done = train(tmp_path, *words, *options, PYTHONPATH=f"{tmp_path}:{REPOSITORY}")
    assert done.code == 1, done.text
    line, log = done.stderr.splitlines()[-2:]
    assert line.startswith("shardlab: rank 0 failed: RuntimeError: ")
    assert said in line
    assert log == "  its log: out/rank_0.log" or log.endswith("/out/rank_0.log")
    assert summary(tmp_path / "out")["status"] == "failed"
