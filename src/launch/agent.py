"""torch's elastic agent with a closer eye on its ranks: who was gone first, and who left without finishing.

Importing it costs time that a run in place does not need, so `src/launch/parent.py` does so only when it starts ranks.
"""

import os
import signal
import time
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.launcher.api import LaunchConfig

from src.launch.failures import Death

#: Seconds in which the other ranks may close their files and trackers after one has failed; then they are killed.
FAILURE_GRACE_SECONDS = 8
#: The same after a signal to the parent, when there may be something to save. Schedulers give 30 s or more.
SIGNAL_GRACE_SECONDS = 25


class Agent(LocalElasticAgent):
    """Starts ranks and watches them until all are done or one is gone. deaths: who was gone when that was noticed."""

    def __init__(self, config: LaunchConfig, entrypoint: Any, arguments: tuple[Any, ...]) -> None:
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
        super().__init__(spec, config.logs_specs, config.start_method, shutdown_timeout=SIGNAL_GRACE_SECONDS)
        self.deaths: list[Death] = []
        self.last_look = time.time()

    def succeeds(self) -> bool:
        """Start the ranks and wait for their end. False: one failed, and all are gone. Raises SignalException."""
        try:
            return not self.run().is_failed()
        finally:
            self.rendezvous.shutdown()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Called about ten times a second. Ranks that are done wait to be told to leave, so whoever is gone has failed.

        torch's own check waits for ever for the result of a rank that left with exit code 0 in the middle.
        """
        now = time.time()
        for worker in worker_group.workers:
            code = exit_code(worker.id)
            if code is not None:
                self.deaths.append(Death(worker.global_rank, code, self.last_look, now))
        self.last_look = now
        if self.deaths:
            return RunResult(state=WorkerState.FAILED)
        result: RunResult = super()._monitor_workers(worker_group)
        for world_rank, failure in result.failures.items():  # one that died since a line ago
            self.deaths.append(Death(world_rank, failure.exitcode, now, time.time()))
        return result

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown(timeout=FAILURE_GRACE_SECONDS)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = FAILURE_GRACE_SECONDS) -> None:
        try:
            super()._shutdown(death_sig, timeout)
        except SignalException:  # a second Ctrl-C, from somebody who will not wait
            super()._shutdown(signal.SIGKILL, timeout)
            raise


def exit_code(pid: int) -> int | None:
    """How a child ended, negative for a signal, None while it runs. Leaves it for its owner to wait for."""
    try:
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0  # waited for already; the owner, who looks only at bad exits, had no complaint
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
