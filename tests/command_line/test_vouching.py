"""A run folder that somebody else made can't have code run by naming it."""

from pathlib import Path

import pytest
import yaml

from src.command.vouching import refuse_what_chooses_code
from src.errors import Refused
from tests.command_server import serve

CODE = [
    ("+hydra.callbacks.x={_target_: os.mkdir, path: victim}", "sets Hydra itself"),
    ("hydra/launcher=basic", "sets Hydra itself"),
    ("+schedule@hydra.callbacks.x=constant", "sets Hydra itself"),
    ("schedule._target_=os.mkdir", "names what to call"),
    ("+schedule.x=[{_targ\\et_: os.mkdir, path: victim}]", "names what to call"),
    ('+schedule.x="${oc.decode:\\"{_tar${.y}: os.mkdir}\\"}"', "is worked out by a resolver"),
    ("model=../../victim", "reads a file outside conf/"),
    ("+experiment=[../../victim]", "reads a file outside conf/"),
    ("--config-dir=victim", "is no override"),
    ("-m", "is no override"),
]
HARMLESS = [
    "strategy=fsdp",
    "trainer.max_steps=12",
    "~schedule.warmup_steps",
    "+model.hidden=[16, 16]",
    "data.root=../data",
    "model.num_classes=${data.num_classes}",
    'name="a: b=c, ${d}"',
    "experiment=mnist_ddp",
]


@pytest.mark.parametrize(("word", "why"), CODE)
def test_a_word_that_could_choose_code_is_refused(word: str, why: str) -> None:
    with pytest.raises(Refused) as caught:
        refuse_what_chooses_code([*HARMLESS, word], Path("run"))
    [problem] = caught.value.problems
    assert repr(word) in problem
    assert why in problem


def test_other_words_are_taken_over() -> None:
    refuse_what_chooses_code(HARMLESS, Path("run"))


@pytest.mark.parametrize("key", ["checkpoint.resume", "task.checkpoint"])
def test_a_run_folder_with_such_a_word_is_refused_and_nothing_is_run(key: str, tmp_path: Path) -> None:
    run_dir, cwd = tmp_path / "run", tmp_path / "here"
    (run_dir / ".hydra").mkdir(parents=True)
    cwd.mkdir()
    callback = f"+hydra.callbacks.x={{_target_: os.mkdir, path: {tmp_path / 'victim'}}}"
    (run_dir / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump([callback]))
    outcome = serve(cwd, f"{key}={run_dir}", *(["task=evaluate"] if key == "task.checkpoint" else []))
    assert outcome.is_refusal(), outcome.text
    assert "sets Hydra itself" in outcome.problems[0]
    assert not (tmp_path / "victim").exists()
    serve(cwd, callback, "trainer.epochs=0")  # typed, it does bite, although the run is then refused
    assert (tmp_path / "victim").exists()
