"""Which cases of a parametrised test a suite runs: covering arrays; `-m slow` runs the rest of the product.

    @pytest.mark.covering(1)  # `make test`: every value of a parameter occurs in some case
    @pytest.mark.parametrize(...)

`make test-all` runs every pair of values of two parameters in some case. Where that takes long, `covering(0, rest=1)` has
it run every value, and `covering(1, rest="slow")` what `make test` runs. What only `make test-all` runs is marked `full`.
Parameters that are tuples, fixtures' too, count as one factor for each element.
Cases of a GPU have an array of their own: where there is none, they cover nothing.
Where the product is out of reach, `pairwise` chooses the cases themselves.
Of what a test goes through in a loop, the fixture `sample` draws a part, twice as much for `make test-all`.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
Row = tuple[tuple[str, Hashable], ...]
"""The factors of a case, each with its value."""
Value = tuple[str, Any]
"""A factor with one of its values."""
DRAWS = 10
"""Draws of which `pairwise` takes the best: of models, 40 save one case in ten and take four times as long."""
PAIRS = 2
"""Strength of the arrays of `make test-all`."""
ELSEWHERE = ("nccl", "slow", "full")
"""Marks of cases that neither suite may run: they cover nothing."""


def mark_full(items: Iterable[pytest.Item]) -> None:
    """Mark `full` what no covering array needs of the tests that ask for one."""
    tests: defaultdict[tuple[bool, str, str | int, int], list[pytest.Function]] = defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("covering")
        if marker and isinstance(item, pytest.Function) and not any(map(item.get_closest_marker, ELSEWHERE)):
            on_gpu, rest = item.get_closest_marker("cuda") is not None, marker.kwargs.get("rest", PAIRS)
            tests[on_gpu, item.nodeid.partition("[")[0], rest, *marker.args].append(item)
    for (_, name, rest, strength), cases in tests.items():
        rows = [factors(case.callspec.params) for case in cases]
        fast = covering(rows, strength, name)
        more = fast if rest == "slow" else fast | covering(rows, rest, name)
        for number, case in enumerate(cases):
            if number not in fast:
                case.add_marker("full")
            if number not in more:
                case.add_marker("slow")


def everything_runs(config: pytest.Config) -> bool:
    """Whether -m leaves in what is `full`."""
    return "not full" not in config.getoption("markexpr")


def drawn(cases: Iterable[T], count: int, seed: str) -> list[T]:
    """Return `count` of the cases in their order, or all if there are no more."""
    listed = list(cases)
    places = random.Random(seed).sample(range(len(listed)), min(count, len(listed)))
    return [listed[place] for place in sorted(places)]


def factors(params: dict[str, Any]) -> Row:
    """Return the values of a case, tuples by their elements."""
    return tuple(itertools.chain.from_iterable(_flat(name, params[name]) for name in sorted(params)))


def _flat(name: str, value: Any) -> Iterator[tuple[str, Hashable]]:
    if isinstance(value, tuple):
        for place, element in enumerate(value):
            yield from _flat(f"{name}.{place}", element)
    else:
        yield name, _key(value)


def _key(value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value  # type: ignore[no-any-return]


def covering(rows: Sequence[Row], strength: int, seed: str) -> set[int]:
    """Return the numbers of rows in which every combination of `strength` values occurs that occurs in any row.

    Greedy: the row with the most new combinations comes next; among equals a draw of `seed` decides.
    """
    combinations = [set(itertools.combinations(row, min(strength, len(row)))) for row in rows]
    missing = set().union(*combinations)
    order = random.Random(seed).sample(range(len(rows)), len(rows))
    # What a row adds never grows: one that still adds what it did when it was last counted is the best.
    heap = [(-len(combinations[number]), place, number) for place, number in enumerate(order)]
    heapq.heapify(heap)
    chosen: set[int] = set()
    while missing:
        counted, place, number = heap[0]
        added = len(combinations[number] & missing)
        if added == -counted:
            heapq.heappop(heap)
            missing -= combinations[number]
            chosen.add(number)
        else:
            heapq.heapreplace(heap, (-added, place, number))
    return chosen


def uncovered(cases: Iterable[Mapping[str, Any]], levels: Mapping[str, Sequence[Any]]) -> set[tuple[Value, Value]]:
    """Return the pairs of values of two factors that occur in no case, factors in the order of `levels`."""
    pairs = itertools.combinations(levels, 2)
    missing = {((a, x), (b, y)) for a, b in pairs for x in levels[a] for y in levels[b]}
    for case in cases:
        missing.difference_update(itertools.combinations([(name, case[name]) for name in levels], 2))
    return missing


def pairwise(
    levels: Mapping[str, Sequence[Any]],
    refused: Iterable[tuple[Value, Value]],
    legal: Callable[[dict[str, Any]], bool],
    seed: str,
) -> list[dict[str, Any]]:
    """Return cases in which every pair of values of two factors occurs but those in `refused`.

    legal: whether a case without refused pairs may be chosen. Greedy: of some draws that have the first missing pair, the
    one with the most missing pairs comes next. Source: Cohen et al., The AETG System (1997).
    Raises: LookupError for a missing pair that no draw has.
    """
    rng, chosen = random.Random(seed), []
    banned: defaultdict[Value, set[Value]] = defaultdict(set)
    for one, other in refused:
        banned[one].add(other)
        banned[other].add(one)
    missing = {pair: None for pair in sorted(uncovered((), levels), key=str) if pair[1] not in banned[pair[0]]}
    while missing:
        first = next(iter(missing))
        tries = (_drawn(rng, levels, banned, first) for _ in range(50 * DRAWS))
        draws = list(itertools.islice((case for case in tries if case and legal(case)), DRAWS))
        if not draws:
            raise LookupError(f"no case has {first}: name it among the refused pairs, with the reason")
        held = [list(itertools.combinations([(name, case[name]) for name in levels], 2)) for case in draws]
        best = max(range(len(draws)), key=lambda number: sum(pair in missing for pair in held[number]))
        chosen.append(draws[best])
        for pair in held[best]:
            missing.pop(pair, None)
    return chosen


def _drawn(
    rng: random.Random,
    levels: Mapping[str, Sequence[Any]],
    banned: Mapping[Value, set[Value]],
    pair: tuple[Value, Value],
) -> dict[str, Any] | None:
    """A case with the pair, and in all else a draw of what goes with what was drawn before; None if nothing does."""
    case = dict(pair)
    out = banned[pair[0]] | banned[pair[1]]
    for name in levels:
        if name not in case:
            free = [value for value in levels[name] if (name, value) not in out]
            if not free:
                return None
            case[name] = rng.choice(free)
            out |= banned[name, case[name]]
    return case
