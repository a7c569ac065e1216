"""data=mnist: the files, where they may lie, and what is said of ones that are missing or damaged."""

import gzip
import shutil

import pytest
import torch

from src.data.idx import read_idx
from src.data.mnist import FILES, MNIST
from src.errors import Refused
from tests.command_server import serve
from tests.data.doubles import UnreachableMNIST
from tests.data.fetching import CPU, fetch, write_idx, write_small_mnist

SHAPE = {"image_shape": [1, 28, 28], "num_classes": 10}
DOUBLE = "data._target_=tests.data.doubles.UnreachableMNIST"


@pytest.fixture
def small(tmp_path):
    """A folder with the four files, unpacked and small."""
    write_small_mnist(tmp_path)
    return tmp_path


def test_the_real_mnist_has_60000_and_10000_images_of_mean_0_and_deviation_1(mnist_archives):
    data = MNIST(**SHAPE, root=str(mnist_archives))
    data.prepare()
    train_source, test_source = data.load(CPU, seed=0)
    assert (train_source.num_samples, test_source.num_samples) == (60000, 10000)
    batch = fetch(train_source, range(60000))
    assert batch.inputs.shape == (60000, 1, 28, 28)
    assert batch.targets.dtype == torch.int64
    assert batch.targets.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    # 0.1307 and 0.3081 are rounded to four digits: off by at most 0.00005 / 0.3081 = 0.0002.
    assert batch.inputs.mean().item() == pytest.approx(0, abs=2e-4)
    assert batch.inputs.std().item() == pytest.approx(1, abs=2e-4)


def test_the_files_read_like_torchvision_reads_them(mnist_archives, tmp_path):
    from torchvision import datasets

    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in FILES:
        (raw / name).write_bytes(gzip.decompress((mnist_archives / f"{name}.gz").read_bytes()))
    theirs = datasets.MNIST(str(tmp_path), train=False)
    _, test_source = MNIST(**SHAPE, root=str(tmp_path)).load(CPU, seed=0)
    assert torch.equal(test_source.inputs[:, 0], theirs.data)
    assert torch.equal(test_source.targets, theirs.targets)


def test_packed_and_unpacked_files_are_found_flat_and_where_torchvision_puts_them(small, tmp_path):
    images = read_idx(small / "train-images-idx3-ubyte", 3)
    for folder, packed in (("flat_gz", True), ("deep/MNIST/raw", False), ("deep_gz/MNIST/raw", True)):
        (tmp_path / folder).mkdir(parents=True)
        for name in FILES:
            content = (small / name).read_bytes()
            target = tmp_path / folder / (f"{name}.gz" if packed else name)
            target.write_bytes(gzip.compress(content) if packed else content)
        data = UnreachableMNIST(**SHAPE, root=str(tmp_path / folder.split("/")[0]))
        data.prepare()
        assert (data.load(CPU, seed=0)[0].inputs[:, 0].numpy() == images).all()


def test_limit_keeps_the_first_training_samples_and_every_test_sample(small):
    whole, _ = MNIST(**SHAPE, root=str(small)).load(CPU, seed=0)
    limited, test_source = MNIST(**SHAPE, root=str(small), limit=3).load(CPU, seed=0)
    assert (limited.num_samples, test_source.num_samples) == (3, 7)
    assert torch.equal(limited.inputs, whole.inputs[:3])


def test_padding_is_masked_and_the_images_are_still_real_ones(small):
    source, _ = MNIST(**SHAPE, root=str(small)).load(CPU, seed=0)
    batch = fetch(source, [4, 5, 4], num_real=2)
    assert batch.targets.tolist() == [*source.targets[[4, 5]].tolist(), -100]
    assert torch.equal(batch.inputs[2], batch.inputs[0])


def test_files_that_are_missing_and_unreachable_are_refused_with_where_to_place_them(tmp_path):
    outcome = serve(tmp_path, "data=mnist", DOUBLE, "data.root=nowhere/deeper")
    assert outcome.code == 2
    [line] = [line for line in outcome.stderr.splitlines() if "data=mnist" in line]
    assert "nowhere" in line
    assert "no route to host" in line
    assert all(f"{name}.gz" in line for name in FILES)
    assert list(tmp_path.iterdir()) == [], "no folder is left of a download that failed"


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_refused_by_name(small, name, packed):
    file = small / name
    if packed:
        file = small / f"{name}.gz"
        file.write_bytes(gzip.compress((small / name).read_bytes()))
        (small / name).unlink()
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(Refused, match=f"{name}.* is not whole"):
        MNIST(**SHAPE, root=str(small)).prepare()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "begins with nothing, not 00000803"),
        (b"<html>404", "begins with 3c68746d, not 00000803"),
        (b"\0\0\x08\x03\0", "begins with 00000803"),
    ],
)
def test_a_file_that_is_no_idx_file_is_refused_by_name(small, content, words):
    (small / "train-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(Refused, match=f"train-images-idx3-ubyte {words}"):
        MNIST(**SHAPE, root=str(small)).prepare()


def test_a_file_that_only_says_it_is_gzipped_is_refused_by_name(small):
    shutil.move(small / "t10k-labels-idx1-ubyte", small / "t10k-labels-idx1-ubyte.gz")
    with pytest.raises(Refused, match=r"t10k-labels-idx1-ubyte\.gz is damaged"):
        MNIST(**SHAPE, root=str(small)).prepare()


def test_an_archive_that_is_damaged_in_the_middle_is_refused_by_name_when_it_is_read(small):
    name = "train-images-idx3-ubyte"
    packed = bytearray(gzip.compress((small / name).read_bytes()))
    packed[len(packed) // 2] ^= 0xFF
    (small / f"{name}.gz").write_bytes(packed)
    (small / name).unlink()
    with pytest.raises(Refused, match=rf"{name}\.gz is (damaged|not whole)"):
        MNIST(**SHAPE, root=str(small)).load(CPU, seed=0)


def test_images_and_labels_of_different_number_are_refused(small):
    write_idx(small / "t10k-labels-idx1-ubyte", read_idx(small / "t10k-labels-idx1-ubyte", 1)[:6])
    with pytest.raises(Refused, match="7 t10k images and 6 labels"):
        MNIST(**SHAPE, root=str(small)).prepare()


def test_images_of_another_size_are_refused(small):
    write_idx(small / "train-images-idx3-ubyte", read_idx(small / "train-images-idx3-ubyte", 3)[:, :14])
    with pytest.raises(Refused, match="14x28"):
        MNIST(**SHAPE, root=str(small)).prepare()


def test_another_shape_in_the_configuration_is_refused_before_the_start(tmp_path):
    outcome = serve(tmp_path, "data=mnist", "data.image_shape=[3,28,28]")
    assert outcome.code == 2
    assert "data=mnist has images of shape [1, 28, 28]" in outcome.stderr


def test_no_rank_imports_torchvision_to_read_mnist(small):
    import subprocess
    import sys

    from tests.command import REPOSITORY

    script = f"""
import sys, torch
from src.data.mnist import MNIST
data = MNIST([1, 28, 28], 10, root={str(small)!r})
data.prepare(), data.load(torch.device("cpu"), 0)
assert "torchvision" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, check=True)
