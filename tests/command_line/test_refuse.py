"""Bad input gets one line with the reason and the remedy, exit code 2, and nothing is made or started."""

import shlex
from pathlib import Path

import pytest

from tests.command_server import serve

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}

# What is typed -> what each line of the answer must hold, in order.
BAD_INPUT = {
    # names
    "trainer.acumulate=4": ["trainer.acumulate is no key of trainer. Did you mean trainer.accumulate?"],
    "+trainer.acumulate=4": ["trainer.acumulate is no key of trainer. Did you mean trainer.accumulate?"],
    "++trainer.acumulate=4": ["trainer.acumulate is no key of trainer. Did you mean trainer.accumulate?"],
    "strategy=fsdpp": ["strategy=fsdpp is no option of strategy. Did you mean fsdp? Known: ddp,"],
    "task=plans": ["task=plans is no option of task."],
    "strateggy=ddp": ["strateggy is no key of the configuration. Did you mean strategy?"],
    "+experiment=nope": ["experiment=nope is no option of experiment. Known: "],
    "nproc=2": ["nproc is no key of the configuration. Did you mean launch.nproc?"],
    "+experiment=fsdp_bf16": ["experiment has a place in config.yaml already. Write experiment=fsdp_bf16, without"],
    "+foo=1": ["foo is no key of the configuration. Known: checkpoint"],
    "+model.foo=1": ["model.foo is nothing that src.models.cnn.CNN takes. Known: image_shape, num_classes."],
    "+optimizer.foo=1": ["optimizer.foo is nothing that torch.optim.AdamW takes."],
    "strategy.sync_each_microbatch=true": ["strategy.sync_each_microbatch is no key of strategy=ddp. Known: "],
    "strategy=fsdp strategy.static_graph=true": ["strategy.static_graph is no key of strategy=fsdp. Known: "],
    "hydra.run.dirr=x": ["hydra.run.dirr is no key of hydra.run. Did you mean hydra.run.dir?"],
    "foo": ["foo is no override. Write key=value."],
    "+compression.foo=1": ["compression.foo is nothing that this option of compression takes. Drop it."],
    "+seed=1": ["seed exists already. Write seed=1, without the +."],
    # removals
    "~trainer": ["trainer was removed, but every run needs it. Drop the override ~trainer."],
    "~trainer.epochs": ["trainer.epochs was removed, but every run needs it. Drop the override ~trainer.epochs."],
    "~data.limit": ["~data.limit: data.limit is null, and Hydra can't remove that. Drop the override."],
    "~model": ["model has no _target_, so nothing can be built of it. Choose one with model=<option>."],
    "model=mlp ~model.hidden": ["model.hidden is missing; src.models.mlp.MLP needs it."],
    # several where one belongs
    "strategy=[ddp,fsdp]": ["For a sweep use -m strategy=ddp,fsdp"],
    "trainer.epochs=1,2": ["trainer.epochs=1,2 names several values. For a sweep use -m trainer.epochs=1,2"],
    "strategy=null": ["strategy=null chooses nothing. Known: "],
    # types and ranges
    "trainer.epochs=abc": ["trainer.epochs=abc does not fit: Value 'abc' of type 'str' could not be converted"],
    "trainer.epochs=1.5": ["trainer.epochs=1.5 does not fit"],
    "trainer.epochs=true": ["trainer.epochs=true does not fit"],
    "trainer.epochs=0": ["trainer.epochs=0 is less than one; choose 1 or more."],
    "trainer.max_steps=-1": ["trainer.max_steps=-1 is less than one; choose 1 or more."],
    "seed=-1": ["seed=-1 is out of range; choose 0 to 4294967295."],
    "trainer.accumulate=0": ["trainer.accumulate=0 is not a batch size; choose 1 or more."],
    "data.limit=0": ["data.limit=0 leaves an empty data set; choose 1 or more."],
    "trainer.max_grad_norm=nan": ["trainer.max_grad_norm=nan is no finite number"],
    "trainer.max_grad_norm=-1": ["trainer.max_grad_norm=-1.0 must be more than 0; null: no clipping."],
    "launch.timeout_seconds=inf": ["launch.timeout_seconds=inf is no finite number"],
    "launch.timeout_seconds=1e30": ["launch.timeout_seconds=1e+30 is more than 1000000000."],
    "optimizer.lr=-inf": ["optimizer.lr=-inf is no finite number"],
    "optimizer.lr=-1": ["optimizer can't be built: ValueError: Invalid learning rate: -1."],
    "optimizer.lr=abc": ["optimizer.lr='abc' is not of type float."],
    "optimizer.betas=[0.9,x]": ["optimizer.betas=[0.9, 'x'] is not of type"],
    "model=mlp model.hidden=abc": ["model.hidden='abc' is not of type list[int]."],
    "precision.name=fp17": ["precision.name=fp17 is unknown. Did you mean fp16?"],
    "launch.nproc=0": ["launch.nproc=0 is no number of processes; choose 1 or more, or auto."],
    "launch.nproc=two": ["launch.nproc=two is no number of processes; choose 1 or more, or auto."],
    "launch.device=gpu": ["launch.device=gpu is unknown; choose auto, cpu or cuda."],
    # combinations
    "trainer.global_batch_size=100 launch.nproc=2": [
        "trainer.global_batch_size=100 disagrees with micro_batch_size x accumulate x data ranks = 64 x 1 x 2 = 128;"
    ],
    "strategy=ddp sharding=zero3": [
        "sharding=zero3 shards parameters, but strategy=ddp keeps a whole copy on every rank. Use "
    ],
    "strategy=single launch.nproc=2": ["launch.nproc=2 starts 2 processes, but strategy=single is one process"],
    # targets and interpolations
    "model._target_=src.models.cnn.CNNN": ["src.models.cnn has no CNNN. Did you mean src.models.cnn.CNN?"],
    "model._target_=nowhere.Model": ["model._target_=nowhere.Model can't be found: there is no module nowhere "],
    "+model._partial_=true": ["where a Module belongs. Correct model._target_."],
    "model._target_=torch.nn": ["model._target_=torch.nn is a module, which can't be built."],
    "model._target_=tests.broken_on_import.Model": ["RuntimeError: not today (broken_on_import.py:3)"],
    "'model.image_shape=${data.nope}'": [
        "model.image_shape can't be resolved: Interpolation key 'data.nope' not found"
    ],
    "'trainer.epochs=${data.nope}'": ["trainer.epochs can't be resolved: Interpolation key 'data.nope' not found"],
    "'hydra.run.dir=${nope}'": ["hydra.run.dir can't be resolved: Interpolation key 'nope' not found"],
    "trainer=3": ["trainer=3 does not fit: Invalid type assigned"],
    "'trainer.epochs=???'": ["trainer.epochs has no value; give one with trainer.epochs=..."],
    # Hydra's own
    "--config-dir /no/such/folder experiment=mine": ["Additional config directory '/no/such/folder' not found"],
    "--config-name nope": ["Cannot find primary config 'nope'."],
    # sweeps, refused whole
    "-m trainer.accumulate=1,0": ["job 1 (trainer.accumulate=0): trainer.accumulate=0 is not a batch size"],
    "-m strategy=ddp,fsdpp": ["job 1 (strategy=fsdpp): strategy=fsdpp is no option of strategy."],
    "-m trainer.epochs=1,abc": ["job 1 (trainer.epochs=abc): trainer.epochs=abc does not fit"],
    "-m trainer.acumulate=1,2": ["trainer.acumulate is no key of trainer. Did you mean trainer.accumulate?"],
    "-m strategy=ddp,fsdp sharding=zero3": ["job 0 (strategy=ddp sharding=zero3): sharding=zero3 shards parameters"],
    "-m strategy=[ddp,fsdp]": ["For a sweep use -m strategy=ddp,fsdp"],
    "-m hydra.sweep.subdir=same seed=1,2": ["hydra.sweep.subdir=same is the folder of jobs 0, 1"],
}


