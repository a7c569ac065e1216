"""One saved run that several files' tests look at, or copy and change."""

import shutil
from pathlib import Path

import pytest

from tests.command import QUICK
from tests.command_server import serve

SMALL = [*QUICK, "model=mlp", "model.hidden=[16]", "data.limit=200", "trainer.epochs=20"]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 4 steps under fsdp, with the checkpoints of steps 2 and 4. To be copied, not changed."""
    cwd = tmp_path_factory.mktemp("saved")
    # CK-01: gathering at the end of a run once hung until a watchdog ended it; here it has seconds.
    words = ["strategy=fsdp", "trainer.max_steps=4", "checkpoint.every=2", "hydra.run.dir=run"]
    done = serve(cwd, *SMALL, *words, timeout=60)
    assert done.code == 0, done.text
    return cwd / "run"


@pytest.fixture
def run_dir(saved: Path, tmp_path: Path) -> Path:
    """A copy of `saved`, beside an empty folder `here`."""
    (tmp_path / "here").mkdir()
    return Path(shutil.copytree(saved, tmp_path / "run"))
