"""The autograd graph behind a model's outputs: one node that stands for all stages of one forward call.

torch walks graphs in the thread that calls `backward`; our node hands the work to the event loop and waits there. In
the loop's own thread it would wait for itself, so that is refused; `await model.backward(loss)` walks in a thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from roundpipe_async.boundary import Boundary
from roundpipe_async.engine import Execution
from roundpipe_async.events import Event
from roundpipe_async.scheduling.schedule import Schedule
from roundpipe_async.stage import CallWork, Gradients, Passed
from roundpipe_async.store import CallTicket, RunGradients, Store


class Walk:
    """One walk through a graph: what this model's stages in it share, and what they gave so far."""

    def __init__(self, store: Store, ticket: CallTicket, loop: asyncio.AbstractEventLoop) -> None:
        self.store = store
        self.ticket = ticket
        self.loop = loop
        self.base: Mapping[int, torch.Tensor] | None = None
        self.based: set[int] = set()
        self.results: list[RunGradients] = []
        self.cancelled = False
        self._executions: list[Execution] = []

    def add(self, execution: Execution) -> None:
        """Let `execution` run stages for this walk."""
        execution.base, execution.based = self.base, self.based
        execution.work.abandoned = execution.work.abandoned or self.cancelled
        self._executions.append(execution)

    def cancel(self) -> None:
        """Let no further work of the walk start. The loop's thread."""
        self.cancelled = True
        for execution in self._executions:
            execution.cancel()


current_walks: ContextVar[Mapping[int, Walk]] = ContextVar("roundpipe_async_walks", default={})  # noqa: B039
"""In a walking thread: the walk of each store (by id) whose call this is."""


class Graph:
    """What the backward of one forward call needs. Used once; holds its version of the parameters until then."""

    def __init__(
        self,
        walk: Callable[[Graph, list[Gradients], Walk | None], Coroutine[Any, Any, list[Gradients]]],
        store: Store,
        work: CallWork,
        schedule: Schedule,
        kept: Mapping[tuple[int, int], Event[Passed]],
        boundaries: Sequence[Boundary],
    ) -> None:
        self._walk = walk
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._used = False
        self.work = work
        store.parameters.retain(work.version)
        self._held = True
        self.schedule = schedule
        self.kept = dict(kept)
        self._seen = self._versions()
        self.leaves = [len(boundary.leaves) for boundary in boundaries]
        self.keys = [
            (m, i) for m, boundary in enumerate(boundaries) for i, need in enumerate(boundary.needs_grad) if need
        ]
        """The outputs that carry the graph: microbatch and leaf."""
        self.input_keys: list[tuple[int, int]] = []
        """The inputs that want gradients."""

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """From the gradients of the outputs to those of the inputs; torch calls it in the walking thread."""
        try:
            here: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is self._loop:
            raise RuntimeError(
                "loss.backward() in the event loop's own thread would wait for itself: use "
                "`await model.backward(loss)`, or call loss.backward() in another thread"
            )
        if not self._loop.is_running():
            raise RuntimeError("the event loop in which this graph was made does not run any more: backward needs it")
        with self._lock:
            if self._used:
                raise RuntimeError(
                    "backward through the outputs of one RoundPipe call a second time: the activations are freed; "
                    "run the forward again"
                )
            self._used = True
        of_outputs: list[Gradients] = [[None] * count for count in self.leaves]
        for (m, i), gradient in zip(self.keys, gradients, strict=True):
            of_outputs[m][i] = gradient
        walk = current_walks.get().get(id(self._store))
        work = self._walk(self, of_outputs, walk)
        of_inputs = asyncio.run_coroutine_threadsafe(work, self._loop).result()
        return [of_inputs[m][i] for m, i in self.input_keys]

    def _versions(self) -> dict[tuple[int, int], list[int | None]]:
        return {key: event.value.kept[key[0]].versions() for key, event in self.kept.items() if event.done()}

    def check_unchanged(self) -> None:
        """Raise if the user changed in place what backward starts from, which may be the user's own input tensors."""
        now = self._versions()
        if any(now.get(key) != versions for key, versions in self._seen.items()):
            raise RuntimeError(
                "an input of the forward call was changed in place since, and recompute would start from the changed "
                "values: walk backward before you reuse the tensor, or call the model with a clone"
            )

    def release(self) -> None:
        """Let the version of the parameters go. Any thread; twice is fine."""
        with self._lock:
            held, self._held = self._held, False
        if held:
            self._store.parameters.release(self.work.version)

    def __del__(self) -> None:
        if getattr(self, "_held", False):
            self._held = False
            self._store.parameters.let_go(self.work.version)


class _Node(torch.autograd.Function):
    """All stages of one forward call."""

    @staticmethod
    def forward(ctx: Any, graph: Graph, anchor: torch.Tensor, outputs: list[torch.Tensor], *inputs: Any) -> Any:
        ctx.graph = graph
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (None, None, None, *ctx.graph.backward(gradients))


def join_outputs(
    graph: Graph, boundaries: Sequence[Boundary], inputs: Sequence[Sequence[torch.Tensor | None]]
) -> list[Any]:
    """The outputs of the microbatches, with the graph behind them and the user's own graph behind that."""
    leaves = [list(boundary.leaves) for boundary in boundaries]
    if graph.keys:
        graph.input_keys = [(m, i) for m, row in enumerate(inputs) for i, leaf in enumerate(row) if leaf is not None]
        outputs = [leaves[m][i] for m, i in graph.keys]
        with torch.enable_grad():
            anchor = torch.empty((), requires_grad=True)
            wanted = [inputs[m][i] for m, i in graph.input_keys]
            joined = _Node.apply(graph, anchor, outputs, *wanted)  # type: ignore[no-untyped-call]
        for (m, i), tensor in zip(graph.keys, joined, strict=True):
            leaves[m][i] = tensor
    return [boundary.structure.unflatten(row) for boundary, row in zip(boundaries, leaves, strict=True)]