@pytest.mark.parametrize("typed", BAD_INPUT)
def test_bad_input_gets_one_line_with_the_remedy_before_anything_exists(typed: str, tmp_path: Path) -> None:
    outcome = serve(tmp_path, *shlex.split(typed))
    assert outcome.is_refusal(), outcome.text
    expected = BAD_INPUT[typed]
    assert len(outcome.problems) == len(expected), outcome.problems
    for line, part in zip(outcome.problems, expected, strict=True):
        assert part in line


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    typed = "trainer.epochs=abc trainer.acumulate=2 +foo=1 seed=-1 strategy=ddp sharding=zero3 launch.nproc=0"
    outcome = serve(tmp_path, *typed.split())
    assert outcome.is_refusal(), outcome.text
    for part in ("trainer.epochs=abc", "trainer.acumulate", "foo", "seed=-1", "sharding=zero3", "launch.nproc=0"):
        assert sum(line.startswith(part) for line in outcome.problems) == 1, (part, outcome.problems)
    assert len(outcome.problems) == 6


def test_a_rule_that_only_follows_from_a_misspelt_key_is_not_told(tmp_path: Path) -> None:
    # With accumulate=2 the three sizes agree on two ranks: 64 x 2 x 2 = 256.
    outcome = serve(tmp_path, "trainer.acumulate=2", "trainer.global_batch_size=256", "launch.nproc=2")
    assert outcome.is_refusal()
    assert len(outcome.problems) == 1


