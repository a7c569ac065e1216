"""A rank fails: all end within seconds, exit code 1, and the last lines name who failed first, of what, and its log."""

import json
import os
import signal
from pathlib import Path

import pytest

from src.errors import in_words
from src.launch.failures import Death, Failure, first_cause, how_it_ended, read_records, record_failure
from tests.command import QUICK, metrics, summary
from tests.command_server import Served, serve
from tests.processes import survivors

STEPS = [*QUICK, "trainer.max_steps=3"]
DOUBLE = "data._target_=tests.doubles.MisbehavingDigits"
LOST = "RuntimeError: [pair.cc:561] Connection closed by peer [127.0.0.1]:4242"


def record(world_rank: int, message: str, time: float) -> Failure:
    return Failure(world_rank, message, time)


def death(world_rank: int, exit_code: int, last_seen: float) -> Death:
    return Death(world_rank, exit_code, last_seen, last_seen + 0.1)


def test_of_two_records_the_earlier_is_the_cause() -> None:
    records = [record(0, "ValueError: late", 2.0), record(1, "ValueError: early", 1.0)]
    assert first_cause([death(0, 1, 2.0)], records).message == "ValueError: early"


def test_a_lost_peer_is_never_the_cause_while_another_reason_is_known() -> None:
    records = [record(0, LOST, 1.0), record(1, "ValueError: slow to say so", 1.5)]
    assert first_cause([death(0, 1, 1.0)], records).world_rank == 1


def test_where_all_lost_a_peer_the_first_to_notice_is_named() -> None:
    assert first_cause([death(0, 1, 1.0)], [record(0, LOST, 1.2), record(1, LOST, 1.1)]).world_rank == 1


def test_a_silent_death_is_the_cause_of_the_records_after_it() -> None:
    # Rank 1 was killed between 1.0 and 1.1; rank 0 noticed at 1.05 and was noticed by the agent in the same look.
    cause = first_cause([death(0, 1, 1.0), death(1, -signal.SIGKILL, 1.0)], [record(0, LOST, 1.05)])
    assert cause.world_rank == 1
    assert cause.message == "killed by SIGKILL (often the system, out of memory)"


def test_a_record_from_before_a_silent_death_is_its_cause() -> None:
    cause = first_cause([death(0, -signal.SIGSEGV, 1.0)], [record(1, "ValueError: first", 0.9)])
    assert cause.message == "ValueError: first"


def test_a_rank_that_waited_in_vain_is_never_the_cause_while_another_hung() -> None:
    waited = record(0, "Hung: no progress for 5 s, waiting for another rank in wait (work.py:7)", 1.0)
    hung = record(1, "Hung: no progress for 5 s, in read (files.py:3)", 1.1)
    assert first_cause([death(0, 1, 1.0)], [waited, hung]).world_rank == 1


def test_a_rank_that_others_waited_for_in_vain_and_that_says_nothing_is_the_cause() -> None:
    waited = record(0, "RuntimeError: [unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation", 1.0)
    cause = first_cause([death(0, 1, 1.0)], [waited], mute=[1])
    assert (cause.world_rank, cause.message) == (1, "Hung: the others waited for it in vain")


def test_an_abort_is_a_victims_where_another_reason_is_known() -> None:
    # NCCL's watchdog aborts a rank that lost its peers.
    deaths = [death(0, -signal.SIGABRT, 1.0), death(1, 1, 1.0)]
    assert first_cause(deaths, [record(1, "ValueError: why", 1.05)]).world_rank == 1


def test_an_abort_is_the_cause_where_the_others_only_lost_a_peer() -> None:
    cause = first_cause([death(1, -signal.SIGABRT, 1.0)], [record(0, LOST, 1.05)])
    assert cause.message == "killed by SIGABRT"


def test_exit_codes_are_put_in_words() -> None:
    assert how_it_ended(0) == "left with exit code 0 before the run was over"
    assert how_it_ended(3) == "left with exit code 3 and no message"
    assert how_it_ended(143) == "stopped by SIGTERM"
    assert how_it_ended(-signal.SIGSEGV) == "killed by SIGSEGV"
    assert how_it_ended(255) == "left with exit code 255 and no message"


def test_exceptions_are_put_in_one_line() -> None:
    assert in_words(ValueError("a\nb")) == "ValueError: a"
    assert in_words(KeyError()) == "KeyError"
    assert in_words(SystemExit(0)) == "left by sys.exit(0) in the middle of the run"
    assert len(in_words(ValueError("x" * 10_000))) < 600


def test_a_record_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "attempt_0" / "1" / "error.json"))
    try:
        raise ValueError("boom")
    except ValueError as error:
        written = record_failure(error, world_rank=5)
    assert read_records(tmp_path) == [written]
    assert "ValueError: boom" in written.details
    assert "Traceback" in written.details


def test_a_record_of_elastics_own_is_understood(tmp_path: Path) -> None:
    file = tmp_path / "attempt_0" / "1" / "error.json"
    file.parent.mkdir(parents=True)
    extra = {"py_callstack": "Traceback ...", "timestamp": "17"}
    file.write_text(json.dumps({"message": {"message": "OSError: no", "extraInfo": extra}}))
    assert read_records(tmp_path) == [Failure(1, "OSError: no", 17.0, "Traceback ...")]


