"""What strategy=pp refuses before anything starts, in one line of choice, reason and remedy."""

import pytest

from tests.composing import composed

#: A pipeline of two stages that is not refused.
SOUND = [
    "strategy=pp",
    "model=gpt_tiny",
    "trainer.accumulate=4",
    "launch.nproc=2",
    "launch.device=cpu",
    "tracking=off",
]

REFUSED = {
    "launch.nproc=3": "3 rank(s) can't be split by strategy.pp=2: the product must divide them.",
    "launch.nproc=6 strategy.tp=2": "6 rank(s) can't be split by strategy.pp=2 x strategy.tp=2 = 4",
    "strategy.pp=1": "strategy.pp=1 makes a pipeline of one stage, with nothing to cut. Use strategy.pp=2 or more",
    "trainer.accumulate=1": "trainer.accumulate=1 does not suit strategy.schedule=1f1b, which runs a micro-batch in"
    " each of strategy.pp=2 stages at once. Use trainer.accumulate=2 or more, or strategy.schedule=gpipe.",
    "trainer.accumulate=5 strategy.schedule=zero_bubble": "Use trainer.accumulate=4 or 6, or strategy.schedule=gpipe.",
    "strategy.schedule=fast": "strategy.schedule='fast' is not one of 'gpipe' or '1f1b' or",
    "model.layers=3 strategy.schedule=interleaved_1f1b": "the model has 3 layer(s), fewer than the 4 stages of"
    " strategy.pp=2 with 2 a rank.",
    "strategy.split_points=[4]": "strategy.split_points=[4] must lie between the model's 4 layers; choose points"
    " from 1 to 3.",
    "strategy.split_points=[2] model.layers=2": "the model's 2 layers; choose 1.",
    "strategy.split_points=[1,2]": "strategy.split_points=[1, 2] makes 3 stage(s), but strategy.pp=2 with 1 a rank"
    " has 2. Give 1 point(s), or null to split evenly.",
    "strategy.split_points=[2,1,3] strategy.schedule=interleaved_1f1b": "strategy.split_points=[2, 1, 3] must go up.",
    "strategy.stages_per_rank=2": "strategy.stages_per_rank=2: strategy.schedule=1f1b has one stage a rank.",
    "strategy.stages_per_rank=0": "strategy.stages_per_rank=0 is no number of stages; choose 1 or more, or null.",
    "model.tie_embeddings=true": "model.tie_embeddings=true shares one table between the first stage and the last",
    "strategy.tp=2 launch.nproc=4 model.heads=1": "model.heads=1 is not divisible by strategy.tp=2.",
    "strategy.sequence_parallel=true": "strategy.sequence_parallel=true splits sequences over strategy.tp ranks",
    "strategy.schedule=zero_bubble sharding=zero3": "would leave out their gradients. Use sharding=zero2",
    "strategy.schedule=zero_bubble trainer.activation_checkpointing=full": "strategy.schedule=zero_bubble goes"
    " through it once for every weight. Use trainer.activation_checkpointing=none, or another schedule.",
    "trainer.activation_checkpointing=selective strategy.schedule=zero_bubble": "recomputes a layer in each backward"
    " through it, and strategy.schedule=zero_bubble goes through it once for every weight.",
    "sharding=zero1": "sharding=zero1 shards optimizer states, but strategy=pp cuts the layers into stages",
}


def test_a_sound_pipeline_is_not_refused() -> None:
    assert composed(*SOUND)[1] == []


@pytest.mark.parametrize("overrides", REFUSED)
def test_what_can_not_work_is_refused_in_one_line(overrides: str) -> None:  # TP-06: tied embeddings
    _, problems = composed(*SOUND, *overrides.split())
    assert len(problems) == 1, problems
    assert REFUSED[overrides] in problems[0]


def test_a_model_without_layers_to_cut_is_refused_by_name() -> None:
    _, [line] = composed(*SOUND, "model=cnn")
    assert "model src.models.cnn.CNN does not say how it is cut into stages (keep_layers)" in line
    assert "model=gpt_tiny" in line
