"""torch's elastic agent with a closer eye on its ranks: who was gone first, and who left without finishing.

Importing it costs time that a run in place does not need, so `src/launch/parent.py` does so only when it starts ranks.
"""

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.launcher.api import LaunchConfig

from src.heartbeat import STACKS_SIGNAL
from src.launch.failures import Death, Failure, first_cause, follows_another, read_records, tells_of_a_hang
from src.launch.rank import REFUSED
from src.launch.signals import stop_signal
from src.stopping import StopRequest

#: Seconds in which the other ranks may close their files and trackers after one has failed; then they are killed.
FAILURE_GRACE_SECONDS = 8
#: The same after a stop signal, from when the first rank has left: they save together, and then leave together.
SIGNAL_GRACE_SECONDS = 25
#: The same for somebody who has sent a second signal.
HURRY_SECONDS = 3
#: After a time-out, how long to wait for the rank that was waited for to say why it did not come.
EXPLANATION_SECONDS = 3


class Agent(LocalElasticAgent):
    """Starts ranks and watches them until all are done or one is gone; starts them again as often as it may.

    request: what the stop signals of this process ask for; they are deferred while this runs. records: the folder
    below which ranks leave their failures. on_restart: called with what the ranks failed of and the restart's number.

    deaths: who was gone when that was noticed. stopped_by: the signal that ends the run, the parent's or a rank's own.
    """

    def __init__(
        self,
        config: LaunchConfig,
        entrypoint: Any,
        arguments: tuple[Any, ...],
        request: StopRequest,
        records: Path,
        on_restart: Callable[[Failure, int], None],
    ) -> None:
        # What torch.distributed.launcher.api.launch_agent does, which has no place to name a subclass.
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = config.signals_to_handle
        parameters = RendezvousParameters(
            backend=config.rdzv_backend,
            endpoint=config.rdzv_endpoint,
            run_id=config.run_id,
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            local_addr=config.local_addr,
            **config.rdzv_configs,
        )
        self.rendezvous = get_rendezvous_handler(parameters)
        spec = WorkerSpec(
            role="ranks",
            local_world_size=config.nproc_per_node,
            entrypoint=entrypoint,
            args=arguments,
            rdzv_handler=self.rendezvous,
            max_restarts=config.max_restarts,
            monitor_interval=config.monitor_interval,
            local_addr=config.local_addr,
            numa_options=config.numa_options,
        )
        assert config.logs_specs is not None
        super().__init__(spec, config.logs_specs, config.start_method, shutdown_timeout=HURRY_SECONDS)
        self.request, self.record_folder, self.on_restart = request, records, on_restart
        self.stopped_by: int | None = None
        self._begin(restarts=0)

    def _begin(self, restarts: int) -> None:
        self.restarts = restarts
        self.deaths: list[Death] = []
        self.mute: list[int] = []
        self.last_look = time.time()

    def succeeds(self) -> bool:
        """Start the ranks and wait for their end. False: one failed or was stopped, and all are gone.

        Raises Interrupted when a second signal comes; all are gone then, too.
        """
        try:
            return not self.run().is_failed()
        finally:
            self.rendezvous.shutdown()

    def cause(self) -> Failure:
        """Why the ranks that were started last did not finish."""
        return first_cause(self.deaths, self.records(), self.mute)

    def records(self) -> list[Failure]:
        """The failures that the ranks that were started last have told of."""
        folders = self.record_folder.glob(f"*/attempt_{self.restarts}")
        return [record for folder in folders for record in read_records(folder)]

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Called about ten times a second. Ranks that are done wait to be told to leave, so whoever is gone has failed.

        torch's own check waits for ever for the result of a rank that left with exit code 0 in the middle.
        """
        self._look(worker_group.workers)
        number = self.request.signal_number or stopping(self.deaths)
        if number is not None:
            return self._stop(worker_group, number)
        if self.deaths:
            return self._failed()
        return self._monitor_the_living(worker_group)

    def _look(self, workers: Iterable[Worker]) -> None:
        """Note who has gone since the last look."""
        now, known = time.time(), {death.world_rank for death in self.deaths}
        for worker in workers:
            if worker.global_rank not in known and (code := exit_code(worker.id)) is not None:
                self.deaths.append(Death(worker.global_rank, code, self.last_look, now))
        self.last_look = now

    def _failed(self) -> RunResult:
        if any(death.exit_code == REFUSED for death in self.deaths):
            self._remaining_restarts = 0  # what can't work once can't work twice
        return RunResult(state=WorkerState.FAILED)

    def _monitor_the_living(self, worker_group: WorkerGroup) -> RunResult:
        """torch's own check, which ends the ranks when all are done."""
        now = time.time()
        result: RunResult = super()._monitor_workers(worker_group)
        for world_rank, failure in result.failures.items():  # one that died since a line ago
            self.deaths.append(Death(world_rank, failure.exitcode, now, time.time()))
        return self._failed() if result.is_failed() else result

    def _stop(self, worker_group: WorkerGroup, number: int) -> RunResult:
        """Hand a stop signal on, once, and wait: a large checkpoint may take minutes, and who can't wait says so."""
        if self.stopped_by is None:
            self.stopped_by = number
            self._remaining_restarts = 0
            for worker in self._alive(worker_group):
                with suppress(ProcessLookupError):
                    os.kill(worker.id, number)
        if not self.deaths:
            return self._monitor_the_living(worker_group)  # the signal may have come when they were done
        first = min(death.noticed for death in self.deaths)
        if self._alive(worker_group) and time.time() - first < SIGNAL_GRACE_SECONDS:
            return RunResult(state=WorkerState.HEALTHY)
        return RunResult(state=WorkerState.FAILED)

    def _alive(self, worker_group: WorkerGroup) -> list[Worker]:
        gone = {death.world_rank for death in self.deaths}
        return [worker for worker in worker_group.workers if worker.global_rank not in gone]

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._stop_workers(worker_group)
        self.on_restart(self.cause(), self.restarts + 1)
        self._begin(self.restarts + 1)
        self._initialize_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        if any(tells_of_a_hang(record.message) for record in self.records()):
            self._ask_for_stacks(worker_group)
        self._shutdown(timeout=FAILURE_GRACE_SECONDS)

    def _ask_for_stacks(self, worker_group: WorkerGroup) -> None:
        """Have the ranks that are left write their stacks, and note who of them has not said why it did not come."""
        end = time.time() + EXPLANATION_SECONDS
        while not self._is_explained(worker_group) and time.time() < end:
            time.sleep(worker_group.spec.monitor_interval)
        records = self.records()
        told = {record.world_rank for record in records}
        all_waited = all(follows_another(record.message) for record in records)
        for worker in self._alive(worker_group):
            with suppress(ProcessLookupError):
                os.kill(worker.id, STACKS_SIGNAL)
            # Where some rank has told of more than of having waited, one without a word is only slow to tell.
            if all_waited and worker.global_rank not in told:
                self.mute.append(worker.global_rank)

    def _is_explained(self, worker_group: WorkerGroup) -> bool:
        """Whether some rank has told of more than of having waited, or all have told."""
        records = self.records()
        return len(records) == len(worker_group.workers) or not all(follows_another(r.message) for r in records)


def stopping(deaths: Iterable[Death]) -> int | None:
    """The stop signal that a rank has left of, though nobody sent it to the parent."""
    return next((number for death in deaths if (number := stop_signal(death.exit_code)) is not None), None)


def exit_code(pid: int) -> int | None:
    """How a child ended, negative for a signal, None while it runs. Leaves it for its owner to wait for."""
    try:
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0  # waited for already; the owner, who looks only at bad exits, had no complaint
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
