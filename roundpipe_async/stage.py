"""What a worker does with a stage: load its layers, run them forward, recompute them, walk them backward.

Every layer is a graph of its own, cut from its neighbours where values pass between them: so a layer that fails is
known by name in both directions, a cancelled call ends after the layer now running, and each layer's activations are
freed as soon as its backward is done. Nothing here waits or schedules; the engine decides what runs where and when.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from roundpipe_async import recompute, tree
from roundpipe_async.boundary import Boundary, Root
from roundpipe_async.buffers import BufferChain, LayerBuffers
from roundpipe_async.devices.base import Device
from roundpipe_async.devices.launch import stopwatch
from roundpipe_async.failures import Failures
from roundpipe_async.microbatches.split import check_loss, weighted_loss
from roundpipe_async.modes import Modes
from roundpipe_async.recompute import RecomputeScope
from roundpipe_async.replica import Blueprint, Replica, as_parameter
from roundpipe_async.scheduling.schedule import StageRun
from roundpipe_async.scheduling.timing import LayerTimer, TimedPass
from roundpipe_async.steps import Window, current_window
from roundpipe_async.versions import Version

Gradients = list[torch.Tensor | None]


class Abandoned(BaseException):
    """Ends the work of a call that was cancelled or failed elsewhere. Never reaches a user."""


@dataclass(slots=True, eq=False)
class Layer:
    """One layer of a model: what a worker needs to know of it."""

    index: int
    name: str
    module: nn.Module
    blueprint: Blueprint
    slots: tuple[int, ...]
    buffers: LayerBuffers
    mutates: dict[Hashable, bool] = field(default_factory=dict)
    """By the modes that the layer ran in: whether it changes its input in place. Decides if kept inputs are copied."""


@dataclass(slots=True, eq=False)
class CallWork:
    """The facts of one call that its stages share. Everything but the results and `abandoned` is fixed at the call."""

    layers: Sequence[Layer]
    parameters: Sequence[nn.Parameter]
    """The model's own, by slot: their identity, attributes and hooks; not their values."""
    version: Version
    """The values to use."""
    requires_grad: Sequence[bool]
    tied: frozenset[int]
    """Slots that several layers share."""
    training: Mapping[int, bool]
    changes_buffers: bool
    modes: Modes
    window: Window | None
    seed: int | None
    """None: layers draw from the ambient generators."""
    recompute_grain: str
    loss_fn: Callable[[Any, Any], Any] | None
    loss_weights: Sequence[float] | None
    return_outputs: bool
    timer: LayerTimer
    label: str = ""
    """The model's name and the number of its call, for traces."""
    chains: dict[int, BufferChain] | None = None
    """The buffers' states, by layer; None before the call may look at them."""
    recompute_scopes: dict[tuple[int, int], RecomputeScope] = field(default_factory=dict)
    needs_gradient: dict[tuple[int, int], bool] = field(default_factory=dict)
    """By first layer and microbatch: whether anything that passes there would require grad."""
    failures: Failures = field(default_factory=Failures)
    """What the call's work raised."""
    abandoned: bool = False
    _modes_of: dict[int, Hashable] = field(default_factory=dict)

    def check(self) -> None:
        """Raise Abandoned if nobody wants the call's work any more."""
        if self.abandoned:
            raise Abandoned

    def mutates(self, layer: Layer) -> bool | None:
        """Whether a layer changes its input in place, in the modes of this call; None where it never ran in them."""
        return layer.mutates.get(self._key(layer))

    def learn(self, layer: Layer, mutated: bool) -> None:
        """Note whether a layer changed its input. An error where that comes too late for an input that was kept."""
        known = self.mutates(layer)
        if mutated or known is None:
            layer.mutates[self._key(layer)] = mutated
        if mutated and known is False and self.modes.grad:
            raise RuntimeError(
                "the layer changed its input in place, which it did not do in earlier calls, so what is kept for "
                "recompute may be lost; calls from now on keep a copy"
            )

    def kept(self, layer: Layer, saved: Boundary, output: Boundary) -> Boundary:
        """A layer's input as it is kept for recompute: copied where layers to come might change it in place.

        A later layer gets hold of it through an output that is the input, or a view of it (nn.Identity, nn.Flatten).
        """
        later = self.layers[layer.index + 1 :]
        if later and all(self.mutates(other) is False for other in later):
            return saved
        return saved.apart_from(output)

    def _key(self, layer: Layer) -> Hashable:
        key = self._modes_of.get(layer.index)
        if key is None:
            flags = tuple(self.training.get(id(module)) for module in layer.blueprint.modules)
            key = self._modes_of[layer.index] = (self.modes.grad, flags)
        return key


