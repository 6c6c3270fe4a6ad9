"""How long each layer takes, learnt while training: what plans and schedules are made from.

Workers record a duration after each layer's pass; planning reads the averages. Recording costs a lock and a few
additions, no synchronisation with a device: who measures on an accelerator hands in what its events said.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Literal

from roundpipe_async.scheduling.plan import ASSUMED_BYTES_PER_S, LayerCost

TimedPass = Literal["forward", "recompute", "backward"]
PASSES: tuple[TimedPass, ...] = ("forward", "recompute", "backward")


class LayerTimer:
    """A moving average for each (layer, pass). Thread-safe.

    The first `warm_up` durations of each are dropped (allocation, compilation, cold caches). After that the average
    is plain until 1 / `weight` durations have come, then exponential with that weight: it forgets, slowly.
    """

    def __init__(self, num_layers: int, *, warm_up: int = 1, weight: float = 0.1) -> None:
        if num_layers < 1 or warm_up < 0 or not 0 < weight <= 1:
            raise ValueError(f"LayerTimer({num_layers}, warm_up={warm_up}, weight={weight}): out of range")
        self.num_layers = num_layers
        self.warm_up = warm_up
        self.weight = weight
        self._lock = threading.Lock()
        self._counts = {name: [0] * num_layers for name in PASSES}
        self._averages = {name: [0.0] * num_layers for name in PASSES}

    def record(self, layer: int, phase: TimedPass, seconds: float) -> None:
        """Adds one microbatch's duration. IndexError, KeyError for a layer or pass that does not exist."""
        with self._lock:
            counts = self._counts[phase]
            n = counts[layer] = counts[layer] + 1
            n -= self.warm_up
            if n > 0:
                averages = self._averages[phase]
                averages[layer] += (seconds - averages[layer]) * max(self.weight, 1 / n)

    def seconds(self, layer: int, phase: TimedPass) -> float | None:
        """The average, or None before the first duration past the warm-up."""
        with self._lock:
            return self._averages[phase][layer] if self._counts[phase][layer] > self.warm_up else None

    @property
    def measured(self) -> bool:
        """Whether every layer's forward and backward pass has an average."""
        with self._lock:
            return all(min(self._counts[name]) > self.warm_up for name in ("forward", "backward"))

    def reset(self) -> None:
        """Forgets everything, for example after the microbatch size changed."""
        with self._lock:
            for name in PASSES:
                self._counts[name] = [0] * self.num_layers
                self._averages[name] = [0.0] * self.num_layers

    def costs(self, parameter_bytes: Sequence[int], activation_bytes: Sequence[int] | None = None) -> list[LayerCost]:
        """One LayerCost a layer, with these sizes.

        What was not measured is inferred: recompute from forward, forward and backward from each other (1 to 2), and
        a layer of which nothing is known from its parameter bytes, at the rate of the layers that were measured.
        """
        activations = activation_bytes if activation_bytes is not None else [0] * self.num_layers
        for name, sizes in (("parameter_bytes", parameter_bytes), ("activation_bytes", activations)):
            if len(sizes) != self.num_layers:
                raise ValueError(f"{len(sizes)} {name} for {self.num_layers} layers")
        known = [self._known(i) for i in range(self.num_layers)]
        pairs = [(times, size) for times, size in zip(known, parameter_bytes, strict=True) if times is not None]
        seconds, size = sum(times[0] for times, _ in pairs), sum(size for _, size in pairs)
        rate = seconds / size if seconds > 0 and size > 0 else 1 / ASSUMED_BYTES_PER_S
        costs = []
        for times, parameters, activation in zip(known, parameter_bytes, activations, strict=True):
            guess = max(parameters, 1) * rate
            costs.append(LayerCost(*(times or (guess, guess, 2 * guess)), parameters, activation))
        return costs

    def _known(self, layer: int) -> tuple[float, float, float] | None:
        forward, recompute, backward = (self.seconds(layer, name) for name in PASSES)
        if forward is None:
            forward = recompute if recompute is not None else None if backward is None else backward / 2
        if forward is None:
            return None
        return forward, forward if recompute is None else recompute, 2 * forward if backward is None else backward

    def table(self) -> str:
        """A line a layer: milliseconds of each pass (`-`: not measured yet) and how many durations were counted."""
        lines = ["layer  forward ms  recompute ms  backward ms    measured"]
        for i in range(self.num_layers):
            averages = [self.seconds(i, name) for name in PASSES]
            shown = ["-" if x is None else f"{1e3 * x:.3f}" for x in averages]
            counts = "/".join(str(max(0, self._counts[name][i] - self.warm_up)) for name in PASSES)
            lines.append(f"{i:5}  {shown[0]:>10}  {shown[1]:>12}  {shown[2]:>11}  {counts:>10}")
        return "\n".join(lines)