#: what a rank does in its second step -> (on which, how that is told)
WAYS_TO_FAIL = {
    "raise": (1, "ValueError: boom"),
    "SIGKILL": (1, "killed by SIGKILL (often the system, out of memory)"),
    "SIGSEGV": (1, "killed by SIGSEGV"),
    "abort": (1, "killed by SIGABRT"),
    "sys_exit": (1, "left by sys.exit(0) in the middle of the run"),
    "os_exit_0": (0, "left with exit code 0 before the run was over"),
    "os_exit_3": (0, "left with exit code 3 and no message"),
}


def assert_failed(outcome: Served, world_rank: int, message: str) -> Path:
    """The contract of a failed run; returns its folder."""
    run_dir = outcome.run_dir()
    assert outcome.code == 1, outcome.text
    assert outcome.stderr.splitlines()[-2:] == [
        f"shardlab: rank {world_rank} failed: {message}",
        f"  its log: {run_dir / f'rank_{world_rank}.log'}",
    ]
    found = summary(run_dir)
    assert (found["status"], found["error"]) == ("failed", f"rank {world_rank}: {message}")
    assert f"rank {world_rank} failed: {message}" in (run_dir / "train.log").read_text().splitlines()[-2]
    assert "closed by peer" not in outcome.text  # a victim's words
    assert outcome.ended_at - (run_dir / "metrics.jsonl").stat().st_mtime < 10  # since the last step before it
    assert survivors(outcome.session) == []
    return run_dir


@pytest.mark.parametrize("what", WAYS_TO_FAIL)
def test_a_rank_that_fails_ends_all_and_is_named(what: str, tmp_path: Path) -> None:
    world_rank, message = WAYS_TO_FAIL[what]
    outcome = serve(tmp_path, *STEPS, DOUBLE, f"+data.what={what}", f"+data.on_rank={world_rank}")
    run_dir = assert_failed(outcome, world_rank, message)
    assert [line["step"] for line in metrics(run_dir)] == [1]  # what was measured before is there
    log = (run_dir / f"rank_{world_rank}.log").read_text()
    if what in ("raise", "sys_exit"):
        assert "Traceback" in log
        assert outcome.stderr.count("Traceback") == 1  # the cause's, and nobody else's
        assert "tests/doubles.py" in outcome.stderr
    if what in ("SIGSEGV", "abort"):
        assert "tests/doubles.py" in log  # Python's stack at the crash


def test_rank_0_is_named_as_well_as_any(tmp_path: Path) -> None:
    assert_failed(serve(tmp_path, *STEPS, DOUBLE, "+data.what=raise", "+data.on_rank=0"), 0, "ValueError: boom")


def test_a_lone_rank_in_place_fails_the_same_way(tmp_path: Path) -> None:
    for number, what in enumerate(("raise", "sys_exit")):
        message = WAYS_TO_FAIL[what][1]
        words = [*STEPS, DOUBLE, "launch.nproc=1", f"+data.what={what}", "+data.on_rank=0"]
        (tmp_path / str(number)).mkdir()
        outcome = serve(tmp_path / str(number), *words)
        assert_failed(outcome, 0, message)
        assert outcome.started_processes == ("os.fork",)  # for the forecast; the rank is this process


def test_a_long_message_is_cut_on_the_terminal_and_whole_in_the_log(tmp_path: Path) -> None:
    outcome = serve(tmp_path, *STEPS, DOUBLE, "+data.what=raise_long")
    run_dir = assert_failed(outcome, 1, "ValueError: boom")
    assert "x" * 5000 in (run_dir / "rank_1.log").read_text()


def test_a_failure_while_building_is_named(tmp_path: Path) -> None:
    double = ["model=mlp", "model._target_=tests.doubles.MLPThatBreaksInBuilding", "+model.on_rank=1"]
    outcome = serve(tmp_path, *STEPS, *double)
    assert_failed(outcome, 1, "ValueError: boom while building")
    assert "tests.doubles.MLPThatBreaksInBuilding" in outcome.stderr  # the traceback says which part it was


@pytest.mark.slow  # the other rank waits for it in the store, hears no signal there, and has 8 s of grace
def test_a_rank_whose_log_can_not_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "run" / "rank_1.log").mkdir(parents=True)
    outcome = serve(tmp_path, *STEPS, "hydra.run.dir=run")
    assert outcome.code == 1
    assert "shardlab: rank 1 failed: IsADirectoryError: [Errno 21] Is a directory" in outcome.stderr
    assert "IsADirectoryError" in summary(tmp_path / "run")["error"]
    assert survivors(outcome.session) == []


def test_a_full_disk_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    os.symlink("/dev/full", tmp_path / "run" / "config.yaml")
    outcome = serve(tmp_path, *STEPS, "hydra.run.dir=run")
    assert outcome.code == 1
    assert outcome.stderr.splitlines() == [
        "shardlab: the run folder can't be written to: [Errno 28] No space left on device"
    ]
    assert not outcome.started_processes


@pytest.mark.slow  # 8 s of grace
def test_a_rank_that_is_deaf_to_sigterm_is_killed(tmp_path: Path) -> None:
    words = [*STEPS, "data._target_=tests.doubles.DeafAndFailing"]
    outcome = serve(tmp_path, *words)
    assert_failed(outcome, 1, "ValueError: boom")


def test_a_record_that_a_full_disk_cut_off_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "error.json").touch()
    assert read_records(tmp_path) == []
