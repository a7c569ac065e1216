"""The checkpoints that a run writes, at once or while training goes on."""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as save_parts

from src.checkpoint.failures import CheckpointFailed
from src.checkpoint.loading import reasons
from src.checkpoint.planner import HostBuffers, Planner
from src.checkpoint.shelf import Shelf
from src.checkpoint.whole import newest_whole
from src.checkpoint.writer import Writer
from src.errors import in_words


class Store:
    """Writes the checkpoints of one run into `folder`, which all hosts share.

    Collective: every rank of the default process group makes one, and calls its methods in the same order.
    run, keep: as in `shelf.Shelf`. timeout_seconds: how long a rank waits for the slowest rank's files. group: of
    gloo, for nothing else; None: one that it makes, and gives up at the end.

    Saving has a process group of its own (gloo, for any device), so that it can go on beside training's collectives,
    and a thread of its own even when nothing goes on meanwhile: a signal's exception would otherwise strike in the
    middle of a collective, and be taken for this rank's failure to write.
    """

    def __init__(
        self,
        folder: Path,
        run: str,
        keep: int | None = None,
        timeout_seconds: float = 1800.0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.shelf = Shelf(folder, run, keep)
        self.owns_group = group is None
        self.group = saving_group(timedelta(seconds=timeout_seconds)) if group is None else group
        self.buffers = HostBuffers()
        self.pending: Future[None] | None = None
        self._on_rank_0(self.shelf.remove_leftovers)

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        state: dict[str, Any],
        *,
        best: bool = False,
        asynchronous: bool = False,
    ) -> None:
        """Write the checkpoint of `step`, publish it, point `last` (and `best`) to it, remove those beyond `keep`.

        tensors: by the bare model's names. A DTensor is written in parts, each by a rank that holds it; a plain tensor,
        taken to be equal on all ranks that give its name, once. Ranks may give different names.
        state: plain values (`manifest.plain`); rank 0's are written.
        asynchronous: return when the values of now are copied; the rest happens in the background. An error in it is
        raised by the next call, on every rank; only what can't be written at all is refused at once. One save at a
        time: this one waits for the one before.
        Raises CheckpointFailed, on every rank; then the checkpoint before and the pointers are as they were.
        """
        self.wait()
        writer = Writer(self.shelf, step, state, best, self.buffers if asynchronous else None)
        self.pending = in_thread(self._write, dict(tensors), writer)
        if asynchronous:
            wait_for([self.pending, writer.copied], return_when=FIRST_COMPLETED)
        if not writer.copied.done() or not asynchronous:  # not copied: no rank has begun to write
            self.wait()

    def wait(self) -> None:
        """Return when no save is going on. Raises CheckpointFailed, on every rank, if the last one failed."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait for the last save, and give up the process group."""
        self.wait()
        # Not in a `finally`: after an error peers may be gone, and leaving together would wait for them.
        if self.owns_group:
            dist.destroy_process_group(self.group)

    def abandon(self, seconds: float) -> None:
        """Give a save that is going on so many seconds more, whatever comes of it. Not collective."""
        if self.pending is not None:
            wait_for([self.pending], timeout=seconds)

    def _write(self, tensors: dict[str, Any], writer: Writer) -> None:
        try:
            save_parts(tensors, storage_writer=writer, planner=Planner(), process_group=self.group)
        except CheckpointException as error:
            # Every rank has finished or given up by now: nobody writes into the folder any more.
            reason = reasons(error)
            if writer.is_coordinator:
                reason += self._abandon()
            raise self._failed(writer.step, reason) from error
        except RuntimeError as error:  # the process group's: a rank is gone, or too slow
            raise self._failed(writer.step, in_words(error)) from error

    def _abandon(self) -> str:
        """Remove what a failed save left. Returns what is to be said of it."""
        try:
            self.shelf.remove_leftovers()
        except OSError as error:
            return f"; and what it left can't be removed: {error}"
        return ""

    def _failed(self, step: int, reason: str) -> CheckpointFailed:
        left, _ = newest_whole(self.shelf.folder, contents=False)
        there = f"The last whole one there is {left.name}." if left else "There is no whole one yet."
        return CheckpointFailed(
            f"The checkpoint of step {step} was not written to {self.shelf.folder}: {reason.rstrip('.')}. {there}"
        )

    def _on_rank_0(self, function: Callable[[], None]) -> None:
        """Call `function` on rank 0, and raise CheckpointFailed on every rank if it fails there."""
        told = [""]
        if dist.get_rank() == 0:
            try:
                function()
            except OSError as error:
                told = [in_words(error)]
        dist.broadcast_object_list(told, src=0, group=self.group)
        if told[0]:
            raise CheckpointFailed(f"{self.shelf.folder} can't be used for checkpoints: {told[0]}.")


def saving_group(timeout: timedelta) -> dist.ProcessGroup:
    """All ranks, in a gloo group for saving alone. Collective."""
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup), "every rank is a member"
    return group


def in_thread(function: Callable[..., None], *arguments: Any) -> "Future[None]":
    """Call `function` in a thread that does not keep the process alive.

    An executor's would: a failed rank then stays until its peers, which may be gone, have answered the last save.
    """
    future: Future[None] = Future()

    def work() -> None:
        try:
            function(*arguments)
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="checkpoint", daemon=True).start()
    return future
