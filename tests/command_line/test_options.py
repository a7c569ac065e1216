"""Every option of the groups model and data trains, and the presets of rows that name a data set."""

import pytest

from tests.command import QUICK, metrics, summary, train
from tests.composing import run_in

SMALL_IMAGES = ["data=synthetic_images", "data.num_samples=16", "data.num_test_samples=5"]
SMALL_GPT = ["model.width=16", "model.heads=2", "model.layers=2", "trainer.micro_batch_size=2"]
SMALL_TOKENS = ["data.vocab_size=64", "data.sequence_length=8", "data.num_samples=32", "data.num_test_samples=5"]
OPTIONS = {
    "cnn": ["model=cnn", *SMALL_IMAGES],
    "mlp": ["model=mlp", *SMALL_IMAGES],
    "tp_mlp": ["model=tp_mlp", *SMALL_IMAGES],
    "resnet18": ["model=resnet18", *SMALL_IMAGES, "data.image_shape=[1,8,8]"],
    "gpt_tiny": ["model=gpt_tiny", "data=synthetic_tokens", *SMALL_GPT, *SMALL_TOKENS],
    **{
        name: [f"model={name}", *SMALL_GPT, *SMALL_TOKENS, "model.vocab_size=64", "model.sequence_length=8"]
        for name in ("gpt_124m", "gpt_r12", "gpt_7b", "gpt_175b")
    },
}


@pytest.mark.parametrize(
    ("option", "strategy"),
    [
        # The large GPTs are the tiny one's class, cut down here to its size: one strategy checks their yaml.
        *((option, "ddp") for option in OPTIONS),
        *((option, strategy) for option in ("cnn", "resnet18", "gpt_tiny") for strategy in ("fsdp", "fsdp1")),
    ],
)
def test_every_model_trains(pool, tmp_path, option, strategy):
    overrides = [f"strategy={strategy}", *OPTIONS[option], "trainer.max_steps=2"]
    if option in ("cnn", "mlp", "tp_mlp", "resnet18"):
        overrides.append("trainer.micro_batch_size=4")
    result = run_in(pool, 2, tmp_path / "run", *overrides)
    assert len(result.train) == 2
    assert result.evaluations[-1]["samples"] == 5


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_gpt_trains_in_16_bits_on_a_cpu(pool, tmp_path, precision):
    losses = {}
    for strategy in ("ddp", "fsdp", "fsdp1"):
        overrides = [f"strategy={strategy}", f"precision={precision}", *OPTIONS["gpt_tiny"], "trainer.max_steps=2"]
        losses[strategy] = run_in(pool, 2, tmp_path / strategy, *overrides).series("loss")
    exact = run_in(pool, 2, tmp_path / "fp32", "strategy=ddp", *OPTIONS["gpt_tiny"], "trainer.max_steps=2")
    for strategy, series in losses.items():
        assert series == pytest.approx(exact.series("loss"), rel=2e-2), strategy


def test_text_trains_the_tiny_gpt_by_default(tmp_path):
    outcome = train(tmp_path, "model=gpt_tiny", *QUICK, "data.limit=64", "data.sequence_length=32")
    assert outcome.code == 0, outcome.text
    first, second = metrics(outcome.run_dir())
    assert second["loss"] < first["loss"]
    assert first["tokens_per_second"] > 0
    assert summary(outcome.run_dir())["eval"]["perplexity"] < 256


def test_the_mnist_preset_is_the_tutorial_and_trains_on_the_real_files(tmp_path, mnist_archives):
    command = ["experiment=mnist_ddp", f"data.root={mnist_archives}", "data.limit=256", *QUICK]
    outcome = train(tmp_path, *command)
    assert outcome.code == 0, outcome.text
    assert "128 = 64 a micro-batch x 1 accumulated x 2 data rank(s)" in outcome.text
    assert summary(outcome.run_dir())["parameters"] == 824_458
    assert [record["lr"] for record in metrics(outcome.run_dir())] == [1e-3, 1e-3]
    assert summary(outcome.run_dir())["eval"]["samples"] == 10_000
