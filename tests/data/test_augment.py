"""Augmentation: a function of seed, epoch and sample, whatever the split."""

import numpy as np
import pytest
import torch

from src.batch import BatchPlan, BatchSizes
from src.data.augment import AugmentedImageSource, crop_and_flip, draws, scramble
from tests.data.fetching import CPU, fetch


@pytest.fixture
def source():
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (30, 3, 8, 8), generator=generator, dtype=torch.uint8)
    return AugmentedImageSource(images, torch.arange(30), CPU, [0.5] * 3, [0.25] * 3, seed=7)


def epoch_by_sample(source, sizes, epoch=1):
    """Each sample's augmented image in one epoch of the given split, by sample id (its label)."""
    images = {}
    for batch in BatchPlan(source.num_samples, sizes.global_batch_size, seed=0).epoch(epoch):
        for data_rank in range(sizes.data_parallel_size):
            for micro in source.stream(batch.requests(sizes, data_rank), epoch):
                images.update(zip(micro.targets.tolist(), micro.inputs, strict=True))
    images.pop(-100, None)
    return images


@pytest.mark.parametrize("sizes", [BatchSizes(2, 3, 2), BatchSizes(4, 1, 3), BatchSizes(7, 1, 1)])
def test_a_sample_is_augmented_the_same_however_the_batch_is_split(source, sizes):
    whole, split = epoch_by_sample(source, BatchSizes(30, 1, 1)), epoch_by_sample(source, sizes)
    assert sorted(split) == sorted(whole) == list(range(30))
    for sample, image in whole.items():
        assert torch.equal(split[sample], image)


def test_epochs_and_seeds_augment_differently(source):
    first = fetch(source, range(30), epoch=0).inputs
    assert not torch.equal(fetch(source, range(30), epoch=1).inputs, first)
    source.seed = 8
    assert not torch.equal(fetch(source, range(30), epoch=0).inputs, first)


def test_a_crop_is_the_padded_image_cut_at_its_place_and_mirrored(source):
    images = source.inputs[:4]
    top, left = torch.tensor([0, 8, 3, 4]), torch.tensor([8, 0, 5, 4])
    flip = torch.tensor([False, True, True, False])
    padded = torch.nn.functional.pad(images, [4] * 4)
    for i, result in enumerate(crop_and_flip(images, top, left, flip, padding=4)):
        expected = padded[i, :, top[i] : top[i] + 8, left[i] : left[i] + 8]
        assert torch.equal(result, expected.flip(-1) if flip[i] else expected)
    assert torch.equal(crop_and_flip(images, top, left, flip, padding=4)[3], images[3]), "the middle is the image"


def test_every_place_is_drawn_equally_often_and_half_of_the_images_are_mirrored():
    top, left, flip = draws(seed=0, epoch=0, ids=torch.arange(81_000), count=3)
    places = torch.bincount((top % 9) * 9 + left % 9)
    # 81 places, 1000 expected each, standard deviation 31.4: five of them are 157.
    assert places.shape == (81,)
    assert (places - 1000).abs().max() < 157
    # 40500 expected, standard deviation 142.
    assert abs((flip % 2).sum().item() - 40_500) < 712


def test_the_scrambler_is_a_bijection_of_32_bit_numbers_without_overflow():
    numbers = torch.from_numpy(np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.int64)).unique()
    scrambled = scramble(numbers)
    assert scrambled.min() >= 0
    assert scrambled.max() < 2**32
    assert len(scrambled.unique()) == len(numbers)
    # The same in Python's unbounded integers.
    x = int(numbers[-1])
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) % 2**32
    x = ((x ^ (x >> 15)) * 0x735A2D97) % 2**32
    assert int(scrambled[-1]) == x ^ (x >> 15)
