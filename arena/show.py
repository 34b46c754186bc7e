"""How a run is shown while it is played: terminal, dashboard, metrics, spans.

Whatever goes wrong here costs the show, never the run.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import structlog

from arena.dashboard.exhibit import LiveExhibit
from arena.dashboard.guard import Binding
from arena.dashboard.server import Dashboard, DashboardError, check_address
from arena.figures import Figures
from arena.metrics import LoopLag, Metrics
from arena.store import Row, Store, Tap, read
from arena.tracing import Tracer, open_tracer
from arena.watch import StoreFeed, Watch
from serving import HasMetrics

log = structlog.get_logger()

_LINGER_S = 2.0


class View(Protocol):
    """Shows a run in a terminal."""

    def announce(self, message: str) -> None:
        """Say one line about what is going on."""
        ...

    async def watch(self, read: Callable[[], Mapping[str, Any]]) -> None:
        """Show what `read` gives, a few times a second at most, until cancelled."""
        ...


@dataclass(frozen=True, slots=True)
class Show:
    """What shows a run while it is played."""

    view: View
    binding: Binding | None = None
    """Where the dashboard listens; None: there is none."""
    is_traced: bool = False

    async def check(self) -> None:
        """Raises DashboardError where the dashboard cannot listen, before anything is written."""
        if self.binding is not None:
            await check_address(self.binding)


EnginesOpened = Callable[[Mapping[str, HasMetrics]], None]
"""Is told the engines once they are open."""


@asynccontextmanager
async def showing(show: Show, store: Store) -> AsyncIterator[EnginesOpened]:
    """Show the run that `store` writes, from what it holds now to its end; gives what is to be told
    the engines once they are open.

    Nothing else may be adding to the store yet. It is closed before this ends, so that the last
    look sees everything.
    """
    tap = store.tap()
    await store.commit()  # what was added before is on disk
    tap.take()
    async with AsyncExitStack() as stack:
        opened: EnginesOpened = _nobody
        with _at_no_cost():
            opened = await _set_up(show, store, tap, stack)
        if opened is _nobody:
            tap.close()
        yield opened


def _nobody(engines: Mapping[str, HasMetrics]) -> None:
    """There is no show that wants to know."""


async def _set_up(show: Show, store: Store, tap: Tap, stack: AsyncExitStack) -> EnginesOpened:
    """Begin to show the run; what ends the show, from the last look on, is left on `stack`."""
    figures, spans = await asyncio.to_thread(_taken_up, store.folder)
    watch = Watch(StoreFeed(tap, store.clock), figures)
    lag = LoopLag()
    metrics = Metrics(figures, lag, verdict=lambda: watch.overview.verdict, now=watch.feed.now)
    if show.is_traced:
        with _at_no_cost():
            _trace(watch, store, spans, stack)
    if show.binding is not None:
        with _at_no_cost():
            await _serve(show, watch, store, metrics, stack)
        stack.push_async_callback(_end, asyncio.create_task(lag.run()))
    stack.push_async_callback(_end, asyncio.create_task(_view(show.view, watch)))
    stack.push_async_callback(_last_look, watch)
    stack.push_async_callback(_end, asyncio.create_task(_look(watch, tap)))
    return metrics.attach


async def _last_look(watch: Watch) -> None:
    with _at_no_cost():
        await watch.look(whole=True)


def _taken_up(folder: Path) -> tuple[Figures, list[Row]]:
    """Figures of what a run holds, and the rows that spans of later moves need."""
    held = read(folder)
    figures = Figures(held.run, held.matches, exact=False)
    figures.add(held.rows())
    made = Counter(ply.match_id for ply in held.plies)
    unfinished = {row.id: row for row in held.matches if row.state != "finished"}
    open_attempts = (
        a for a in held.attempts if a.match_id in unfinished and a.ply == made[a.match_id]
    )
    return figures, [*held.events, *unfinished.values(), *open_attempts]


async def _serve(
    show: Show, watch: Watch, store: Store, metrics: Metrics, stack: AsyncExitStack
) -> None:
    assert show.binding is not None
    exhibit = LiveExhibit(watch.overview, store.folder, metrics.text)
    dashboard = Dashboard(exhibit, show.binding)
    try:
        await dashboard.start()
    except DashboardError as error:
        show.view.announce(f"{error}; the run goes on without a dashboard")
        return
    stack.push_async_callback(_close, dashboard, exhibit)
    watch.listeners.append(exhibit.look)
    show.view.announce(f"dashboard: {dashboard.url}")


def _trace(watch: Watch, store: Store, spans: Sequence[Row], stack: AsyncExitStack) -> None:
    tracer: Tracer = open_tracer(watch.figures.run, store.clock)
    stack.push_async_callback(_close_tracer, tracer)
    tracer.add(spans)
    watch.row_listeners.append(tracer.add)


async def _look(watch: Watch, tap: Tap) -> None:
    with _at_no_cost():
        try:
            await watch.run()
        except Exception:
            tap.close()  # nobody will take from it any more
            raise


async def _view(view: View, watch: Watch) -> None:
    with _at_no_cost():
        await view.watch(watch.frame)


async def _close(dashboard: Dashboard, exhibit: LiveExhibit) -> None:
    with _at_no_cost():
        exhibit.end()
        if exhibit.is_watched:
            await asyncio.sleep(_LINGER_S)  # pages ask for what the last frame tells them of
    with _at_no_cost():
        await dashboard.close()


async def _close_tracer(tracer: Tracer) -> None:
    with _at_no_cost():
        await asyncio.to_thread(tracer.close)


@contextlib.contextmanager
def _at_no_cost() -> Iterator[None]:
    """A failure of the show is told, and ends the show alone."""
    try:
        yield
    # a bug in what shows a run must not end the run
    except Exception as error:  # noqa: BLE001
        log.error("show_lost", error=repr(error))


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
