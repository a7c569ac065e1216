"""The rules on whole configurations: which are refused, all at once, and with which remedy."""

import re
from pathlib import Path

import pytest
import yaml

from src.checks import trial
from src.checks.setting import make_setting, num_ranks
from src.errors import Refused
from tests.composing import composed

CONF = Path(__file__).parent.parent.parent / "conf"


def problems(*overrides: str) -> list[str]:
    return composed("tracking=off", *overrides)[1]


def test_the_default_is_not_refused() -> None:
    assert problems() == []


def test_every_experiment_is_not_refused_on_a_machine_that_can_run_it() -> None:
    refused = {path.stem: problems(f"experiment={path.stem}") for path in (CONF / "experiment").glob("*.yaml")}
    # What a CPU can't do is refused here, with its reason; nothing else is.
    allowed = re.compile("fp16|launch.device|tf32")
    assert [line for lines in refused.values() for line in lines if not allowed.search(line)] == []


def test_a_rule_names_every_shipped_strategy_that_could_do_it() -> None:
    [line] = problems("strategy=ddp", "sharding=zero3")
    able = [
        path.stem
        for path in (CONF / "strategy").glob("*.yaml")
        if not problems(f"strategy={path.stem}", "sharding=zero3")
    ]
    assert able
    for name in able:
        assert f"strategy={name}" in line
    assert line.endswith("or sharding=none.")


@pytest.mark.parametrize(
    ("data", "other", "given"),
    [(["data=digits"], "perplexity", "accuracy"), (["data=text", "model=gpt_tiny"], "accuracy", "perplexity")],
)
def test_only_what_an_evaluation_gives_can_be_monitored(data: list[str], other: str, given: str) -> None:
    assert problems(*data, f"checkpoint.monitor={given}") == []
    assert problems(*data, "checkpoint.monitor=loss") == []
    [line] = problems(*data, f"checkpoint.monitor={other}")
    assert line.endswith(f"Use checkpoint.monitor=loss or checkpoint.monitor={given}.")


def test_unknown_keys_do_not_hide_the_rules() -> None:
    lines = problems("+trainer.foo=1", "+sharding.foo=1", "strategy=ddp", "sharding=zero3", "seed=-1")
    assert len(lines) == 4
    assert "trainer.foo is no key of trainer" in "\n".join(lines)


def test_one_unworkable_number_does_not_hide_the_other_rules() -> None:
    lines = problems("launch.nproc=0", "launch.device=gpu", "strategy=ddp", "sharding=zero3", "trainer.accumulate=0")
    assert sorted(line.split()[0] for line in lines) == [
        "launch.device=gpu",
        "launch.nproc=0",
        "sharding=zero3",
        "trainer.accumulate=0",
    ]


def test_no_line_is_told_twice() -> None:
    lines = problems("launch.device=gpu", "launch.nproc=2", "trainer.accumulate=0")
    assert len(lines) == len(set(lines))


def test_everything_that_can_not_be_built_is_told_at_once() -> None:
    config, found = composed(
        "tracking=off", "optimizer.lr=-1", "schedule=cosine", "schedule.warmup_steps=-3", "model.image_shape=[1,2,2]"
    )
    assert not found
    with pytest.raises(Refused) as caught:
        trial.prepare(config)
    assert [line.split()[0] for line in caught.value.problems] == ["schedule", "model", "optimizer"]
    assert all("\n" not in line for line in caught.value.problems)


