"""Where the search starts: drafts made by rule, each good for some shape of model.

*Spread* drafts split every stage's microbatches into the same number of groups, few forward and more backward: more
groups shorten fill and drain, and each uploads the parameters once more. *Wave* drafts give every device exactly one
run of equal length in each wave of N runs; repeated, nothing is ever idle, because N runs of one length follow each
other at one pace. Layers that do not fill a wave are spread so that they make waves too.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from roundpipe_async.scheduling.drafts import BACKWARD, FORWARD, FUSED, Draft, Problem, Stage

Cut = list[tuple[int, int]]  # (layers, groups) of consecutive stages


def even_groups(num_microbatch: int, count: int) -> tuple[int, ...]:
    """Sizes of `count` groups (as many as there are microbatches at most) that differ by at most one."""
    count = max(1, min(count, num_microbatch))
    least, more = divmod(num_microbatch, count)
    return (least + 1,) * more + (least,) * (count - more)


def spread_drafts(problem: Problem) -> Iterator[Draft]:
    """Every stage in the same groups: forward stages of 1 to 3 layers, the first ones single, backward of one."""
    counts = sorted({c for c in (1, 2, 4, problem.num_devices) if c <= problem.num_devices})
    body = problem.num_layers - 1
    for forward, backward, size in product(counts, counts, (1, 2, 3)):
        first = min(body, 4)
        sizes = [1] * first + [size] * ((body - first) // size)
        if sum(sizes) < body:
            sizes.append(body - sum(sizes))
        yield draft_of(problem, [(n, forward) for n in sizes], backward, [(1, backward)] * body, False)


def wave_cuts(problem: Problem, phase: int, num_layers: int) -> list[Cut]:
    """Ways to run `num_layers` in waves: stages of one to five layers, then (or before) the rest, spread."""
    devices = problem.num_devices
    rounds, rest = divmod(num_layers, devices)
    cuts: list[Cut] = []
    for size in range(1, 6):
        if size > max(rounds, 1) or not problem.allows(phase, 0, min(size, num_layers)):
            break
        sizes = [size] * (rounds // size) + ([rounds % size] if rounds % size else [])
        full: Cut = [(n, 1) for n in sizes for _ in range(devices)]
        for spread in _spread_rest(problem, phase, rest):
            for cut in (spread + full, full + spread):
                if cut not in cuts:
                    cuts.append(cut)
    return cuts


def _spread_rest(problem: Problem, phase: int, rest: int) -> list[Cut]:
    """Ways to give all devices equal parts of fewer layers than devices."""
    if rest == 0:
        return [[]]
    devices = problem.num_devices
    found: list[Cut] = [[(1, devices)] * rest]
    if problem.allows(phase, 0, rest):
        found.append([(rest, devices)])
    halves: Cut = []
    left = rest
    for part in range(devices - 1, 0, -1):  # `part` layers in devices / part groups each make one wave
        while devices % part == 0 and left >= part:
            halves += [(1, devices // part)] * part
            left -= part
    return [cut for cut in (*found, halves, halves[::-1]) if cut]


def draft_of(problem: Problem, forward: Cut, fused_groups: int, backward: Cut, in_turns: bool) -> Draft:
    """Stages from layer counts: forward up to the last layer, which is the fused stage, then backward down to 0."""
    count = problem.num_microbatch
    stages, at = [], 0
    for size, groups in forward:
        stages.append(Stage(FORWARD, at, at + size, even_groups(count, groups)))
        at += size
    stages.append(Stage(FUSED, at, problem.num_layers, even_groups(count, fused_groups)))
    for size, groups in backward:
        stages.append(Stage(BACKWARD, at - size, at, even_groups(count, groups)))
        at -= size
    assert at == 0, "backward must cover the layers that forward covered"
    return Draft(tuple(stages), in_turns)
