"""The words in which a stream says what it did: data for whoever records it, tabulates it or draws it."""

from __future__ import annotations

from dataclasses import dataclass

PASSES = ("forward", "fused", "recompute", "backward")
"""Kinds of actions that take a microbatch through a stage."""
COMPUTING = frozenset((*PASSES, "collect"))
"""Kinds of actions that are a device's computation: the passes, and adding up a stage's gradients."""
TRANSFERS = frozenset(("upload", "download"))
"""Kinds of actions that move tensors between the host and a device."""
OPTIMIZER = frozenset(("step", "publish"))
"""Kinds of actions of the optimizer's stream: the step, and writing its result to the model's parameters."""
HOST = "host"
"""What a record has for a device when the host's own streams ran the action."""


@dataclass(frozen=True, slots=True)
class Action:
    """What a piece of work on a stream is for.

    `kind` is one of `forward`, `fused`, `recompute`, `backward`, `collect` (a device's computation), `upload`,
    `download`, and on the host `split`, `plan`, `merge`, `commit`, `publish`, `step`, `snapshot`, `load`.
    """

    kind: str
    layers: range | None = None
    """The layers of the stage; an empty range is the place before a layer, where activations pass."""
    microbatch: int | None = None
    num_bytes: int = 0
    """Of an upload of parameters: their size."""
    label: str = ""
    """Whose it is: the model's name and the number of its call or step, as in `gpt call 3`."""

    def __str__(self) -> str:
        words = [self.kind]
        if self.layers:
            words.append(f"{self.layers.start}..{self.layers.stop - 1}")
        elif self.layers is not None:
            words.append(f"at {self.layers.start}")
        if self.microbatch is not None and self.microbatch >= 0:
            words.append(f"mb{self.microbatch}")
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class Record:
    """One action that ran: where, and from when to when."""

    action: Action
    device: str
    """The device's name, as in `cuda:0`; `host` for the host's own streams."""
    stream: str
    """The stream's name, as in `cuda:0/compute`."""
    start_s: float
    """Seconds of `time.perf_counter`; what ran on an accelerator has its device's times, brought to that clock."""
    end_s: float
    num_bytes: int = 0
    """What was copied. On a device that shares the host's memory nothing is: there it is the size of what was lent."""
    error: str = ""
    """The type of what the action raised, if it did. `Abandoned`: its call was over, so it did nothing."""

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.start_s
