"""data=synthetic_images and data=synthetic_tokens."""

import pytest
import torch

from src.data.synthetic import SyntheticImages, SyntheticTokens
from src.errors import Refused
from tests.data.fetching import CPU, fetch

IMAGES = {"image_shape": [3, 16, 20], "num_classes": 4, "num_samples": 40, "num_test_samples": 12}
TOKENS = {"vocab_size": 50257, "sequence_length": 6, "num_samples": 40, "num_test_samples": 12}


def test_images_have_the_asked_shape_and_are_about_standard_normal():
    train_source, test_source = SyntheticImages(**IMAGES).load(CPU, seed=0)
    assert (train_source.num_samples, test_source.num_samples) == (40, 12)
    batch = fetch(train_source, range(40))
    assert batch.inputs.shape == (40, 3, 16, 20)
    assert batch.targets.tolist() == [0, 1, 2, 3] * 10
    # 4 prototypes of 960 uniform pixels: the mean is off by about 0.29 / sqrt(3840) / 0.32 = 0.015.
    assert batch.inputs.mean().item() == pytest.approx(0, abs=0.06)
    assert batch.inputs.std().item() == pytest.approx(1, abs=0.06)


def test_the_nearest_prototype_classifies_unseen_images():
    train_source, test_source = SyntheticImages(**IMAGES).load(CPU, seed=0)
    batch, unseen = fetch(train_source, range(40)), fetch(test_source, range(12))
    means = torch.stack([batch.inputs[batch.targets == label].mean(0) for label in range(4)])
    nearest = torch.cdist(unseen.inputs.flatten(1), means.flatten(1)).argmin(1)
    assert torch.equal(nearest, unseen.targets)


@pytest.mark.parametrize(("kind", "given"), [(SyntheticImages, IMAGES), (SyntheticTokens, TOKENS)])
def test_samples_do_not_depend_on_the_seed_nor_the_test_set_on_the_number(kind, given):
    train_source, test_source = kind(**given).load(CPU, seed=0)
    again, _ = kind(**given).load(CPU, seed=1)
    assert torch.equal(fetch(train_source, range(40)).inputs, fetch(again, range(40)).inputs)
    limited, same_test = kind(**given, limit=7).load(CPU, seed=0)
    assert limited.num_samples == 7
    assert torch.equal(fetch(limited, range(7)).inputs, fetch(train_source, range(7)).inputs)
    assert torch.equal(fetch(same_test, range(12)).inputs, fetch(test_source, range(12)).inputs)


@pytest.mark.parametrize(("kind", "given"), [(SyntheticImages, IMAGES), (SyntheticTokens, TOKENS)])
@pytest.mark.parametrize("key", ["num_samples", "num_test_samples"])
def test_an_empty_data_set_is_refused(kind, given, key):
    with pytest.raises(Refused, match=rf"data\.{key}=0 leaves an empty data set"):
        kind(**{**given, key: 0}).prepare()


@pytest.mark.parametrize("vocab_size", [3, 256, 50257])
def test_token_rows_go_up_by_a_step_of_their_own_within_the_vocabulary(vocab_size):
    source, _ = SyntheticTokens(**{**TOKENS, "vocab_size": vocab_size}).load(CPU, seed=0)
    batch = fetch(source, range(40), num_real=39)
    assert source.targets_per_sample == 6
    assert batch.inputs.shape == (40, 6)
    assert torch.equal(batch.targets[:39, :-1], batch.inputs[:39, 1:]), "the target is the token that follows"
    assert (batch.targets[39] == -100).all(), "padding"
    assert batch.inputs.max() < vocab_size
    steps = (batch.inputs[:, 1:] - batch.inputs[:, :-1]) % vocab_size
    assert (steps == steps[:, :1]).all()
    assert len(steps[:, 0].unique()) > 1


def test_test_rows_are_not_among_the_training_rows():
    train_source, test_source = SyntheticTokens(**TOKENS).load(CPU, seed=0)
    seen = {tuple(row) for row in fetch(train_source, range(40)).inputs.tolist()}
    assert not seen & {tuple(row) for row in fetch(test_source, range(12)).inputs.tolist()}