@dataclass(slots=True, eq=False)
class LayerGraph:
    """One layer's graph for one microbatch, between its forward and its backward."""

    layer: Layer
    roots: list[Root | None]
    outputs: list[Any]
    structure: tree.Structure

    def boundary(self) -> Boundary:
        """The layer's output as the next one's input."""
        return Boundary.of_leaves(self.outputs, self.structure)


@dataclass(slots=True, eq=False)
class Passed:
    """What a forward run hands on for one microbatch. Each part is taken once, and freed with who took it."""

    boundary: Boundary | None
    kept: dict[int, Boundary]
    """Inputs kept for recompute, by layer."""
    scopes: Sequence[RecomputeScope] = ()
    """What the layers themselves kept for recompute."""

    def take(self) -> Boundary:
        """The input of the next run."""
        boundary, self.boundary = self.boundary, None
        assert boundary is not None, "a boundary is taken once"
        return boundary

    def map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> Passed:
        """The same with other tensors; leaves nothing here."""
        for scope in self.scopes:
            scope.saved = tree.map_tensors(fn, scope.saved)
        return Passed(self.take().map(fn), {layer: self.kept.pop(layer).map(fn) for layer in list(self.kept)})


@dataclass(slots=True, eq=False)
class Fused:
    """What a fused run gives for one microbatch: detached losses, outputs if wanted, the input's gradients."""

    losses: Any
    output: Any
    gradients: Gradients

    def take(self) -> Gradients:
        """The input's gradients, once: they are freed with who took them."""
        gradients, self.gradients = self.gradients, []
        return gradients

    def map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> Fused:
        """The same with other tensors; leaves no gradients here."""
        return Fused(tree.map_tensors(fn, self.losses), tree.map_tensors(fn, self.output), move(self.take(), fn))


def move(gradients: Gradients, fn: Callable[[torch.Tensor], torch.Tensor]) -> Gradients:
    """The gradients elsewhere."""
    return [None if gradient is None else fn(gradient) for gradient in gradients]


