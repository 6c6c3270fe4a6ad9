"""Outputs that stay in microbatches: what one model hands to the next without anybody waiting for all of it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from roundpipe_async import tree
from roundpipe_async.boundary import Boundary
from roundpipe_async.errors import MicrobatchError
from roundpipe_async.events import Event
from roundpipe_async.microbatches.split import SplitCall
from roundpipe_async.stage import Passed


class Microbatches:
    """The outputs of a forward call with `merge_output=False`, one a microbatch; perhaps not there yet.

    Give it as an argument to another `RoundPipe` (alone or inside tuples, lists and dicts): each microbatch flows on
    as soon as it is there, and the gradients flow back. Or await it: a list of the outputs. What the forward call
    failed with is raised wherever its outputs are used.
    """

    def __init__(self) -> None:
        self.sizes: list[int] | None = None
        """Samples of each microbatch, where that is known."""
        self.started: Event[None] = Event()
        """Happens when the number of microbatches is known."""
        self.dispatched: Event[None] = Event()
        """Happens when all stage runs of the call are enqueued: who depends on them may enqueue its own from then."""
        self.joined: Event[list[Any]] = Event()
        """The outputs with the graph behind them; happens at the end of the call."""
        self.boundaries: list[Event[Boundary]] = []
        """The outputs without a graph, each as soon as it is there."""

    def begin(self, count: int, sizes: list[int] | None) -> None:
        """The call knows its microbatches."""
        self.boundaries = [Event() for _ in range(count)]
        self.sizes = sizes
        self.started.set(None)

    def arrive(self, microbatch: int, event: Event[Passed]) -> None:
        """One output was submitted."""

        def pass_on(done: Event[Passed]) -> None:
            target = self.boundaries[microbatch]
            if target.done():
                return
            if done.error is not None:
                target.fail(done.error)
            else:
                boundary = done.value.boundary
                assert boundary is not None
                target.set(boundary)

        event.add_callback(pass_on)

    def end(self, error: BaseException | None) -> None:
        """The call is over: nothing more will come."""
        error = error or RuntimeError("the forward call that makes this input was cancelled")
        events: list[Event[Any]] = [self.started, self.dispatched, self.joined, *self.boundaries]
        for event in events:
            if not event.done():
                event.fail(error)

    def __len__(self) -> int:
        return len(self.boundaries)

    def __await__(self) -> Generator[Any, None, list[Any]]:
        return self.joined.__await__()


def packed_leaves(value: Any) -> list[Microbatches]:
    """The `Microbatches` in a value."""
    return [leaf for leaf in tree.flatten(value)[0] if isinstance(leaf, Microbatches)]


def fitted(split: SplitCall, packed: Sequence[Microbatches]) -> SplitCall:
    """The split of a call's other arguments, made to fit the microbatches that come packed."""
    counts = {len(leaf) for leaf in packed}
    if len(counts) != 1:
        raise MicrobatchError(f"inputs that come in {sorted(counts)} microbatches cannot go together")
    (count,) = counts
    if len(split.args) == count:
        return split
    if len(split.args) == 1:  # nothing in the call tells a batch size
        return SplitCall(split.args * count, split.kwargs * count, split.labels * count, packed[0].sizes)
    raise MicrobatchError(
        f"an input comes in {count} microbatches, but the call's other tensors were cut into {len(split.args)}"
    )


def unpacked(value: Any, microbatch: int, of: Callable[[Microbatches, int], Any]) -> Any:
    """`value` with every `Microbatches` in it replaced by `of(packed, microbatch)`."""
    leaves, structure = tree.flatten(value)
    return structure.unflatten([of(leaf, microbatch) if isinstance(leaf, Microbatches) else leaf for leaf in leaves])


def arrived(packed: Microbatches, microbatch: int) -> Any:
    """One output that is there, without a graph; its tensors say whether they would require grad."""
    boundary = packed.boundaries[microbatch].value
    leaves = [
        leaf.detach().requires_grad_(need) if isinstance(leaf, torch.Tensor) else leaf
        for leaf, need in zip(boundary.leaves, boundary.needs_grad, strict=True)
    ]
    return boundary.structure.unflatten(leaves)


def joined(packed: Microbatches, microbatch: int) -> Any:
    """One output with the graph behind it, at the end of the call that made it."""
    return packed.joined.value[microbatch]
