"""What a command line is answered: help at once, exit codes, and forms that can be typed back."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.command import REPOSITORY, TRAIN, environment, train
from tests.command_server import serve


def test_a_value_that_must_be_quoted_is_shown_as_it_must_be_typed(tmp_path: Path) -> None:
    for word in ("checkpoint.resume=x/epoch=1.pt", "name=für élise", 'name=say "hi", x'):
        outcome = serve(tmp_path, word)
        assert outcome.is_refusal()
        [shown] = shlex.split(outcome.problems[0].split("Write ")[1])
        again = serve(tmp_path, shown, "--cfg", "job")
        assert again.code == 0, again.text
        key, _, value = word.partition("=")
        cfg = yaml.safe_load(again.stdout)
        assert (cfg["name"] if key == "name" else cfg["checkpoint"]["resume"]) == value


FULL_DISK = "mkdir full && mount -t tmpfs -o size=8k none full && head -c 9000 /dev/zero > full/fill 2> /dev/null; "


def test_a_full_disk_is_refused_by_name_and_nothing_is_left(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("only with user namespaces can a test fill a disk of its own")
    command = shlex.join([sys.executable, str(TRAIN), "hydra.run.dir=full/out"])
    done = subprocess.run(
        ["unshare", "-rm", "bash", "-c", f"{FULL_DISK} {command}; echo $? $(ls full)"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "2 fill\n", done.stdout + done.stderr
    assert f"hydra.run.dir=full/out can't be written: No space left on device in {tmp_path}/full. Make" in done.stderr


def test_a_disk_that_fills_up_under_hydra_is_told_with_the_folders_key(tmp_path: Path) -> None:
    (tmp_path / "out" / "files").mkdir(parents=True)
    (tmp_path / "out" / "files" / "config.yaml").symlink_to("/dev/full")
    outcome = serve(tmp_path, "hydra.run.dir=out", "hydra.output_subdir=files")
    assert outcome.code == 2, outcome.text
    assert outcome.problems[0].startswith("No space left on device while Hydra wrote its files into the run's folder")
    assert not outcome.started_processes


def test_an_error_of_our_own_shows_its_traceback_and_exits_1(tmp_path: Path) -> None:
    outcome = serve(tmp_path, "data._target_=tests.doubles.DataThatBreaksThePreparation")
    assert outcome.code == 1
    assert "Traceback" in outcome.stderr
    assert "ZeroDivisionError: a fault in prepare" in outcome.stderr
    assert not outcome.started_processes


def test_ctrl_c_during_the_checks_exits_130_without_a_traceback(tmp_path: Path) -> None:
    outcome = serve(tmp_path, "data._target_=tests.doubles.DataInterruptedInPreparation")
    assert outcome.code == 130
    assert "Traceback" not in outcome.text
    assert not any(tmp_path.iterdir())


def test_a_very_long_override_is_answered_in_a_readable_length(tmp_path: Path) -> None:
    outcome = serve(tmp_path, f"trainer.acumulate={'9' * 50_000}")
    assert outcome.is_refusal()
    assert len(outcome.stderr) < 1000
    outcome = serve(tmp_path, f"name={'x' * 50_000}", "--cfg", "job")
    assert outcome.code == 0


def test_of_two_values_for_one_key_the_last_counts_as_everywhere_in_hydra(tmp_path: Path) -> None:
    outcome = serve(tmp_path, "seed=1", "seed=2", "strategy=ddp", "strategy=single", "--cfg", "job")
    cfg = yaml.safe_load(outcome.stdout)
    assert (cfg["seed"], cfg["strategy"]["_target_"]) == (2, "src.strategies.single.Single")


@pytest.fixture(scope="module")
def imports_of_help(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """Command -> (what it printed, the modules that it imported)."""
    found = {}
    for words in ("--help", "--cfg job", "--hydra-help"):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", str(TRAIN), *words.split()],
            cwd=tmp_path_factory.mktemp("help"),
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        found[words] = done.stdout, "\n".join(line.split("|")[-1].strip() for line in done.stderr.splitlines())
    return found


def test_help_and_cfg_import_no_torch(imports_of_help: dict[str, tuple[str, str]]) -> None:
    for words, (_, modules) in imports_of_help.items():
        heavy = {"torch", "numpy", "wandb", "sklearn", "deepspeed"} & set(modules.splitlines())
        assert not heavy, (words, heavy)


def test_help_lists_every_group_and_how_to_begin(imports_of_help: dict[str, tuple[str, str]]) -> None:
    text, _ = imports_of_help["--help"]
    for group in ("task", "strategy", "sharding", "precision", "model", "data", "optimizer", "schedule", "tracking"):
        assert f"\n{group}: " in text
    assert "fsdp1, pp, single" in text
    assert "python train.py -m trainer.accumulate=1,2,4" in text
    lines = [line for line in text.splitlines() if not line.startswith("experiment: ")]  # a list that grows
    assert max(map(len, lines)) <= 130


def test_cfg_shows_what_a_command_line_composes_to(imports_of_help: dict[str, tuple[str, str]]) -> None:
    text, _ = imports_of_help["--cfg job"]
    cfg = yaml.safe_load(text)
    assert cfg["strategy"]["_target_"] == "src.strategies.ddp.DDP"
    assert "hydra" not in cfg


def test_the_shell_completes_options_without_torch(tmp_path: Path) -> None:
    line = "python train.py strategy=f"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", str(TRAIN), "-sc", "query=bash"],
        cwd=tmp_path,
        env=environment(COMP_LINE=line, COMP_POINT=str(len(line)), _HYDRA_OLD_COMP=""),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == ["strategy=fsdp", "strategy=fsdp1"]
    assert "| torch\n" not in done.stderr
    assert not any(tmp_path.iterdir())


def test_an_unknown_flag_is_answered_with_the_usage_and_exits_2(tmp_path: Path) -> None:
    outcome = serve(tmp_path, "--nonsense")
    assert outcome.code == 2
    assert "unrecognized arguments: --nonsense" in outcome.stderr
    assert not any(tmp_path.iterdir())


def test_a_refusal_from_a_shell_is_the_same(tmp_path: Path) -> None:
    """The other tests fork from a server; this one is the process that a user starts."""
    outcome = train(tmp_path, "+trainer.acumulate=4")
    assert outcome.code == 2
    assert outcome.stderr.splitlines() == [
        "shardlab refused to start:",
        "  trainer.acumulate is no key of trainer. Did you mean trainer.accumulate?",
    ]
    assert not outcome.stdout
    assert not any(tmp_path.iterdir())
    assert os.listdir(REPOSITORY / "multirun") != []  # its README lies there, and no run of ours
