"""Which replicas there are, in the process that holds a deployment's handle.

Ray ships our router's class with all globals of its own module, so what the router tells, it tells
here: this module is the same for both.
"""

from collections.abc import Callable

Watcher = Callable[[frozenset[str]], None]

_present: frozenset[str] = frozenset()
_watchers: list[Watcher] = []


def watch(watcher: Watcher) -> None:
    """Call it with the names of all replicas, now and whenever they change; from any thread."""
    _watchers.append(watcher)
    watcher(_present)


def tell(present: frozenset[str]) -> None:
    """The replicas that there are now."""
    global _present
    _present = present
    for watcher in _watchers:
        watcher(present)
