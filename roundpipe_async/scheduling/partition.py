"""Cutting layers into stages, exactly: the arithmetic behind `plan.balanced_plan`, free of plans and models.

A *cut* is the ascending list of boundaries of consecutive stages: [0, 3, 5] are stages 0..2 and 3..4. For a given
longest stage time T, the fewest stages come from filling each stage as far as it goes; the best T is found among the
sums of consecutive layers, which are the only values where the count of stages changes. Among the cuts with that T
and count, dynamic programming takes the one with the least sum of squared times.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

INFINITE = float("inf")


@dataclass(frozen=True, slots=True)
class Weights:
    """One model's layers: time in the forward pass, in the fused stage, in a backward stage; parameter bytes."""

    forward: Sequence[float]
    fused: Sequence[float]
    backward: Sequence[float]
    size: Sequence[float]


class Cuts(NamedTuple):
    """Boundaries of the forward and the backward stages; a fused stage is the last backward one."""

    forward: list[int]
    backward: list[int]


class _Track:
    """Consecutive layers of one pass: prefix sums of times, and how far a stage that starts at a layer may reach."""

    def __init__(self, times: Sequence[float], size: Sequence[float], size_limit: float) -> None:
        self.length = len(times)
        self.prefix = [0.0, *accumulate(times)]
        sizes = [0.0, *accumulate(size)]
        self.reach = [max(i + 1, bisect_right(sizes, sizes[i] + size_limit) - 1) for i in range(self.length)]

    def sums(self) -> set[float]:
        at = self.prefix
        return {at[b] - at[a] for a in range(self.length) for b in range(a + 1, self.reach[a] + 1)}

    def time(self, a: int, b: int) -> float:
        return self.prefix[b] - self.prefix[a]

    def fits(self, a: int, b: int, longest: float) -> bool:
        return b <= self.reach[a] and self.time(a, b) <= longest

    def counts(self, longest: float) -> list[int]:
        """counts[k]: fewest stages for the first k layers. Every single layer must fit `longest`."""
        counts, start, used = [0], 0, 1
        for k in range(1, self.length + 1):
            if not self.fits(start, k, longest):
                start, used = k - 1, used + 1
            counts.append(used)
        return counts

    def squares(self, longest: float, max_stages: int) -> tuple[list[list[float]], list[list[int]]]:
        """best[n][k]: least sum of squared times of n stages over the first k layers; start[n][k]: the last one's."""
        n_layers = self.length
        best = [[0.0] + [INFINITE] * n_layers]
        starts = [[0] * (n_layers + 1)]
        for _ in range(min(max_stages, n_layers)):
            before, row, start = best[-1], [INFINITE] * (n_layers + 1), [0] * (n_layers + 1)
            for a in range(n_layers):
                if before[a] == INFINITE:
                    continue
                for b in range(a + 1, self.reach[a] + 1):
                    time = self.time(a, b)
                    if time > longest:
                        break
                    value = before[a] + time * time
                    if value < row[b]:
                        row[b], start[b] = value, a
            best.append(row)
            starts.append(start)
        return best, starts


class _Model:
    """One model's part in the search: how many stages it needs for a longest stage, and its best cut."""

    def __init__(self, run_type: str, weights: Weights, size_limit: float | None) -> None:
        limit = INFINITE if size_limit is None else size_limit
        self.run_type = run_type
        self.length = len(weights.forward)
        self.forward = _Track(weights.forward, weights.size, limit)
        self.backward = _Track(weights.backward, weights.size, limit / 2)
        self.fused = _Track(weights.fused, weights.size, limit / 2)

    def longest_layer(self) -> float:
        last = self.length - 1
        ends = self.length if self.run_type != "fused" else last
        times = [self.forward.time(i, i + 1) for i in range(ends)]
        if self.run_type != "infer":
            times += [self.backward.time(i, i + 1) for i in range(ends)]
        if self.run_type == "fused":
            times.append(self.fused.time(last, last + 1))
        return max(times)

    def sums(self) -> set[float]:
        if self.run_type == "infer":
            return self.forward.sums()
        both = self.forward.sums() | self.backward.sums()
        if self.run_type == "fused":
            both |= {self.fused.time(k, self.length) for k in range(self.length)}
        return both

    def possible(self, longest: float) -> tuple[int, ...]:
        """The counts of stages that it can have, as bits of an int; for `train` one int for each pass.

        Not every count between the fewest and the most is possible with a fused stage: two layers make one or three.
        """
        n = self.length
        forward = self.forward.counts(longest)
        if self.run_type == "infer":
            return (_bits(forward[-1], n),)
        backward = self.backward.counts(longest)
        if self.run_type == "train":
            return _bits(forward[-1], n), _bits(backward[-1], n)
        found = 0
        for k in self._fused_starts(longest):
            found |= _bits(forward[k] + backward[k] + 1, 2 * k + 1)
        return (found,)

    def most_stages(self) -> tuple[int, ...]:
        n = self.length
        return {"infer": (n,), "train": (n, n), "fused": (2 * n - 1,)}[self.run_type]

    def _fused_starts(self, longest: float) -> list[int]:
        return [k for k in range(self.length) if self.fused.fits(k, self.length, longest)]

    def options(self, longest: float, max_stages: int, part: int) -> dict[int, tuple[float, Cuts]]:
        """For each possible count of stages of pass `part`: the least sum of squares, and the cut that has it."""
        if self.run_type == "fused":
            return self._fused_options(longest, max_stages)
        track = (self.forward, self.backward)[part]
        best, starts = track.squares(longest, max_stages)
        found = {}
        for n in range(1, len(best)):
            if best[n][-1] < INFINITE:
                cut = _walk(starts, n, self.length)
                found[n] = (best[n][-1], Cuts(cut, []) if part == 0 else Cuts([], cut))
        return found

    def _fused_options(self, longest: float, max_stages: int) -> dict[int, tuple[float, Cuts]]:
        forward, forward_starts = self.forward.squares(longest, max_stages)
        backward, backward_starts = self.backward.squares(longest, max_stages)
        chosen: dict[int, tuple[float, int, int, int]] = {}
        for k in self._fused_starts(longest):
            fused_square = self.fused.time(k, self.length) ** 2
            for f, row in enumerate(forward):
                if row[k] == INFINITE:
                    continue
                for b in range(min(len(backward) - 1, max_stages - f - 1) + 1):
                    value = row[k] + backward[b][k] + fused_square
                    count = f + b + 1
                    if value < INFINITE and (count not in chosen or value < chosen[count][0]):
                        chosen[count] = (value, k, f, b)
        return {
            count: (value, Cuts(_walk(forward_starts, f, k), [*_walk(backward_starts, b, k), self.length]))
            for count, (value, k, f, b) in chosen.items()
        }


