"""The exceptions that are ours.

An exception of the user's own code (a layer, a loss function, a hook) always reaches the caller as itself; these
are for wrong use of the engine. Each says what was wrong, with what value, and what to do.
"""

from __future__ import annotations


class RoundPipeError(Exception):
    """Base of the library's own exceptions."""


class ClosedError(RoundPipeError, RuntimeError):
    """A model or a pool was used after it was closed."""


class WrongLoopError(RoundPipeError, RuntimeError):
    """A model was called from a second event loop while the first one still runs work of it."""


class PlanError(RoundPipeError, ValueError):
    """An execution plan does not fit the model; the message shows the plan with an arrow at the fault."""


class ScheduleError(RoundPipeError, ValueError):
    """A schedule leaves out, repeats or misorders work."""


class MicrobatchError(RoundPipeError, ValueError):
    """Inputs, labels or outputs cannot be split or merged by the rule or spec given."""


class StepError(RoundPipeError, RuntimeError):
    """A background step failed, and its own error was raised elsewhere already; that error is the cause."""
