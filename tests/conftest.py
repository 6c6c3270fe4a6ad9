"""What every test may rely on: a hang fails with all stacks shown, and torch works with one thread, for equal bits."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator

import pytest
import torch

HANG_SECONDS = float(os.environ.get("ROUNDPIPE_ASYNC_TEST_HANG_S", "120"))


def pytest_configure(config: pytest.Config) -> None:
    """One intra-op thread for the whole session: sums are then taken in one order, on any machine."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _hang_dumps_stacks() -> Iterator[None]:
    """A test that hangs prints the stack of every thread and ends the run as failed."""
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
