"""Which steps belong to which update, and what is known of each: the scaler's book, in program order.

Steps run in other threads, updates are awaited late, never, or in another event loop than the one they began in. So
an update writes itself into the book at the call: it *closes* the current iteration, which now holds all steps
scheduled before. When those are done anybody may *settle* it (compute the state it leads to), once; a barrier that is
entitled to it *publishes* that state, and the outcome is told to whoever asks next. Nothing here waits in an event
loop, so there is no loop to be bound to and nothing that a cancellation could lose.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum

import torch

from roundpipe_async.events import Event, all_of
from roundpipe_async.scaling.state import Factor, Rules, ScaleState, SkippedStepsError, UpdateOutcome, advance
from roundpipe_async.steps import StepHandle, steps_in_flight, tick

HISTORY = 1024
"""How many changes of the scale are remembered for calls that began before them."""

NOTHING_TO_UPDATE = (
    "update() found no inf check since the last update(): call step(optimizer) or unscale_(optimizer) before it"
)
NEVER_SCALED = "{} came before the scaler's first scale(): scale the loss (or outputs) earlier in the iteration"


class Stage(Enum):
    """How far one optimizer is in its iteration."""

    READY = "not unscaled"
    UNSCALED = "unscaled"
    STEPPED = "stepped"


@dataclass(eq=False, slots=True)
class OptimizerRecord:
    """What an iteration knows of one optimizer. Holds it, so that its id stays its own."""

    optimizer: torch.optim.Optimizer
    stage: Stage = Stage.READY
    found_infs: dict[torch.device, torch.Tensor] = field(default_factory=dict)
    _found_inf: float | None = None

    def found_inf(self) -> float | None:
        """More than 0 where inf or NaN was found, 0 where not, None where nothing was looked at."""
        if self.stage is not Stage.STEPPED:
            self.read_found_inf()
        return self._found_inf

    def read_found_inf(self) -> float | None:
        """Read what was found, so that after the step nobody has to wait for a device or run an operation."""
        self._found_inf = float(sum(found.item() for found in self.found_infs.values())) if self.found_infs else None
        return self._found_inf


_NO_RULES = Rules()
_NO_STEPS: Event[None] = Event.happened(None)


@dataclass(eq=False, slots=True)
class Iteration:
    """What lies between two updates: the optimizers that were unscaled or stepped, and the update that closes it."""

    index: int
    records: dict[int, OptimizerRecord] = field(default_factory=dict)
    unscaled_directly: bool = False
    """Whether gradients were unscaled outside of any step function."""
    # of the update that closed it
    closed_at: int | None = None
    rules: Rules = _NO_RULES
    new_scale: float | None = None
    steps: tuple[StepHandle, ...] = ()
    """The steps that were in flight at the closing call, of earlier iterations too."""
    done: Event[None] = _NO_STEPS
    """Happens when the steps are done."""
    # of its settlement
    result: ScaleState | None = None
    failure: str | None = None
    """Why it does not count: what torch's update would have raised."""
    discarded: bool = False
    """A state was loaded over it."""
    found_inf: float | None = None
    good: bool = False

    def record_of(self, optimizer: torch.optim.Optimizer) -> OptimizerRecord:
        """The optimizer's record, made at first use."""
        return self.records.setdefault(id(optimizer), OptimizerRecord(optimizer))

    def checked(self) -> bool:
        """Whether any gradients were looked at."""
        return any(record.found_infs for record in self.records.values())


@dataclass(frozen=True, slots=True, eq=False)
class Barrier:
    """One call of `update` or `synchronize`: what it waits for, publishes, and may have to raise."""

    target: int
    """The index of the last iteration that it publishes."""
    done: Event[None]
    """Happens when every step that it waits for is done."""
    steps: tuple[StepHandle, ...]
    """Whose errors it raises, if nobody did before."""
    failure: str | None = None


def all_done(steps: Iterable[StepHandle]) -> Event[None]:
    """An event that happens, without an error, when all of `steps` are done, well or badly."""
    pending = [step.event.settled() for step in steps if not step.event.done()]
    return all_of(pending) if pending else _NO_STEPS