def best_cuts(
    run_type: str, weights: Sequence[Weights], min_stages: int, upper_threshold: float, size_limit: float | None
) -> list[Cuts]:
    """The cuts with the least (stages x longest stage); `plan.balanced_plan` states the limits and the ties."""
    models = [_Model(run_type, w, size_limit) for w in weights]
    longest_layer = max(model.longest_layer() for model in models)
    wanted = [min(min_stages, sum(most)) for most in zip(*(model.most_stages() for model in models), strict=True)]
    longest, counts = _best_longest(models, wanted, longest_layer, upper_threshold)
    cuts = [Cuts([], []) for _ in models]
    for part, count in enumerate(counts):
        for cut, chosen in zip(cuts, _share(models, longest, count, part), strict=True):
            cut.forward.extend(chosen.forward)
            cut.backward.extend(chosen.backward)
    return cuts


def even_cut(times: Sequence[float], num_stages: int) -> list[int]:
    """Boundaries of at most `num_stages` stages with the least longest time, then the least sum of squares."""
    track = _Track(times, [0.0] * len(times), INFINITE)
    single = max(track.time(i, i + 1) for i in range(track.length))
    candidates = sorted(t for t in track.sums() if t >= single)
    longest = candidates[bisect_left(candidates, True, key=lambda t: track.counts(t)[-1] <= num_stages)]
    _, starts = track.squares(longest, num_stages)
    return _walk(starts, min(num_stages, track.length), track.length)


def _best_longest(
    models: Sequence[_Model], wanted: Sequence[int], longest_layer: float, upper_threshold: float
) -> tuple[float, list[int]]:
    bound = upper_threshold * longest_layer
    candidates = sorted(t for t in set().union(*(m.sums() for m in models)) if longest_layer <= t <= bound)

    def counts(i: int) -> list[int]:
        parts = zip(*(model.possible(candidates[i]) for model in models), strict=True)
        return [_least_sum(part, least) for part, least in zip(parts, wanted, strict=True)]

    best: tuple[float, int] | None = None
    chosen = len(candidates) - 1
    high = chosen
    while high >= 0:
        total = sum(counts(high))
        if best is not None and total * longest_layer > best[0]:
            break
        low, top = 0, high  # the smallest candidate with this count; counts only fall as the longest stage grows
        while low < top:
            middle = (low + top) // 2
            low, top = (low, middle) if sum(counts(middle)) <= total else (middle + 1, top)
        value = (candidates[low] * total, total)
        if best is None or value < best:
            best, chosen = value, low
        high = low - 1
    return candidates[chosen], counts(chosen)


def _share(models: Sequence[_Model], longest: float, count: int, part: int) -> list[Cuts]:
    """Exactly `count` stages over all models with the least sum of squares: a knapsack over the models' options."""
    reached: dict[int, tuple[float, list[Cuts]]] = {0: (0.0, [])}
    for model in models:
        options = model.options(longest, count, part)
        following: dict[int, tuple[float, list[Cuts]]] = {}
        for used, (value, cuts) in reached.items():
            for more, (square, cut) in options.items():
                total = used + more
                if total <= count and (total not in following or value + square < following[total][0]):
                    following[total] = (value + square, [*cuts, cut])
        reached = following
    return reached[count][1]


def _bits(low: int, high: int) -> int:
    return (1 << (high + 1)) - (1 << low)


def _least_sum(possible: Sequence[int], least: int) -> int:
    """The smallest number, not below `least`, that is a sum of one possible count of each model."""
    sums = possible[0]
    for counts in possible[1:]:
        added = 0
        for n in range(counts.bit_length()):
            if counts >> n & 1:
                added |= sums << n
        sums = added
    above = sums >> least
    return least + (above & -above).bit_length() - 1


def _walk(starts: Sequence[Sequence[int]], n: int, k: int) -> list[int]:
    cut = [k]
    for stage in range(n, 0, -1):
        k = starts[stage][k]
        cut.append(k)
    return cut[::-1]
