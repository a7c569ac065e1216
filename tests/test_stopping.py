"""A stop request waits for the step that all ranks agree on; a second one does not."""

import os
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

from src.errors import Interrupted
from src.launch.signals import interrupts
from src.stopping import ASKING_SECONDS, MOST_STEPS_BETWEEN, SECOND_WISH_SECONDS, Agreement, StopRequest
from src.world import World
from tests.workers import Pool

SECOND_WISH = SECOND_WISH_SECONDS + 0.1


def tell(*numbers: int) -> None:
    """The signals to this process, one after the other. Python's handler has run when this returns."""
    for number in numbers:
        os.kill(os.getpid(), number)
        time.sleep(0.01)


def deferring(block: Callable[[StopRequest], None]) -> tuple[StopRequest, Interrupted]:
    """`block` while stop signals are deferred: the request, and how that ended."""
    with pytest.raises(Interrupted) as caught, interrupts() as stop, stop.deferred():
        block(stop)
    return stop, caught.value


def test_the_first_signal_waits_for_the_end_of_the_block() -> None:
    done = []

    def step(stop: StopRequest) -> None:
        tell(signal.SIGTERM)
        done.append(stop.signal_number)

    _, interrupted = deferring(step)
    assert done == [signal.SIGTERM]
    assert interrupted.exit_code == 143


def told_outside(enter_before: bool) -> None:
    with interrupts() as stop:
        if enter_before:
            with stop.deferred():
                pass
        tell(signal.SIGTERM)
        pytest.fail("not reached")


def test_before_and_after_the_block_a_signal_is_obeyed_at_once() -> None:
    for enter_before in (False, True):
        with pytest.raises(Interrupted):
            told_outside(enter_before)


def test_one_wish_said_twice_in_a_moment_counts_once() -> None:
    done = []

    def step(stop: StopRequest) -> None:
        tell(signal.SIGINT, signal.SIGINT, signal.SIGTERM)
        done.append("the step")

    stop, _ = deferring(step)
    assert done == ["the step"]
    assert stop.signal_number == signal.SIGINT


def test_a_second_wish_is_obeyed_at_once_under_the_firsts_name() -> None:
    def step(stop: StopRequest) -> None:
        tell(signal.SIGTERM)
        time.sleep(SECOND_WISH)
        tell(signal.SIGINT)
        pytest.fail("not reached")

    _, interrupted = deferring(step)
    assert interrupted.signal_number == signal.SIGTERM


def test_a_signal_counts_from_when_it_came_and_not_from_when_python_was_free() -> None:
    # Said again 0.1 s later, when the main thread is in C code for longer than a second wish takes.
    started = time.monotonic()
    sum(range(3_000_000))
    terms_a_second = 3_000_000 / (time.monotonic() - started)
    done = []

    def step(stop: StopRequest) -> None:
        tell(signal.SIGINT)
        with subprocess.Popen(["sh", "-c", f"sleep 0.1; kill -TERM {os.getpid()}"]):
            sum(range(int(terms_a_second * (SECOND_WISH + 1))))
            done.append("the step")

    deferring(step)
    assert done == ["the step"]


def fail_while_deferring(stop: StopRequest, *numbers: int) -> None:
    with stop.deferred():
        tell(*numbers)
        raise OSError("full")


def test_an_error_while_a_request_waits_is_the_errors_own() -> None:
    for numbers in ((signal.SIGTERM,), ()):
        with interrupts() as stop:
            with pytest.raises(OSError, match="full"):
                fail_while_deferring(stop, *numbers)
            assert stop.failed_since == bool(numbers)


def test_handlers_and_the_wakeup_file_are_as_before() -> None:
    before = signal.getsignal(signal.SIGTERM), len(os.listdir("/proc/self/fd"))
    deferring(lambda stop: tell(signal.SIGTERM))
    assert (signal.getsignal(signal.SIGTERM), len(os.listdir("/proc/self/fd"))) == before
    assert signal.set_wakeup_fd(-1) == -1


