"""data=cifar10, on a small archive in torchvision's own format."""

import hashlib
import pickle
import tarfile

import numpy as np
import pytest
import torch

from src.data.augment import AugmentedImageSource
from src.data.cifar10 import CIFAR10
from src.errors import Refused
from tests.command_server import serve
from tests.data.fetching import CPU, fetch

SHAPE = {"image_shape": [3, 32, 32], "num_classes": 10}


def md5(path):
    return hashlib.md5(path.read_bytes()).hexdigest()


@pytest.fixture
def small_cifar10(tmp_path):
    """CIFAR10 reading an archive of two training batches and a test batch; no mirror has it. Its archive is in root."""
    from torchvision import datasets

    made = tmp_path / "made" / "cifar-10-batches-py"
    made.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for name, count in (("data_batch_1", 6), ("data_batch_2", 5), ("test_batch", 4)):
        images = generator.integers(0, 256, (count, 3072), dtype=np.uint8)
        content = {"data": images, "labels": generator.integers(0, 10, count).tolist()}
        (made / name).write_bytes(pickle.dumps(content))
    (made / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    root = tmp_path / "root"
    root.mkdir()
    with tarfile.open(root / "cifar-10-python.tar.gz", "w:gz") as archive:
        archive.add(made, made.name)

    class Archive(datasets.CIFAR10):
        url = "http://127.0.0.1:9/nothing-listens-here"
        tgz_md5 = md5(root / "cifar-10-python.tar.gz")
        train_list = [[name, md5(made / name)] for name in ("data_batch_1", "data_batch_2")]  # noqa: RUF012 - as theirs
        test_list = [["test_batch", md5(made / "test_batch")]]  # noqa: RUF012
        meta = {**datasets.CIFAR10.meta, "md5": md5(made / "batches.meta")}  # noqa: RUF012

    class SmallCIFAR10(CIFAR10):
        dataset = Archive

    return lambda **arguments: SmallCIFAR10(**{**SHAPE, "root": str(root), **arguments})


def test_an_archive_that_was_placed_by_hand_is_unpacked_without_network(small_cifar10):
    data = small_cifar10(augment=False)
    data.prepare()
    train_source, test_source = data.load(CPU, seed=0)
    assert (train_source.num_samples, test_source.num_samples) == (11, 4)
    batch = fetch(train_source, range(11))
    assert batch.inputs.shape == (11, 3, 32, 32)
    assert batch.targets.shape == (11,)
    assert (data.root / "cifar-10-python.tar.gz").is_file(), "it is the user's"


def test_images_are_normalised_a_channel_and_stand_upright(small_cifar10):
    data = small_cifar10(augment=False)
    data.prepare()
    with (data.root / "cifar-10-batches-py" / "data_batch_1").open("rb") as file:
        stored = pickle.load(file)["data"][0].reshape(3, 32, 32)
    image = fetch(data.load(CPU, seed=0)[0], [0]).inputs[0]
    mean, std = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])
    expected = (torch.from_numpy(stored) / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    torch.testing.assert_close(image, expected, rtol=0, atol=1e-5)


def test_only_training_images_are_augmented_and_only_if_asked(small_cifar10):
    data = small_cifar10()
    data.prepare()
    train_source, test_source = data.load(CPU, seed=0)
    assert isinstance(train_source, AugmentedImageSource)
    assert not isinstance(test_source, AugmentedImageSource)
    assert torch.equal(fetch(test_source, [0], epoch=0).inputs, fetch(test_source, [0], epoch=1).inputs)


def test_limit_keeps_the_first_training_samples(small_cifar10):
    data = small_cifar10(limit=3)
    data.prepare()
    train_source, test_source = data.load(CPU, seed=0)
    assert (train_source.num_samples, test_source.num_samples) == (3, 4)


def test_a_damaged_file_is_refused_by_name_before_anything_unpickles_it(small_cifar10):
    data = small_cifar10()
    data.prepare()
    (data.root / "cifar-10-batches-py" / "data_batch_2").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(Refused, match="data_batch_2 is damaged"):
        data.prepare()


def test_a_damaged_archive_is_refused_by_name_and_left_alone(small_cifar10):
    data = small_cifar10()
    archive = data.root / "cifar-10-python.tar.gz"
    archive.write_bytes(b"half")
    with pytest.raises(Refused, match=r"cifar-10-python\.tar\.gz is damaged"):
        data.prepare()
    assert archive.read_bytes() == b"half"


def test_without_network_the_refusal_names_the_archive_to_place(small_cifar10, tmp_path):
    with pytest.raises(Refused, match=r"can't be downloaded \(.*refused.*\)\. Place cifar-10-python\.tar\.gz"):
        small_cifar10(root=str(tmp_path / "elsewhere")).prepare()


def test_another_shape_in_the_configuration_is_refused_before_the_start(tmp_path):
    outcome = serve(tmp_path, "data=cifar10", "data.num_classes=100")
    assert outcome.code == 2
    assert "data=cifar10 has images of shape [3, 32, 32] in 10 classes" in outcome.stderr