def test_keys_of_an_unknown_option_are_not_held_against_another(tmp_path: Path) -> None:
    outcome = serve(tmp_path, "strategy=fsdpp", "strategy.sync_each_microbatch=true", "precision=fp17")
    assert outcome.is_refusal()
    assert [line.split()[0] for line in outcome.problems] == ["strategy=fsdpp", "precision=fp17"]


def test_a_line_that_holds_for_all_jobs_of_a_sweep_is_told_once(tmp_path: Path) -> None:
    outcome = serve(tmp_path, "-m", "seed=1,2,3", "+foo=1", "strategy=single,ddp", "launch.nproc=2")
    assert outcome.is_refusal()
    shared, some = outcome.problems
    assert shared.startswith("foo is no key")
    assert some.count("job ") == 3  # one a seed: those of strategy=single


@pytest.mark.parametrize(
    ("variables", "part"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "but not LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT: half a"),
        (TORCHRUN | {"RANK": "x"}, "RANK='x' in the environment is not a number."),
        (TORCHRUN | {"MASTER_PORT": "0"}, "MASTER_PORT=0 is no port to meet at. Use torchrun --standalone"),
        (TORCHRUN | {"MASTER_PORT": "99999"}, "MASTER_PORT=99999 is no port; the largest is 65535."),
        (TORCHRUN | {"RANK": "\u00b2"}, "in the environment is not a number."),
        (TORCHRUN | {"RANK": "2"}, "RANK=2 of WORLD_SIZE=2 and LOCAL_RANK=0 of LOCAL_WORLD_SIZE=2"),
    ],
)
def test_an_environment_that_is_half_torchruns_is_refused(variables: dict[str, str], part: str, tmp_path: Path) -> None:
    outcome = serve(tmp_path, **variables)
    assert outcome.is_refusal()
    assert part in outcome.problems[0]


def test_a_number_of_ranks_that_torchrun_did_not_start_is_refused(tmp_path: Path) -> None:
    outcome = serve(tmp_path, "launch.nproc=3", **TORCHRUN)
    assert outcome.is_refusal()
    assert outcome.problems == ["launch.nproc=3, but torchrun has started 2 on this machine. Drop it."]