def steps_until_agreed(
    world: World, told: dict[int, tuple[int, int]], step_seconds: float = ASKING_SECONDS
) -> tuple[int, int, bool]:
    """Step until all agree to stop: the step, the signal, and whether this rank's request says so.

    told: world rank -> (in which step it gets a signal, which).
    """
    agreement = Agreement(world)
    with interrupts() as stop:
        try:
            with stop.deferred():
                for step in range(1, 1000):
                    agreement.begin(stop)
                    at, number = told.get(world.world_rank, (0, 0))
                    if step == at:
                        tell(number)
                    time.sleep(step_seconds)
                    agreed = agreement.end()
                    if agreed is not None:
                        raise Interrupted(agreed)
        except Interrupted as interrupted:
            return step, interrupted.signal_number, stop.is_agreed
    raise AssertionError("nobody stopped")


def test_all_ranks_stop_after_the_same_step_whoever_was_told(pool: Pool) -> None:
    # Told in step 3, after its begin: all know at the end of step 4.
    assert pool.run(2, steps_until_agreed, {1: (3, signal.SIGUSR1)}) == [(4, signal.SIGUSR1, True)] * 2
    assert pool.run(2, steps_until_agreed, {0: (3, signal.SIGTERM)}) == [(4, signal.SIGTERM, True)] * 2


def test_ranks_that_were_told_different_things_agree_on_one(pool: Pool) -> None:
    told = {0: (3, signal.SIGINT), 1: (3, signal.SIGTERM)}
    assert pool.run(2, steps_until_agreed, told) == [(4, max(signal.SIGINT, signal.SIGTERM), True)] * 2


def test_ranks_of_short_steps_stop_together_within_the_most_steps_between(pool: Pool) -> None:
    [one, other] = pool.run(2, steps_until_agreed, {1: (200, signal.SIGTERM)}, 0.0)
    assert one == other
    assert 200 < one[0] <= 200 + MOST_STEPS_BETWEEN


def steps_that_ask(world: World, step_seconds: float, steps: int) -> int:
    agreement, stop, asked = Agreement(world), StopRequest(), 0
    for _ in range(steps):
        agreement.begin(stop)
        asked += agreement.work is not None
        time.sleep(step_seconds)
        assert agreement.end() is None
    return asked


def test_short_steps_seldom_ask_and_long_ones_always(pool: Pool) -> None:
    # At least 5 ms a step: once in at most 50 / 5 = 10, after the first two, which find out.
    [asked, same] = pool.run(2, steps_that_ask, 0.005, 100)
    assert asked == same
    assert 1 + 100 // MOST_STEPS_BETWEEN <= asked < 50
    assert pool.run(2, steps_that_ask, ASKING_SECONDS, 5) == [5, 5]


def settle_after_the_last_step(world: World) -> tuple[int | None, int | None]:
    agreement, stop = Agreement(world), StopRequest()
    for _ in range(20):  # short ones, so that it would not be time to ask
        agreement.begin(stop)
        agreement.end()
    before = agreement.settle(stop)
    stop.signal_number = signal.SIGTERM if world.world_rank == 1 else None
    return before, agreement.settle(stop)


def test_after_the_last_step_ranks_can_ask_once_more(pool: Pool) -> None:
    assert pool.run(2, settle_after_the_last_step) == [(None, signal.SIGTERM)] * 2


def test_a_lone_rank_stops_after_the_step_in_which_it_was_told() -> None:
    assert steps_until_agreed(World(), {0: (2, signal.SIGTERM)}, 0.0) == (2, signal.SIGTERM, True)


def test_nobody_stops_whom_nobody_told() -> None:
    agreement = Agreement(World())
    with interrupts() as stop:
        agreement.begin(stop)
        assert agreement.end() is None


@pytest.mark.parametrize(("seconds", "is_told"), [(0.0, True), (0.8, True), (0.8, False)])
def test_who_asks_is_told_what_is_waited_for_if_it_takes_a_while(
    seconds: float, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def be_asked() -> None:
        request = StopRequest()
        with request.deferred(is_told):
            assert not request.receive(signal.SIGTERM)
            time.sleep(seconds)

    with caplog.at_level("INFO"), pytest.raises(Interrupted):
        be_asked()
    said = "SIGTERM: finishing this step, then saving; a second one stops at once" in caplog.text
    assert said is (seconds > 0 and is_told)
