"""Facts of real ranks, gathered over a real process group."""

import builtins
import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from src.doctor.examination import PACKAGES, inspect_run, inspect_wandb, sums_right, versions
from src.doctor.facts import Facts, Wandb
from src.world import World
from tests.workers import Pool


def look(world: World, folder: str) -> Facts | None:
    return inspect_run(world, Path(folder), {"no-such-package": "strategy=x"}, Wandb(is_installed=True))


def test_rank_zero_gathers_what_each_rank_says_of_itself(pool: Pool, tmp_path: Path) -> None:
    first, *others = pool.run(3, look, str(tmp_path))
    assert others == [None, None]
    assert [(rank.world_rank, rank.local_rank, rank.world_size, rank.device) for rank in first.ranks] == [
        (0, 0, 3, "cpu"),
        (1, 1, 3, "cpu"),
        (2, 2, 3, "cpu"),
    ]
    assert all(rank.sums_right == {"gloo": True} for rank in first.ranks)
    assert len(first.hosts) == 1
    assert first.ranks[2].versions["no-such-package"] is None
    assert first.backends["gloo"] is True


def sum_with_a_liar(world: World) -> dict[str, bool]:
    real = dist.all_reduce

    def lying(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        done = real(tensor, *arguments, **options)
        if world.world_rank == 1:
            tensor[3] += 1
        return done

    dist.all_reduce = lying
    try:
        return sums_right(world)
    finally:
        dist.all_reduce = real


def test_a_wrong_sum_is_seen_on_the_rank_that_got_it(pool: Pool) -> None:
    assert pool.run(2, sum_with_a_liar) == [{"gloo": True}, {"gloo": False}]


def test_packages_that_are_not_installed_have_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    found = versions()
    assert [name for name in PACKAGES if found[name] is not None] == ["torch"]  # which runs, and says so itself
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))


def test_without_the_package_wandb_there_is_nothing_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def importing(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "wandb" or name.startswith(("wandb.", "src.tracking.wandb_client")):
            raise ModuleNotFoundError("No module named 'wandb'", name="wandb")
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", importing)
    assert inspect_wandb() == Wandb(is_installed=False)
