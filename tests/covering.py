"""Which cases of a parametrised test the fast suite runs: a covering array; `make test-all` runs the product.

    @pytest.mark.covering(2)  # every pair of values of two parameters occurs in some case
    @pytest.mark.parametrize(...)

Parameters that are tuples, fixtures' too, count as one factor for each element. The cases left out are marked `full`.
Cases of a GPU have an array of their own: where there is none, they cover nothing.
Where the whole product takes long, `make test-all` runs a covering array too: `covering(0, rest=1)` one of strength 1, and
`covering(2, rest="slow")` that of `make test`; the other cases are left to `-m slow`.
Of what a test goes through in a loop, the fixture `sample` draws a part, four times as much for `make test-all`.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
Row = tuple[tuple[str, Hashable], ...]
"""The factors of a case, each with its value."""
ELSEWHERE = ("nccl", "slow", "full")
"""Marks of cases that neither suite may run: they cover nothing."""


def mark_full(items: Iterable[pytest.Item]) -> None:
    """Mark `full` what no covering array needs of the tests that ask for one."""
    tests: defaultdict[tuple[bool, str, str | int, int], list[pytest.Function]] = defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("covering")
        if marker and isinstance(item, pytest.Function) and not any(map(item.get_closest_marker, ELSEWHERE)):
            on_gpu, rest = item.get_closest_marker("cuda") is not None, marker.kwargs.get("rest", "full")
            tests[on_gpu, item.nodeid.partition("[")[0], rest, *marker.args].append(item)
    for (_, name, rest, strength), cases in tests.items():
        rows = [factors(case.callspec.params) for case in cases]
        fast = covering(rows, strength, name)
        everything = {"full": set(range(len(cases))), "slow": fast}
        more = fast | covering(rows, rest, name) if isinstance(rest, int) else everything[rest]
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
