"""Data sets of one's own through DataLoader: the same batches, the same draws, and no process left behind."""

import os
import random

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import TensorDataset

from src.batch import BatchPlan, BatchSizes
from src.data import loader
from src.data.base import ArraySource
from src.data.loader import LoaderSource, MapData, default_workers, pair
from src.errors import Refused
from tests.command import QUICK, metrics, summary, train
from tests.command_server import serve
from tests.data.doubles import Broken, Points, Stream, WorkerSeeds
from tests.data.fetching import CPU, fetch

OWN = ["data._target_=src.data.loader.MapData", "data.image_shape=[1,1,3]", "data.num_classes=3", "model=mlp"]
POINTS = ["+data.train={_target_:tests.data.doubles.Points,num_samples:20}", *OWN]


def epoch_requests(num_samples, sizes, data_rank=0):
    plan = BatchPlan(num_samples, sizes.global_batch_size, seed=0)
    return [request for batch in plan.epoch(0) for request in batch.requests(sizes, data_rank)]


def loaded(dataset, num_workers=0, seed=0, data_rank=0):
    return LoaderSource(dataset, CPU, seed, data_rank, num_workers)


def workers():
    """Loader processes of this one, by the name that torch gives them."""
    loaders = [child for child in psutil.Process().children() if child.name() == "pt_data_worker"]
    return [loader for loader in loaders if loader.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_map_style_data_set_gives_the_micro_batches_that_arrays_in_memory_give(num_workers):
    inputs, targets = torch.randn(10, 4), torch.arange(10)
    requests = epoch_requests(10, BatchSizes(4, 1, 1))
    expected = list(ArraySource(inputs, targets, CPU).stream(requests, 0))
    got = list(loaded(TensorDataset(inputs, targets), num_workers).stream(requests, 0))
    assert len(got) == 3
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.targets, other.targets), "padding masked"


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_what_a_sample_draws_does_not_depend_on_workers_split_or_order(num_workers):
    ids = [3, 8, 1, 8, 5]
    whole = fetch(loaded(Points(10), num_workers, data_rank=1), ids, epoch=2).inputs
    single = torch.cat([fetch(loaded(Points(10)), [i], epoch=2).inputs for i in ids])
    assert torch.equal(whole, single)
    assert not torch.equal(whole, fetch(loaded(Points(10)), ids, epoch=3).inputs)
    assert not torch.equal(whole, fetch(loaded(Points(10), seed=1), ids, epoch=2).inputs)


def test_fetching_in_the_training_process_leaves_its_random_numbers_alone():
    def drawn():
        return torch.rand(()).item(), np.random.rand(), random.random()

    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    expected = [drawn(), drawn()]
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    first = drawn()
    fetch(loaded(Points(10)), [1, 2, 3])
    assert [first, drawn()] == expected


def worker_seeds(seed, data_rank):
    batches = loaded(WorkerSeeds(), 2, seed, data_rank).stream(epoch_requests(64, BatchSizes(4, 1, 1)), epoch=0)
    return {int(row[0]) for batch in batches for row in batch.inputs}


def test_workers_of_all_ranks_have_different_seeds_and_the_same_ones_in_every_run():
    seeds = [worker_seeds(0, rank) for rank in (0, 1)]
    assert len(seeds[0] | seeds[1]) == 4, "two ranks of two workers"
    assert worker_seeds(0, 0) == seeds[0]
    assert not worker_seeds(1, 0) & seeds[0]


def test_workers_end_with_the_epoch():
    list(loaded(Points(10), 2).stream(epoch_requests(10, BatchSizes(2, 1, 1)), 0))
    assert not workers()


def test_workers_end_when_the_loop_stops_in_the_middle():
    stream = loaded(Points(10), 2).stream(epoch_requests(10, BatchSizes(2, 1, 1)), 0)
    next(stream)
    assert len(workers()) == 2
    stream.close()
    assert not workers()


def test_workers_end_when_the_loop_fails():
    def loop():
        for _ in loaded(Points(10), 2).stream(epoch_requests(10, BatchSizes(2, 1, 1)), 0):
            raise ZeroDivisionError("in the step")

    with pytest.raises(ZeroDivisionError):
        loop()
    assert not workers()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sample_that_can_not_be_read_fails_with_its_own_error(num_workers):
    with pytest.raises(ValueError, match="sample 5 is unreadable"):
        list(loaded(Broken(10), num_workers).stream(epoch_requests(10, BatchSizes(2, 1, 1)), 0))
    assert not workers()


