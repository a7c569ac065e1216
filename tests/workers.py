"""Started ranks that tests share: importing torch costs seconds, so each world is started once a session.

A worker joins a gloo process group of its size and then runs the functions that tests send it.
"""

import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

PRELOAD = ["tests.workers", "torch", "torch._dynamo", "src.run", "src.tasks.train", "torch.distributed.fsdp"]


#: Process groups that a rank may hold before its world is started anew. Each of gloo's has threads that wake up a
#: hundred times a second, and what a run makes (a mesh's axes) stays: after some hundred runs little else got done.
MAX_GROUPS = 12


class RankError(AssertionError):
    """A rank raised; the message holds its traceback."""


class World:
    """`size` worker processes in one process group."""

    def __init__(self, size: int) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.folder = tempfile.TemporaryDirectory(prefix="shardlab-test-")
        self.pipes: list[Connection] = []
        self.processes = []
        self.num_groups = 1  # of the rank that holds most
        for world_rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, world_rank, size, self.folder.name), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout_seconds: float) -> list[Any]:
        """function(world, *args) on every rank; the results by rank. Raises RankError with the first traceback."""
        for pipe in self.pipes:
            pipe.send((function, args))
        results: dict[int, Any] = {}
        while len(results) < len(self.pipes):
            waiting = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in results}
            ready = wait(list(waiting), timeout=timeout_seconds)
            if not ready:
                raise RankError(f"ranks {sorted(waiting.values())} gave no answer in {timeout_seconds} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    ok, value, num_groups = pipe.recv()
                except EOFError as error:
                    raise RankError(f"rank {waiting[pipe]} died without a word") from error
                if not ok:
                    raise RankError(f"rank {waiting[pipe]}:\n{value}")
                results[waiting[pipe]] = value
                self.num_groups = max(self.num_groups, num_groups)
        return [results[rank] for rank in range(len(self.pipes))]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


def serve(pipe: Connection, world_rank: int, size: int, folder: str) -> None:
    """A worker's life: join the group, then run what comes down the pipe until it closes."""
    import torch
    import torch.distributed as dist

    from src.world import World as RunWorld

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a run tells its user
    torch.set_num_threads(1)
    # What torchrun would set, all on this machine; DeepSpeed reads LOCAL_SIZE. Nobody meets at the address.
    place = {"RANK": world_rank, "LOCAL_RANK": world_rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(number) for name, number in place.items()})
    os.environ.update(LOCAL_SIZE=str(size), MASTER_ADDR="localhost", MASTER_PORT="29500")
    world = RunWorld(world_rank, size, world_rank, size, torch.device("cpu"))
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=world_rank, world_size=size)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            ok, value = True, function(world, *args)
        except BaseException:  # reported, with its traceback, to the test that asked
            ok, value = False, traceback.format_exc()
        pipe.send((ok, value, dist.get_pg_count()))


class Pool:
    """Worlds by size, started when first asked for, and anew after a failure, since peers may hang in a collective."""

    def __init__(self) -> None:
        self.worlds: dict[int, World] = {}

    def run(self, size: int, function: Callable[..., Any], *args: Any, timeout_seconds: float = 120) -> list[Any]:
        """function(world, *args) on `size` ranks, function a module-level one. Returns the results by rank."""
        if size not in self.worlds:
            self.worlds[size] = World(size)
        world = self.worlds[size]
        try:
            results = world.run(function, args, timeout_seconds)
        except RankError:
            self.worlds.pop(size).close()
            raise
        if world.num_groups > MAX_GROUPS:
            self.worlds.pop(size).close()
        return results

    def close(self) -> None:
        for world in self.worlds.values():
            world.close()
