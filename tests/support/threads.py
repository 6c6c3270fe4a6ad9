"""Threads that start together."""

from __future__ import annotations

import threading
from collections.abc import Callable


def in_threads(work: list[Callable[[], None]]) -> None:
    """Run all of `work` at once, each in a thread of its own; raises what the first of them raised."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(work))

    def run(job: Callable[[], None]) -> None:
        start.wait()
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