@pytest.mark.parametrize("key", ["trainer.max_grad_norm", "launch.timeout_seconds", "optimizer.lr", "optimizer.eps"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_numbers_that_are_not_finite_are_refused(key: str, value: str) -> None:
    [line] = [line for line in problems(f"{key}={value}") if "finite" in line]
    assert line.startswith(f"{key}={value} is no finite number")


def test_compiling_without_a_compiler_is_refused_where_one_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["trainer.compile=true", "launch.device=cpu"]
    assert problems(*words) == []
    monkeypatch.setenv("CXX", "no-such-compiler")
    [line] = problems(*words)
    assert "there is no compiler no-such-compiler here" in line
    assert line.endswith("or use trainer.compile=false.")
    assert problems("launch.device=cpu") == []


@pytest.mark.parametrize("strategy", ["deepspeed", "tp", "pp"])
def test_compiling_under_what_does_not_compile_is_refused_with_those_that_do(strategy: str) -> None:
    lines = problems(f"strategy={strategy}", "model=gpt_tiny", "trainer.compile=true", "trainer.accumulate=2")
    [line] = [line for line in lines if "compile" in line]
    assert line.endswith(
        "Use strategy=ddp, strategy=fsdp, strategy=fsdp1 or strategy=single, or trainer.compile=false."
    )


def under_torchrun(monkeypatch: pytest.MonkeyPatch, **numbers: int) -> None:
    values = {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 1} | numbers
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


def test_torchruns_world_counts_whatever_auto_would_have_been(monkeypatch: pytest.MonkeyPatch) -> None:
    under_torchrun(monkeypatch)
    config, found = composed("tracking=off", "launch.device=cpu")
    assert not found
    assert num_ranks(config) == 4
    assert make_setting(config).world_size == 4
    assert composed("tracking=off", "launch.nproc=2")[1] == []  # what was started on this machine
    assert "torchrun has started 2" in composed("tracking=off", "launch.nproc=4")[1][0]


@pytest.mark.parametrize("torchrun", [False, True])
def test_more_ranks_than_gpus_are_refused_with_both_numbers(torchrun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    if torchrun:
        under_torchrun(monkeypatch)
        [line] = composed("tracking=off", "launch.device=cuda")[1]
        assert line.startswith("torchrun --nproc-per-node=2 asks for more GPUs than the 1 visible")
    else:
        [line] = composed("tracking=off", "launch.device=cuda", "launch.nproc=9")[1]
        assert line.startswith("launch.nproc=9 asks for more GPUs than the 1 visible here (CUDA_VISIBLE_DEVICES?).")
        assert line.endswith("Use launch.nproc=1, or launch.device=cpu.")


def test_the_gpus_are_the_default_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    config, _ = composed("tracking=off")
    assert num_ranks(config) == 3


def test_no_rule_names_a_strategy_in_its_code() -> None:
    names = {path.stem for path in (CONF / "strategy").glob("*.yaml")} - {"single"}  # an English word, too
    source = CONF.parent / "src"
    modules = [path for path in source.rglob("*.py") if path.parent not in (source / "strategies", source / "models")]
    assert len(modules) > 40
    for module in modules:
        text = module.read_text()
        code = re.sub(r'""".*?"""|#[^\n]*', "", text, flags=re.S)
        # torch's own modules, and the keys strategy.tp and strategy.pp that errors name, are called like strategies.
        code = re.sub(r"from torch\S* import|\bstrategy\.[tp]p\b", "", code)
        assert not [name for name in names if re.search(rf"\b{name}\b", code)], module


def test_every_yaml_of_conf_can_be_read_and_says_what_it_is() -> None:
    for path in CONF.rglob("*.yaml"):
        text = path.read_text()
        assert text.startswith("#"), path
        yaml.safe_load(text)


def test_a_model_that_reads_values_while_it_is_built_is_left_to_the_ranks() -> None:
    config, found = composed("tracking=off", "model=mlp", "model._target_=tests.crafted.ReadsAValue")
    assert not found
    trial.prepare(config)


def test_a_model_whose_weights_exceed_the_machine_is_refused_with_the_sizes() -> None:
    config, found = composed("tracking=off", "launch.device=cpu", "launch.nproc=2", "model=gpt_175b")
    assert not found
    with pytest.raises(Refused) as caught:
        trial.prepare(config)
    [line] = caught.value.problems
    # 175.2 billion parameters x 4 bytes / 2^30
    assert "652.75 GiB of weights for each of 2 rank(s)" in line


CUSTOM = [
    "data=custom",
    "data.train._target_=tests.data.doubles.Points",
    "data.test._target_=tests.data.doubles.Points",
]


def test_the_kind_of_custom_data_is_held_against_the_model() -> None:
    [line] = [line for line in problems(*CUSTOM, "data.kind=tokens") if "takes images" in line]
    assert "gives tokens" in line
    assert any("data.kind='token'" in line for line in problems(*CUSTOM, "data.kind=token"))


def test_custom_data_may_have_a_root_and_must_name_their_sets() -> None:
    assert not any("data.root" in line for line in problems(*CUSTOM, "data.root=/somewhere"))
    assert "data.train._target_ has no value; give one with data.train._target_=..." in problems("data=custom")


def test_what_fsdp1_can_not_offload_on_a_cpu_is_refused() -> None:
    [line] = problems("strategy=fsdp1", "sharding.offload=all", "launch.device=cpu")
    assert "Use sharding.offload=none, or strategy=fsdp." in line


def test_a_batch_that_nothing_can_hold_is_refused() -> None:
    [line] = problems("trainer.micro_batch_size=99999999999999999999999")
    assert "is more than 1000000000" in line


def test_a_constructor_that_stumbles_over_a_value_is_a_refusal() -> None:
    config, found = composed("tracking=off", "optimizer.betas=[0.9]")
    assert not found
    with pytest.raises(Refused, match="optimizer can't be built"):
        trial.prepare(config)
