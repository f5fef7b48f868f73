"""One process and its groups for the whole test session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron_logra import platform

platform.install()

from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from ranks import Ranks  # noqa: E402

from megatron_logra import distributed  # noqa: E402
from megatron_logra.config import ParallelConfig  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def pg() -> Iterator[ProcessGroupCollection]:
    """Megatron's process groups over this one process."""
    yield distributed.initialize(ParallelConfig(), seed=1234)
    distributed.shutdown()


@pytest.fixture
def generator() -> torch.Generator:
    """A source of fresh random inputs; the seed is printed when a test fails."""
    generator = torch.Generator()
    print("input seed:", generator.seed())
    return generator


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes that stand ready as the ranks of small runs."""
    pool = Ranks()
    yield pool
    pool.close()
