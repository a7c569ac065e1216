"""A process that is killed in the middle of a save leaves the checkpoint before it, and no half one to be found."""

from pathlib import Path

import pytest

from src.checkpoint.whole import LAST, newest_whole, pointed, step_name
from tests.checkpoint import parts
from tests.workers import Pool, RankError, World


@pytest.mark.parametrize(("moment", "newest"), [("writing", 1), ("publishing", 1), ("pointing", 2)])
def test_killed_in_the_middle_of_a_save(moment: str, newest: int, pool: Pool, tmp_path: Path) -> None:
    world = World(2)
    try:
        with pytest.raises(RankError) as caught:
            world.run(parts.die_while_saving, (tmp_path, moment), timeout_seconds=60)
        told = str(caught.value)
        if "died without a word" in told:  # the survivor's words, which may come first or second
            survivor = world.pipes[0 if moment == "writing" else 1]
            assert survivor.poll(30)
            told = survivor.recv()[1]
        assert f"CheckpointFailed: The checkpoint of step 2 was not written to {tmp_path}" in told
    finally:
        world.close()
    hidden = tmp_path / f".{parts.RUN}.saving.{step_name(2)}"
    assert hidden.exists() == (newest == 1)
    assert newest_whole(tmp_path) == (tmp_path / step_name(newest), [])
    assert pointed(tmp_path, LAST) == tmp_path / step_name(1)
    assert pool.run(1, parts.differences, tmp_path / step_name(newest)) == [[]]
    pool.run(2, parts.save, tmp_path, [], None, None, "another-run")
    assert hidden.exists() == (newest == 1)
    pool.run(2, parts.save, tmp_path, [2])
    assert sorted(path.name for path in tmp_path.iterdir()) == [LAST, step_name(1), step_name(2)]
    assert pointed(tmp_path, LAST) == tmp_path / step_name(2)
