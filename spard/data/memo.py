"""A cache for functions of training rows: a job asks the same question about the same rows several times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from spard.data.rows import Example

Found = TypeVar("Found")
More = ParamSpec("More")


def keep_last(
    find: Callable[Concatenate[Sequence[Example], More], Found],
) -> Callable[Concatenate[Sequence[Example], More], Found]:
    """Cache a function's last result for as long as it is called with the same rows and arguments.

    Rows are the same if they are identical objects in the same order. The result is shared and must be immutable.
    """
    last: tuple[list[Example], object, Found] | None = None

    @wraps(find)
    def remember(rows: Sequence[Example], /, *args: More.args, **kwargs: More.kwargs) -> Found:
        nonlocal last
        kept, more = last, (args, kwargs)
        if (
            kept is None
            or kept[1] != more
            or len(kept[0]) != len(rows)
            or any(a is not b for a, b in zip(kept[0], rows, strict=True))
        ):
            last = kept = list(rows), more, find(rows, *args, **kwargs)
        return kept[2]

    return remember
