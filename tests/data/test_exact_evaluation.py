"""Evaluation counts each test sample once, whatever the split (case DA-01)."""

import pytest

from tests.composing import run_in

# 300 and 21 test samples: neither is a multiple of what the ranks take at once.
SMALL = ["data.num_samples=32", "data.num_test_samples=21"]
COMMANDS = {
    "digits": ["data=digits", "model=mlp"],
    "images": ["data=synthetic_images", "data.image_shape=[1,4,4]", "model=mlp", *SMALL],
    "tokens": ["data=synthetic_tokens", "data.vocab_size=50", "data.sequence_length=8", "model=gpt_tiny", *SMALL],
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS.keys())
def test_one_two_and_three_processes_report_the_same_numbers_of_the_same_samples(pool, tmp_path, command):
    common = [*command, "trainer.micro_batch_size=null", "trainer.global_batch_size=24", "trainer.max_steps=2"]
    [reference] = run_in(pool, 1, tmp_path / "1", "strategy=single", *common).evaluations
    assert reference["samples"] == (300 if "digits" in command[0] else 21)
    for ranks in (2, 3):
        [result] = run_in(pool, ranks, tmp_path / str(ranks), "strategy=ddp", *common).evaluations
        assert result["samples"] == reference["samples"]
        for key in {"loss", "accuracy", "perplexity"} & reference.keys():
            assert result[key] == pytest.approx(reference[key], rel=1e-6), key
