"""What the launcher has to say to a loop, and wants to hear of it: stop signals, and signs of life."""

from contextlib import AbstractContextManager

from src.heartbeat import Heartbeat
from src.stopping import Agreement, StopRequest
from src.world import World


class Control:
    """Collective: every rank makes one, and calls begin_step and end_step alike.

    timeout_seconds: how long the slowest rank may take for a step. heart: None where nobody watches.
    """

    def __init__(
        self,
        world: World,
        timeout_seconds: float | None = None,
        stop: StopRequest | None = None,
        heart: Heartbeat | None = None,
    ) -> None:
        self.stop = stop or StopRequest()
        self.agreement = Agreement(world, timeout_seconds)
        self.heart = heart

    def deferred(self) -> AbstractContextManager[None]:
        """Around the loop: a stop signal waits for the end of a step."""
        return self.stop.deferred()

    def begin_step(self) -> None:
        self.agreement.begin(self.stop)

    def end_step(self, is_last: bool) -> int | None:
        """The signal that all ranks stop for after this step; None: go on.

        is_last: of the run, after which nobody would ask again whether one came since the step began.
        """
        self.beat()
        number = self.agreement.end()
        return self.agreement.settle(self.stop) if number is None and is_last else number

    def beat(self) -> None:
        """There is progress."""
        if self.heart is not None:
            self.heart.beat()

    def rest(self) -> None:
        """Before what may take long without a sign of it."""
        if self.heart is not None:
            self.heart.rest()