def test_a_sweep_under_torchrun_is_refused(tmp_path: Path) -> None:
    outcome = serve(tmp_path, "-m", "seed=1,2", **TORCHRUN)
    assert outcome.is_refusal()
    assert "torchrun's ranks live for one" in outcome.problems[0]


@pytest.mark.parametrize("visible", [None, ""])
def test_a_gpu_where_none_is_visible_is_refused_with_the_way_out(visible: str | None, tmp_path: Path) -> None:
    import torch

    if visible is None and torch.cuda.device_count():
        pytest.skip("this machine has a GPU")
    outcome = serve(tmp_path, "launch.device=cuda", CUDA_VISIBLE_DEVICES=visible)
    assert outcome.is_refusal()
    assert "no GPU is visible here (CUDA_VISIBLE_DEVICES?). Use launch.device=cpu." in outcome.problems[0]


def test_a_folder_that_holds_a_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "metrics.jsonl").write_text("precious\n")
    for typed in ("hydra.run.dir=mine", "-m hydra.sweep.dir=mine seed=1,2"):
        outcome = serve(tmp_path, *typed.split())
        assert outcome.code == 2
        assert (
            "mine already holds a run. Choose another folder, or go on in it with checkpoint.resume=auto."
            in outcome.problems[0]
        )
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["metrics.jsonl"]
    assert (tmp_path / "mine" / "metrics.jsonl").read_text() == "precious\n"


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file, file / "below"):
        outcome = serve(tmp_path, f"hydra.run.dir={folder}")
        assert outcome.code == 2
        assert "file is a file. Choose another." in outcome.problems[0]


def test_a_folder_that_may_not_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    outcome = serve(tmp_path, rights=False)
    tmp_path.chmod(0o755)
    assert outcome.is_refusal(), outcome.text
    assert "no permission to write in" in outcome.problems[0]


def test_a_folder_below_one_that_may_not_be_entered_is_refused(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o000)
    outcome = serve(tmp_path, "hydra.run.dir=locked/run", rights=False)
    (tmp_path / "locked").chmod(0o755)
    assert outcome.code == 2, outcome.text
    assert "no permission to write in" in outcome.problems[0]


def test_a_folder_that_the_system_will_not_make_is_refused(tmp_path: Path) -> None:
    outcome = serve(tmp_path, "hydra.run.dir=/proc/nowhere/x")
    assert outcome.is_refusal(), outcome.text
    assert outcome.problems == [
        "hydra.run.dir=/proc/nowhere/x can't be written: No such file or directory in /proc. Make room, or choose"
        " another."
    ]


def test_removing_the_callback_does_not_open_the_door(tmp_path: Path) -> None:
    for removal in ("~hydra.callbacks.refuse", "hydra.callbacks.refuse=null", "~hydra.callbacks"):
        outcome = serve(tmp_path, removal, "trainer.accumulate=0", "optimizer.lr=-1")
        assert outcome.code == 2, outcome.text
        assert "  trainer.accumulate=0 is not a batch size; choose 1 or more.\n" in outcome.stderr
        late = serve(tmp_path, removal, "optimizer.lr=-1")  # what only building it shows
        assert late.code == 2, late.text
        assert not outcome.started_processes + late.started_processes


def test_a_broken_yaml_of_the_users_is_refused_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ntrainer: {epochs: 1\nseed: 3\n")
    outcome = serve(tmp_path, "--config-dir", str(tmp_path), "experiment=mine")
    assert outcome.code == 2, outcome.text
    assert "Traceback" not in outcome.text
    assert "mine.yaml" in outcome.problems[0]


def test_an_option_that_a_users_yaml_chooses_and_nobody_has_is_refused(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ndefaults: [{override /model: nope}]\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    outcome = serve(tmp_path, "--config-dir", str(tmp_path), "experiment=mine")
    assert outcome.code == 2, outcome.text
    assert "model/nope" in outcome.problems[0]
    assert not outcome.started_processes
