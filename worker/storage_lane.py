"""Run uploads in one background thread, so that a storage that hangs does not delay a job's news."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Condition, Thread, current_thread

_JOIN_S = 2.0  # for what is being stored when an attempt ends early; the storage may hang

Apply = Callable[[], object]  # applies a task's result; called in the listening thread
Task = Callable[[], Apply | None]


class StorageLane:
    """Runs tasks one after the other, in order of submission, in its own thread; one other thread uses it.

    A task may return a function, which `apply_results` calls in the using thread.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._tasks: deque[tuple[str | None, Task]] = deque()
        self._results: deque[Apply] = deque()
        self._is_busy = self._is_closed = False
        self._error: BaseException | None = None
        self._thread: Thread | None = None

    @property
    def is_idle(self) -> bool:
        """Return True if all submitted tasks are done."""
        with self._changed:
            return not self._tasks and not self._is_busy

    def submit(self, task: Task, key: str | None = None) -> None:
        """Queue a task; a queued task with the same `key` that has not begun is dropped."""
        with self._changed:
            if key is not None:
                self._tasks = deque(each for each in self._tasks if each[0] != key)
            self._tasks.append((key, task))
            if self._thread is None:
                self._thread = Thread(target=self._run, name=f"{current_thread().name} storage", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def apply_results(self) -> None:
        """Call the functions that finished tasks have returned; raise the first error of a task."""
        while True:
            with self._changed:
                if self._error is not None:
                    raise self._error
                if not self._results:
                    return
                apply = self._results.popleft()
            apply()

    def wait(self, timeout_s: float) -> None:
        """Wait until all tasks are done, but no longer than `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._tasks and not self._is_busy, timeout_s)

    def close(self) -> None:
        """Drop the tasks that have not begun, and wait up to 2 s for the running one."""
        with self._changed:
            self._is_closed = True
            self._tasks.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while (task := self._next()) is not None:
            apply: Apply | None = None
            try:
                apply = task()
            except BaseException as error:
                with self._changed:
                    self._error = self._error or error
            with self._changed:
                if apply is not None:
                    self._results.append(apply)
                self._is_busy = False
                self._changed.notify_all()

    def _next(self) -> Task | None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._tasks) or self._is_closed)
            if self._is_closed:
                return None
            self._is_busy = True
            return self._tasks.popleft()[1]
