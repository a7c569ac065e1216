"""Fixtures that all tests share."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workers import Pool

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """pool.run(size, function, *args): function(world, *args) on `size` real gloo ranks."""
    started = Pool()
    yield started
    started.close()


@pytest.fixture(scope="session")
def mnist_archives() -> Path:
    """The four gzipped files of the real MNIST, which lie beside the project."""
    folder = REPOSITORY.parent / "shared" / "mnist"
    if not folder.is_dir():
        pytest.skip(f"the real MNIST is not at {folder}")
    return folder


def pytest_configure(config: pytest.Config) -> None:
    # A job that a script puts into the background, or that nohup starts, has these ignored, and so would the
    # commands that tests start and then signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-parity-table", action="store_true", help="write README.md's parity table instead of checking it"
    )
