"""data=digits."""

import pytest
import torch

from src.data.digits import Digits
from src.errors import Refused
from tests.data.fetching import CPU, fetch

SHAPE = {"image_shape": [1, 8, 8], "num_classes": 10}


def test_digits_are_scikit_learns_1797_of_mean_0_and_deviation_1():
    from sklearn.datasets import load_digits

    train_source, test_source = Digits(**SHAPE).load(CPU, seed=0)
    assert (train_source.num_samples, test_source.num_samples) == (1497, 300)
    batch = fetch(train_source, range(1497))
    assert batch.inputs.shape == (1497, 1, 8, 8)
    # 0.288 and 0.354 are rounded: off by at most 0.0005 / 0.354 = 0.0014.
    assert batch.inputs.mean().item() == pytest.approx(0, abs=1.5e-3)
    assert batch.inputs.std().item() == pytest.approx(1, abs=1.5e-3)
    ours = torch.cat([train_source.inputs, test_source.inputs]).view(-1, 64) / 15
    theirs = load_digits()
    assert sorted(ours.tolist()) == sorted(theirs.data.tolist())
    labels = torch.cat([train_source.targets, test_source.targets])
    assert labels.bincount().tolist() == torch.from_numpy(theirs.target).bincount().tolist()


def test_the_test_set_is_the_same_whatever_the_seed_and_limit():
    _, one = Digits(**SHAPE).load(CPU, seed=0)
    _, other = Digits(**SHAPE, limit=5).load(CPU, seed=1)
    assert torch.equal(one.inputs, other.inputs)


def test_a_root_without_the_table_is_refused(tmp_path):
    with pytest.raises(Refused, match=r"digits\.csv\.gz, which is not there"):
        Digits(**SHAPE, root=str(tmp_path)).prepare()
