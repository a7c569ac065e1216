"""Models and data that don't belong together are refused for that reason alone."""

import pytest

from tests.composing import composed


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        # The model's ${data.image_shape} leads nowhere as well, which is a consequence.
        (
            ["data=text", "model=cnn"],
            ["model src.models.cnn.CNN takes images, but data src.data.text.Text gives tokens"],
        ),
        (
            ["model=gpt_tiny", "data=digits"],
            ["model src.models.gpt.GPT takes tokens, but data src.data.digits.Digits gives images"],
        ),
        (
            ["model=gpt_124m", "data=mnist"],
            ["model src.models.gpt.GPT takes tokens, but data src.data.mnist.MNIST gives images"],
        ),
        (
            ["model=gpt_124m", "data.sequence_length=2048"],
            ["data.sequence_length=2048 tokens a sample are more than model.sequence_length=1024"],
        ),
        (
            ["model=gpt_tiny", "model.vocab_size=100"],
            ["data.vocab_size=256 tokens are more than model.vocab_size=100"],
        ),
        (["model=gpt_tiny", "data._target_=${nowhere}"], ["data._target_ can't be resolved"]),
    ],
)
def test_a_mismatch_is_one_line(overrides, expected):
    _, problems = composed(*overrides, "launch.device=cpu")
    assert len(problems) == len(expected)
    for problem, words in zip(problems, expected, strict=True):
        assert problem.startswith(words)