def test_samples_that_are_no_pair_fail_with_what_they_must_be():
    with pytest.raises(ValueError, match=r"must return \(input, target\)"):
        fetch(loaded(TensorDataset(torch.zeros(3, 2))), [0, 1])


def test_masked_targets_are_left_to_the_trainer_to_count():
    source = loaded(Points(6, masked=True))
    assert source.targets_per_sample is None
    assert fetch(source, range(6)).targets.tolist() == [0, -100, 2, -100, 1, -100]


def test_an_iterable_data_set_is_refused_with_the_reason():
    with pytest.raises(Refused, match=r"data\.train is an IterableDataset: it has no length"):
        MapData(Stream(), Points(3)).prepare()


@pytest.mark.parametrize(
    ("dataset", "words"), [(Points(0), r"data\.test \(Points\) is empty"), ({"_target": "x"}, "no map-style Dataset")]
)
def test_what_holds_no_samples_is_refused(dataset, words):
    with pytest.raises(Refused, match=words):
        MapData(Points(3), dataset).prepare()


def test_limit_keeps_the_first_training_samples():
    train_source, test_source = MapData(Points(9), Points(5), limit=4).load(CPU, seed=0)
    assert (train_source.num_samples, test_source.num_samples) == (4, 5)
    assert fetch(train_source, [0, 3]).targets.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("cores", "local_size", "expected"),
    # A rank's share less its own core: 2 / 2 - 1, 16 / 4 - 1, 128 / 8 - 1 capped, and never below none.
    [(2, 2, 0), (16, 4, 3), (128, 8, 8), (2, 3, 0), (4, 1, 3)],
)
def test_workers_are_as_many_as_the_cores_leave_free(monkeypatch, cores, local_size, expected):
    monkeypatch.setattr(loader, "num_cores", lambda: cores)
    assert default_workers(local_size) == expected


def test_a_data_set_of_ones_own_trains_from_the_command_line(tmp_path):
    test_set = "+data.test={_target_:tests.data.doubles.Points,num_samples:7,masked:true}"
    outcome = train(tmp_path, *QUICK, *POINTS, test_set, "data.num_workers=2", "trainer.micro_batch_size=3")
    assert outcome.code == 0, outcome.text
    # Of 7 test samples, those of ids 0, 2, 4, 6 count; accuracy is a number of quarters.
    assert summary(outcome.run_dir())["eval"]["accuracy"] in (0.0, 0.25, 0.5, 0.75, 1.0)
    assert [record["samples"] for record in metrics(outcome.run_dir())] == [6, 12]


def test_fewer_samples_than_ranks_are_padded(tmp_path):
    sets = [f"+data.{key}={{_target_:tests.data.doubles.Points,num_samples:1}}" for key in ("train", "test")]
    outcome = train(tmp_path, *QUICK, "launch.nproc=3", *OWN, *sets, "trainer.micro_batch_size=2")
    assert outcome.code == 0, outcome.text
    assert [record["samples"] for record in metrics(outcome.run_dir())] == [1, 2], "one sample an epoch"
    assert summary(outcome.run_dir())["eval"]["samples"] == 1


def test_an_empty_data_set_is_refused_before_the_start(tmp_path):
    test_set = "+data.test={_target_:tests.data.doubles.Points,num_samples:0}"
    outcome = serve(tmp_path, *POINTS, test_set)
    assert outcome.code == 2
    assert outcome.problems == ["data.test (Points) is empty. Give it at least one sample."]


def test_no_worker_outlives_a_run_that_fails(tmp_path):
    sets = [f"+data.{key}={{_target_:tests.data.doubles.Broken,num_samples:9}}" for key in ("train", "test")]
    outcome = train(
        tmp_path, *QUICK, *OWN, *sets, "data.num_workers=2", "trainer.micro_batch_size=1", "trainer.epochs=1"
    )
    assert outcome.code == 1
    assert "sample 5 is unreadable" in outcome.stderr
    left = [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(tmp_path) and p.pid != os.getpid()]
    assert not left


def test_targets_that_are_no_classes_are_an_error_not_cut_to_one():
    with pytest.raises(ValueError, match="are no classes: the loss is cross-entropy"):
        pair([torch.zeros(2, 4), torch.tensor([0.7, 1.0])])
