"""A process group for compressors outside of workers."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture
def alone_in_the_world() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
