"""Looking at a run that somebody else plays, or that is over: `arena watch`."""

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from arena.dashboard.client import fetch_frames
from arena.dashboard.exhibit import LiveExhibit
from arena.dashboard.guard import Binding
from arena.dashboard.server import Dashboard
from arena.figures import Figures
from arena.follow import Follower
from arena.metrics import Metrics
from arena.show import View
from arena.watch import PERIOD_S, FolderFeed, Watch


async def watch_folder(folder: Path, view: View, binding: Binding | None) -> str:
    """Show the run in a folder until it is over; with a dashboard, until cancelled.

    Returns one line on how it stands. Raises StoreError, DashboardError.
    """
    follower = await asyncio.to_thread(Follower, folder)
    with contextlib.closing(follower):
        figures = Figures(follower.run, follower.matches, exact=False)
        feed = FolderFeed(folder, follower, figures)
        watch = Watch(feed, figures)
        await watch.look(whole=True)
        viewing = asyncio.create_task(view.watch(watch.frame))
        try:
            if binding is None:
                await _until_over(watch, feed)
            else:
                await _serve(watch, feed, view, binding)
        finally:
            viewing.cancel()
            await asyncio.gather(viewing, return_exceptions=True)
        matches = figures.fleet()["matches"]
        return _standing(matches, figures.can_grow, f"`arena resume {folder}` goes on with it")


async def _until_over(watch: Watch, feed: FolderFeed) -> None:
    while feed.is_played():
        await asyncio.sleep(PERIOD_S)
        await watch.look()
    await watch.look(whole=True)


async def _serve(watch: Watch, feed: FolderFeed, view: View, binding: Binding) -> None:
    overview = watch.overview
    metrics = Metrics(
        watch.figures,
        None,
        verdict=lambda: None if overview.is_over else overview.verdict,
        now=feed.now,
    )
    exhibit = LiveExhibit(overview, feed.folder, metrics.text)

    def look(now: float, agents: Sequence[tuple[str, str]]) -> None:
        if feed.is_played():
            exhibit.ended = False  # somebody may have resumed it
            exhibit.look(now, agents)
        elif not exhibit.ended or not overview.is_over:
            exhibit.end()

    look(feed.now(), ())
    watch.listeners.append(look)
    async with Dashboard(exhibit, binding) as dashboard:
        view.announce(f"dashboard: {dashboard.url} (Ctrl-C ends it)")
        await watch.run()


def _standing(matches: Mapping[str, int], can_grow: bool, how_to_go_on: str) -> str:
    left = sum(matches.values()) - matches["finished"]
    if can_grow:
        return f"nobody plays this run now, {left} matches or more are left; {how_to_go_on}"
    if not left:
        return f"the run is over: {matches['finished']} matches finished"
    return f"nobody plays this run now, {left} matches are left; {how_to_go_on}"


async def watch_url(url: str, view: View) -> str:
    """Show the run behind a dashboard's address until it is over.

    Raises DashboardError where there is no dashboard, or none any more.
    """
    frames = fetch_frames(url)
    latest: Mapping[str, Any] = await anext(frames)
    told_at = time.monotonic()
    viewing = asyncio.create_task(
        view.watch(lambda: {**latest, "silent_s": time.monotonic() - told_at})
    )
    try:
        async with aclosing(frames):
            async for frame in frames:
                latest, told_at = frame, time.monotonic()
    finally:
        viewing.cancel()
        await asyncio.gather(viewing, return_exceptions=True)
    can_grow = bool(latest["run"].get("can_grow"))
    return _standing(
        latest["fleet"]["matches"], can_grow, "`arena resume` goes on with it where it is kept"
    )
