"""A dashboard read from afar."""

import asyncio
import json
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from typing import Any

import aiohttp
import aiohttp.http_exceptions
from yarl import URL

from arena.dashboard.server import DashboardError
from arena.frames import SCHEMA_VERSION, TELEMETRY_S

_SILENCE_S = 20.0
"""A stream that says nothing for so long, pings included, is lost."""
_AGAIN_S = 1.0
_PATIENCE_S = 30.0
"""How long a dashboard may be out of reach before it is given up."""
_LONGEST_FRAME = 1 << 25
"""Bytes."""


async def fetch_frames(url: str) -> AsyncGenerator[dict[str, Any], None]:
    """Full frames, without boards, of the dashboard at `url` (its address as the arena prints it,
    token and all), as they come, until the run is over.

    Raises DashboardError, one line.
    """
    where, headers = _address(url)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=_SILENCE_S)
    lost_since: float | None = -math.inf  # the first answer is not waited for
    frame: dict[str, Any] = {}
    async with aiohttp.ClientSession(timeout=timeout, read_bufsize=_LONGEST_FRAME) as session:
        while True:
            try:
                async for event_id, told in _events(session, where, headers):
                    lost_since, headers["Last-Event-ID"] = None, event_id
                    frame = told if told["full"] else merged(frame, told)
                    yield frame
                    if frame["ended"]:
                        return
            except aiohttp.http_exceptions.HttpProcessingError:
                raise DashboardError(f"{where.origin()}: is no dashboard of an arena") from None
            except (aiohttp.ClientError, TimeoutError) as error:
                said = " ".join(str(error).split()) or type(error).__name__
            else:
                said = "it closed the stream"
            now = time.monotonic()
            lost_since = now if lost_since is None else lost_since
            if now - lost_since > _PATIENCE_S:
                raise DashboardError(
                    f"{where.origin()}: no dashboard answers ({said}); is the run over?"
                )
            await asyncio.sleep(_AGAIN_S)


def merged(frame: Mapping[str, Any], delta: Mapping[str, Any]) -> dict[str, Any]:
    """The full frame that a delta makes of the one before; boards are left out."""
    agents = {(row["name"], row["game"]): row for row in (*frame["agents"], *delta["agents"])}
    telemetry = {
        name: _newest((*frame["telemetry"].get(name, ()), *delta["telemetry"].get(name, ())))
        for name in {**frame["telemetry"], **delta["telemetry"]}
    }
    return {
        **frame,
        **delta,
        "full": True,
        "agents": [agents[key] for key in sorted(agents)],
        "telemetry": telemetry,
        "boards": [],
        "gone": [],
    }


def _newest(buckets: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({bucket["at"]: bucket for bucket in buckets}.values())[-TELEMETRY_S:]


def _address(url: str) -> tuple[URL, dict[str, str]]:
    try:
        base = URL(url)
        where = base.with_query(None).with_fragment(None) / "api/events"
    except ValueError:
        raise DashboardError(f"{url[:80]!r}: is no address; write http://HOST:PORT") from None
    if base.scheme not in ("http", "https") or base.host is None:
        raise DashboardError(f"{url[:80]!r}: is no address; write http://HOST:PORT")
    token = base.query.get("token")
    return where, {} if token is None else {"Authorization": f"Bearer {token}"}


async def _events(
    session: aiohttp.ClientSession, where: URL, headers: Mapping[str, str]
) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Ids and frames of one connection."""
    async with session.get(where, headers=headers, allow_redirects=False) as answer:
        if answer.status in (401, 403):
            raise DashboardError(f"{where.origin()}: wants its token; give the address as printed")
        if answer.status >= 500:
            said = " ".join((await answer.text())[:200].split())
            raise aiohttp.ClientError(f"{answer.status} {said}")
        if answer.status != 200 or answer.content_type != "text/event-stream":
            raise DashboardError(f"{where.origin()}: is no dashboard of an arena")
        event_id = ""
        async for line in answer.content:
            name, _, value = line.rstrip(b"\r\n").partition(b": ")
            if name == b"id":
                event_id = value.decode()
            elif name == b"data":
                yield event_id, _frame(value, where)


def _frame(text: bytes, where: URL) -> dict[str, Any]:
    try:
        frame = json.loads(text)
    except ValueError:
        frame = None
    if not isinstance(frame, dict) or "fleet" not in frame:
        raise DashboardError(f"{where.origin()}: is no dashboard of an arena")
    if frame.get("schema_version") != SCHEMA_VERSION:
        raise DashboardError(f"{where.origin()}: is of another version of the arena than this one")
    return frame