class StageWork:
    """One visit of a stage to a device, as the functions that its streams run, in this order: `load`, then for each
    microbatch `forward`, or `fused`, or `recompute` and `backward`, and `collect` at the end."""

    def __init__(self, call: CallWork, run: StageRun, device: Device, base: Mapping[int, torch.Tensor]) -> None:
        self.call = call
        self.run = run
        self.device = device
        self._base = base
        self._replicas: dict[int, Replica] = {}
        self._leaves: dict[int, nn.Parameter] = {}
        self._tied: dict[int, dict[int, list[torch.Tensor]]] = {}
        self._num_inputs: dict[int, int] = {}
        self._moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    # ---- upload ---------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Put the stage's parameters (and the gradients to add to) into the device's memory. Upload stream."""
        call, device = self.call, self.device
        call.check()
        grad = call.modes.grad
        tensors: dict[int, torch.Tensor] = {}
        for layer in self._layers():
            for slot in layer.slots:
                original = call.parameters[slot]
                if slot not in self._leaves:
                    # without grad mode, too: torch chooses kernels by it, and a layer may switch grad mode on
                    requires_grad = call.requires_grad[slot]
                    tensor = device.from_host(call.version.tensors[slot])
                    leaf = as_parameter(original, tensor, requires_grad, hooked=slot not in call.tied)
                    base = self._base.get(slot) if grad else None
                    if base is not None and requires_grad:
                        leaf.grad = base.clone() if device.shares_host_memory else device.from_host(base)
                    self._leaves[slot] = leaf
                tensors[id(original)] = self._leaves[slot]
            self._replicas[layer.index] = layer.blueprint.replicate(tensors, call.training)
            chain = call.chains.get(layer.index) if call.chains else None
            for buffer in chain.first if chain is not None else ():
                if buffer is not None:
                    self._on_device(buffer)

    def _on_device(self, buffer: torch.Tensor) -> torch.Tensor:
        """A buffer's state in the device's memory; what comes from the host comes once in a run."""
        if self.device.shares_host_memory:
            return buffer
        if buffer.device.type != "cpu":
            return buffer.to(self.device.torch_device)
        if id(buffer) not in self._moved:
            self._moved[id(buffer)] = (buffer, self.device.from_host(buffer))
        return self._moved[id(buffer)][1]

    # ---- compute --------------------------------------------------------------------------------------------------

    def forward(self, microbatch: int, boundary: Boundary, keep: frozenset[int]) -> Passed:
        """Run the layers on one microbatch; keep the inputs of the layers in `keep`."""
        kept: dict[int, Boundary] = {}
        with self._modes():
            for layer in self._layers():
                saved = None
                if layer.index in keep:
                    saved = boundary if self.call.mutates(layer) is False else boundary.map(torch.clone)
                output = self._call(layer, microbatch, boundary, "forward", keep_data=True)[0]
                boundary = Boundary.cut(output)
                del output
                if saved is not None:
                    kept[layer.index] = self.call.kept(layer, saved, boundary)
        self.call.needs_gradient[self.run.layers.stop, microbatch] = any(boundary.needs_grad)
        scopes = [self.call.recompute_scopes[layer.index, microbatch] for layer in self._layers()]
        return Passed(boundary, kept, scopes)

    def recompute(self, microbatch: int, boundary: Boundary) -> list[LayerGraph]:
        """Run the layers again on one microbatch, keeping their graphs: none where no gradient will come back."""
        graphs: list[LayerGraph] = []
        self._num_inputs[microbatch] = len(boundary.leaves)
        if not self._needed(microbatch):
            return graphs
        with self._modes():
            for layer in self._layers():
                graph = self._graph(layer, microbatch, boundary, "recompute")
                boundary = graph.boundary()
                graphs.append(graph)
        return graphs

    def backward(self, microbatch: int, graphs: list[LayerGraph], gradients: Gradients) -> Gradients:
        """Walk the graphs backward from the gradients of the stage's output to those of its input."""
        if not graphs:
            return [None] * self._num_inputs[microbatch]
        while graphs:
            gradients = self._walk(graphs.pop(), microbatch, gradients)
        return gradients

    def backward_by_layer(self, microbatch: int, kept: Mapping[int, Boundary], gradients: Gradients) -> Gradients:
        """`recompute` and `backward` in one, holding one layer's graph at a time."""
        if not self._needed(microbatch):
            return [None] * len(kept[self.run.layers.start].leaves)
        for layer in reversed(self._layers()):
            with self._modes():
                graph = self._graph(layer, microbatch, kept[layer.index], "recompute")
            gradients = self._walk(graph, microbatch, gradients)
        return gradients

    def fused(self, microbatch: int, boundary: Boundary, label: Any) -> Fused:
        """Forward, loss and backward of the model's last layers on one microbatch."""
        call = self.call
        graphs: list[LayerGraph] = []
        with self._modes():
            for layer in self._layers():
                graphs.append(self._graph(layer, microbatch, boundary, "forward"))
                boundary = graphs[-1].boundary()
            value, roots = boundary.enter()
            with self._noting("loss_fn", None, microbatch):
                call.check()
                assert call.loss_fn is not None
                losses = call.modes.run(self._in_window, call.loss_fn, value, label)
                starts = check_loss(losses, microbatch)
                if call.loss_weights is not None:
                    losses = weighted_loss(losses, call.loss_weights[microbatch])
                    starts = check_loss(losses, microbatch)
        output = tree.map_tensors(torch.Tensor.detach, value) if call.return_outputs else None
        del value, boundary
        with self._noting("backward of loss_fn", None, microbatch):
            call.modes.run(self._in_window, torch.autograd.backward, starts)
        gradients: Gradients = [None if root is None else root.gradient for root in roots]
        detached = tree.map_tensors(torch.Tensor.detach, losses)
        del losses, starts, roots
        gradients = self.backward(microbatch, graphs, gradients)
        return Fused(detached, output, gradients)

    def collect(self) -> tuple[dict[int, torch.Tensor], dict[int, dict[int, list[torch.Tensor]]]]:
        """The gradients of the run by slot, and those of tied parameters by slot and microbatch, layer by layer."""
        self.call.check()
        gradients = {slot: leaf.grad for slot, leaf in self._leaves.items() if leaf.grad is not None}
        tied, self._tied = self._tied, {}
        return gradients, tied  # the parameters stay: the device may be reading them until the run is over

    def _needed(self, microbatch: int) -> bool:
        return self.call.needs_gradient.get((self.run.layers.stop, microbatch), True)

    # ---- pieces ---------------------------------------------------------------------------------------------------

    def _layers(self) -> Sequence[Layer]:
        return [self.call.layers[index] for index in self.run.layers]

    @contextmanager
    def _modes(self) -> Iterator[None]:
        with self.call.modes.entered(self.call.modes.grad):
            yield

    def _graph(self, layer: Layer, microbatch: int, boundary: Boundary, phase: TimedPass) -> LayerGraph:
        output, roots = self._call(layer, microbatch, boundary, phase, keep_data=False)
        leaves, structure = tree.flatten(output)
        return LayerGraph(layer, roots, leaves, structure)

    def _call(
        self, layer: Layer, microbatch: int, boundary: Boundary, phase: TimedPass, keep_data: bool
    ) -> tuple[Any, list[Root | None]]:
        """Call one layer, in the caller's context, with its own random numbers and its buffers in place.

        Gives its output, and what will hold the gradients of its input.
        """
        call = self.call
        call.check()
        replica = self._replicas[layer.index]
        versions = boundary.versions()
        value, roots = boundary.enter()
        with ExitStack() as stack:
            stack.enter_context(self._noting(phase, layer, microbatch))
            assert call.chains is not None
            chain = call.chains.get(layer.index)
            if chain is not None:
                around = chain.recompute if phase == "recompute" else chain.forward
                stack.enter_context(around(replica, microbatch, self._on_device))
            self._enter_randomness(stack, layer, microbatch)
            key = (layer.index, microbatch)
            if keep_data:
                scope = call.recompute_scopes[key] = RecomputeScope()
                stack.enter_context(recompute.recording(scope))
            elif phase == "recompute":
                scope = call.recompute_scopes.pop(key)
                if not self.device.shares_host_memory:
                    scope.saved = tree.map_tensors(self.device.from_host, scope.saved)
                stack.enter_context(recompute.replaying(scope))
            stop = stopwatch()
            if layer.index == 0:
                args, kwargs = value
                output = call.modes.run(self._in_window, replica.module, *args, **kwargs)
            else:
                output = call.modes.run(self._in_window, replica.module, value)
            stop(partial(call.timer.record, layer.index, phase))
            call.learn(layer, versions != boundary.versions())
        return output, roots

    def _enter_randomness(self, stack: ExitStack, layer: Layer, microbatch: int) -> None:
        if self.call.seed is not None:
            seed = recompute.layer_seed(self.call.seed, layer.index, microbatch)
            stack.enter_context(recompute.seeded(seed, self.device.torch_device))

    def _in_window(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        current_window.set(self.call.window)  # in a context of its own: nothing to reset
        return fn(*args, **kwargs)

    def _walk(self, graph: LayerGraph, microbatch: int, gradients: Gradients) -> Gradients:
        """One layer's backward: from the gradients of its outputs to those of its inputs."""
        call = self.call
        call.check()
        outputs, seeds = [], []
        for output, gradient in zip(graph.outputs, gradients, strict=True):
            if gradient is not None and isinstance(output, torch.Tensor) and output.requires_grad:
                outputs.append(output)
                seeds.append(gradient)
        if not outputs:
            return [None] * len(graph.roots)
        graph.outputs = []
        with ExitStack() as stack:
            stack.enter_context(self._noting("backward", graph.layer, microbatch))
            self._enter_randomness(stack, graph.layer, microbatch)
            stop = stopwatch()
            call.modes.run(self._in_window, torch.autograd.backward, outputs, seeds)
            stop(partial(call.timer.record, graph.layer.index, "backward"))
        self._set_tied_aside(graph.layer, microbatch)
        return [None if root is None else root.gradient for root in graph.roots]

    def _set_tied_aside(self, layer: Layer, microbatch: int) -> None:
        # Plain PyTorch adds the shares of one microbatch first, one layer's after the other: some are in other stages.
        for slot in layer.slots:
            leaf = self._leaves[slot]
            if slot in self.call.tied and leaf.grad is not None:
                self._tied.setdefault(slot, {}).setdefault(microbatch, []).append(leaf.grad)
                leaf.grad = None

    @contextmanager
    def _noting(self, phase: str, layer: Layer | None, microbatch: int) -> Iterator[None]:
        """Tell the user's exception where it happened."""
        try:
            yield
        except Abandoned:
            raise
        except BaseException as error:
            where = f"in {phase}"
            if layer is not None:
                kind = type(layer.module).__name__
                where = f"in layer {layer.index} ({layer.name!r}: {kind}), {phase}"
            where += f", microbatch {microbatch}, device {self.device.name}"
            self.call.failures.place(error, microbatch, where)
            raise