class Ledger:
    """The open iteration, the closed ones that are not published yet, and the state that is. Thread-safe.

    Reading `published` and `as_of` takes no lock.
    """

    def __init__(self, state: ScaleState, enabled: bool, max_consecutive_skips: int | None) -> None:
        self.published = state
        """The state in force: what `get_scale` and `state_dict` tell."""
        self.enabled = enabled
        self.initialized = False
        """Whether anything was scaled yet."""
        self.max_consecutive_skips = max_consecutive_skips
        self.warned = False
        """Whether the warning that the scale is below 1 was given."""
        self._newest = state  # after the last settled iteration
        self._history: tuple[tuple[int, Factor], ...] = ((0, state.factor),)
        self._closed: deque[Iteration] = deque()  # settled or not, in order, none published
        self._untold: deque[Iteration] = deque()  # published, and no outcome told of them
        self._open = Iteration(index=1)
        self._closed_at = 0
        self._owed = 0  # the last iteration that some barrier is going to publish
        self._lock = threading.RLock()

    # --- factors ---

    def as_of(self, moment: int) -> Factor:
        """The factor that was in force at the tick `moment`."""
        for published_at, factor in reversed(self._history):
            if published_at < moment:
                return factor
        return self._history[0][1]

    def load(self, state: ScaleState) -> None:
        """Put `state` in force; what updates still unpublished lead to is dropped."""
        with self._lock:
            for iteration in self._closed:
                iteration.discarded = True
            self._newest = state
            self._publish(state)

    def _publish(self, state: ScaleState) -> None:
        if state.factor is not self.published.factor:
            self._history = (*self._history[-HISTORY:], (tick(), state.factor))
        self.published = state

    # --- iterations ---

    def iteration_of(self, step: StepHandle | None) -> Iteration:
        """The iteration that a step belongs to: that of the first update called after it was scheduled.

        The open one where no update was, and for work outside of any step (None).
        """
        with self._lock:
            if step is not None:
                for iteration in self._closed:
                    assert iteration.closed_at is not None
                    if iteration.result is None and iteration.closed_at > step.scheduled_at:
                        return iteration
            return self._open

    def close(self, rules: Rules, new_scale: float | None, is_async: bool) -> tuple[Barrier, Iteration]:
        """An update is called: close the open iteration, and say what its caller waits for, publishes and raises.

        An update with nothing to work on counts zero times: its barrier fails, after everything that updates before
        it were entitled to. Either way the next iteration begins with a clean record. Also gives what was open.
        """
        with self._lock:
            now, flying, failed = self._look_around()
            ended = self._open
            failure = self._nothing_to_do(ended, flying, new_scale)
            if failure is not None:
                self._open = Iteration(index=ended.index)
                return Barrier(self._owed, self._gate(self._owed), failed, failure), ended
            ended.closed_at, ended.rules, ended.new_scale = now, rules, new_scale
            ended.steps, ended.done = flying, all_done(flying)
            self._closed.append(ended)
            self._closed_at = now
            self._open = Iteration(index=ended.index + 1)
            self._owed = max(self._owed, ended.index - 1 if is_async else ended.index)
            waited = [step for iteration in self._closed if iteration.index <= self._owed for step in iteration.steps]
            steps = sorted({*failed, *waited}, key=lambda step: step.scheduled_at)
            return Barrier(self._owed, self._gate(self._owed), tuple(steps)), ended

    def _nothing_to_do(self, ended: Iteration, flying: tuple[StepHandle, ...], new_scale: float | None) -> str | None:
        """Why an update cannot count, where that is certain: a step in flight may still scale and look for inf."""
        if not self.enabled or any(step.scheduled_at > self._closed_at for step in flying):
            return None
        if not self.initialized:
            return NEVER_SCALED.format("update()")
        return NOTHING_TO_UPDATE if new_scale is None and not ended.checked() else None

    def everything(self) -> Barrier:
        """The barrier that waits for all steps in flight and publishes all closed iterations."""
        with self._lock:
            _, flying, failed = self._look_around()
            self._owed = max(self._owed, self._open.index - 1)
            return Barrier(self._owed, all_done(flying), (*failed, *flying))

    @staticmethod
    def _look_around() -> tuple[int, tuple[StepHandle, ...], tuple[StepHandle, ...]]:
        """Now, the steps in flight, and those whose error nobody saw."""
        now = tick()
        steps = [step for step in steps_in_flight() if step.scheduled_at < now]
        failed = tuple(step for step in steps if step.done())
        return now, tuple(step for step in steps if step not in failed), failed

    def _gate(self, target: int) -> Event[None]:
        """Happens when the steps of all closed iterations up to `target` are done (each waits for those before it)."""
        last = next((iteration for iteration in reversed(self._closed) if iteration.index <= target), None)
        return _NO_STEPS if last is None else last.done

    def pending(self) -> Event[None]:
        """Happens when the steps of every update called so far are done."""
        with self._lock:
            return self._gate(self._open.index)

    # --- settling ---

    def settle_pending(self) -> ScaleState:
        """Wait for the steps of every update called so far (blocks the thread), settle them; gives the newest state."""
        while True:
            self.pending().wait()
            with self._lock:
                if self.pending().done():
                    self._settle_through(self._open.index)
                    return self._newest

    def _settle_through(self, target: int) -> None:
        for iteration in self._closed:
            if iteration.result is None and iteration.index <= target:
                assert iteration.done.done(), "an iteration is settled after its steps"
                self._settle(iteration)

    def _settle(self, iteration: Iteration) -> None:
        if self.enabled and not iteration.discarded:
            found = [found for record in iteration.records.values() if (found := record.found_inf()) is not None]
            stepped = [record for record in iteration.records.values() if record.stage is Stage.STEPPED]
            if not self.initialized:
                iteration.failure = NEVER_SCALED.format("update()")
            elif not found and iteration.new_scale is None:
                iteration.failure = NOTHING_TO_UPDATE
            else:
                iteration.found_inf = sum(found) if found else None
                iteration.good = bool(stepped) and iteration.found_inf == 0
                skips = sum(1 for record in stepped if record.found_inf())
                self._newest = advance(self._newest, iteration.rules, iteration.found_inf, iteration.new_scale, skips)
        elif not self.enabled:
            iteration.good = True
        if iteration.failure is not None and any(step.event.error is not None for step in iteration.steps):
            iteration.failure = ""  # a step failed before it looked: its own error, raised elsewhere, says why
        iteration.records.clear()
        iteration.result = self._newest

    def finish(self, barrier: Barrier) -> UpdateOutcome:
        """Settle and publish what the barrier is entitled to; tell the outcome, or raise what has to be raised.

        The barrier's steps must be done. What is raised hides no outcome: the next one tells it.
        """
        with self._lock:
            published = self._publish_through(barrier.target)
            for step in barrier.steps:
                if step.unseen and (error := step.claim_error()) is not None:
                    self._forget_failures()
                    raise error
            if published:
                self._raise_if_too_many_skips()
            failures = [failure for failure in (*self._forget_failures(), barrier.failure) if failure]
            if failures:
                raise AssertionError(failures[0])
            told = list(self._untold)
            self._untold.clear()
            return UpdateOutcome(
                scale=self.scale(),
                skipped=any(iteration.found_inf for iteration in told),
                settled=len(told),
                good=sum(iteration.good for iteration in told),
            )

    def _publish_through(self, target: int) -> bool:
        """Settle and publish the closed iterations up to `target`; whether there were any. May warn, at the end."""
        self._settle_through(target)
        before, published = self.published.factor.value, False
        while self._closed and self._closed[0].index <= target:
            iteration = self._closed.popleft()
            iteration.steps = ()
            if not iteration.discarded:
                assert iteration.result is not None
                self._publish(iteration.result)
                self._untold.append(iteration)
                published = True
        now = self.published.factor.value
        if not self.warned and now < 1.0 <= before and any(iteration.found_inf for iteration in self._untold):
            self.warned = True
            warnings.warn(
                f"the loss scale fell below 1 (to {now!r}): gradients are inf or NaN whatever the scale, so the loss, "
                f"the data or the learning rate is at fault rather than the range of fp16",
                stacklevel=5,
            )
        return published

    def scale(self) -> float:
        """The scale in force; as given while nothing was scaled, 1.0 when disabled."""
        if not self.enabled:
            return 1.0
        factor = self.published.factor
        return factor.value if self.initialized else factor.raw

    def _forget_failures(self) -> list[str]:
        """Drop the updates that do not count from what is to be told; gives why they do not."""
        failures = [iteration.failure for iteration in self._untold if iteration.failure is not None]
        self._untold = deque(iteration for iteration in self._untold if iteration.failure is None)
        return failures

    def _raise_if_too_many_skips(self) -> None:
        limit, state = self.max_consecutive_skips, self.published
        if limit is None or state.consecutive_skips <= limit or not self._untold or not self._untold[-1].found_inf:
            return
        self._forget_failures()
        finite = "no gradients were finite yet"
        if state.last_finite is not None:
            finite = f"the last scale with finite gradients was {state.last_finite!r}"
        raise SkippedStepsError(
            f"{state.consecutive_skips} updates in a row found inf or NaN gradients, more than "
            f"max_consecutive_skips={limit}; the scale is {state.factor.value!r} now, and {finite}. Look for NaN in "
            f"the data or the loss, lower the learning rate, or load an earlier checkpoint"
        )

    def clone_state(self) -> ScaleState:
        """The newest state, for a clone: AssertionError where an iteration has begun. Steps in flight are waited for.

        Blocks the thread.
        """
        all_done(steps_in_flight()).wait()
        state = self.settle_pending()
        with self._lock:
            self._refuse_open(())
        return state

    def newest(self, flying: Iterable[StepHandle]) -> tuple[Event[None], Callable[[], ScaleState]]:
        """The state after every update called so far: an event, and what gives it once that happened. Never waits.

        AssertionError where an iteration has begun, by a record or by one of the steps in flight `flying`.
        """
        with self._lock:
            self._refuse_open(flying)
            if not self._closed:
                state = self._newest
                return _NO_STEPS, lambda: state
            last = self._closed[-1]
            return last.done, lambda: self._settled(last)

    def _settled(self, iteration: Iteration) -> ScaleState:
        with self._lock:
            self._settle_through(iteration.index)
            assert iteration.result is not None
            return iteration.result

    def _refuse_open(self, flying: Iterable[StepHandle]) -> None:
        if self._open.records or any(step.scheduled_at > self._closed_at for step in flying):
            raise AssertionError(
                "a GradScaler can be pickled or copied at the beginning of an iteration or after its update(), "
                "not between step() or unscale_() and update()"
            )
