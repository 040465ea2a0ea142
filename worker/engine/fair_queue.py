"""A queue of requests in which projects take turns, so that none waits for all that another has asked."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from app.inference.protocol import Ask


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that was taken and has no row yet; `ids` are its prompt's tokens, where these were read already."""

    id: int
    project: str
    ask: Ask
    ids: list[int] | None = None


class FairQueue:
    """The waiting requests of all projects; true as long as there are any."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[Waiting]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._queues)

    @property
    def projects(self) -> list[str]:
        """The projects whose requests wait, in the order of their turns."""
        return list(self._queues)

    def peek(self, project: str) -> Waiting | None:
        """Return a project's next request, which stays in the queue."""
        return self._queues[project][0] if project in self._queues else None

    def add(self, waiting: Waiting) -> None:
        """Add a request to the end of its project's queue."""
        self._queues.setdefault(waiting.project, deque()).append(waiting)

    def take(self) -> Waiting:
        """Remove and return the next request; the next one after it is of another project, if any other waits."""
        return self.pop(next(iter(self._queues)))

    def take_first(self, may: Callable[[str], bool]) -> Waiting | None:
        """Remove and return the next request of a project for which `may` is true; None if there is none."""
        project = next((each for each in self._queues if may(each)), None)
        return None if project is None else self.pop(project)

    def pop(self, project: str) -> Waiting:
        """Remove and return a project's next request; its turn is over."""
        queue = self._queues[project]
        found = queue.popleft()
        if queue:
            self._queues.move_to_end(project)
        else:
            del self._queues[project]
        return found

    def drop(self, number: int) -> None:
        """Remove a request by its number, if it waits."""
        for project, queue in list(self._queues.items()):
            self._queues[project] = kept = deque(each for each in queue if each.id != number)
            if not kept:
                del self._queues[project]
