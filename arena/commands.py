"""What each `arena` command does. Each takes the parsed command line and returns an exit code."""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO, TypeVar

from arena import (
    bench,
    chart_page,
    compare,
    compare_page,
    forecast,
    overload,
    page,
    plan,
    plan_page,
    preflight,
    replay,
    replica_bench,
    report,
    runner,
    shape_bench,
    shapes_page,
    simulate,
    simulate_fleet,
    simulate_page,
    spectator,
    stopping,
    store,
    tables,
    terminal,
)
from arena import config as configs
from arena import records as games
from arena.config import ConfigError, RunConfig
from arena.dashboard.guard import TOKEN_VARIABLE, Binding, parse_binding
from arena.dashboard.server import DashboardError
from arena.show import Show
from arena.store import StoreError, WriteError
from arena.tracing import check_installed
from serving import EngineError
from serving.fake_server import serve

OK, CHECK_FAILED, USAGE, ENGINE_FAILED, INTERRUPTED = 0, 1, 2, 3, 130

_T = TypeVar("_T")


def _run(parsed: argparse.Namespace) -> int:
    config = configs.load(parsed.config, parsed.set)
    show = _show_of(parsed)
    folder = parsed.out or runner.new_folder(config)
    outcome = runner.run_loop(runner.start(config, folder, show, replace=parsed.replace))
    return _conclude(folder, outcome)


def _resume(parsed: argparse.Namespace) -> int:
    going_on = runner.resume(parsed.dir, _show_of(parsed), parsed.set)
    return _conclude(parsed.dir, runner.run_loop(going_on))


def _stop(parsed: argparse.Namespace) -> int:
    pid = stopping.stop(parsed.dir, parsed.after)
    print(f"process {pid} ends after its current {parsed.after}", file=sys.stderr)
    return OK


def _show_of(parsed: argparse.Namespace) -> Show:
    """How the run is to be shown; ConfigError where that cannot be."""
    try:
        binding = parse_binding(parsed.dashboard)
        if parsed.otel:
            check_installed()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    _check_token_is_seen(binding, parsed.view)
    return Show(terminal.view_for(parsed.view), binding, parsed.otel)


def _check_token_is_seen(binding: Binding | None, view: str) -> None:
    """A token that is made for one run stands in the address that the view announces."""
    if (
        view == "none"
        and binding is not None
        and binding.token
        and TOKEN_VARIABLE not in os.environ
    ):
        raise ConfigError(
            f"--view none: nobody would see the dashboard's token; set {TOKEN_VARIABLE}, or choose "
            "another view"
        )


def _watch(parsed: argparse.Namespace) -> int:
    view = terminal.view_for(parsed.view)
    if "://" in parsed.run:
        if parsed.dashboard is not None:
            raise ConfigError("--dashboard: that run has one already; open its address")
        watching = spectator.watch_url(parsed.run, view)
    else:
        try:
            binding = None if parsed.dashboard is None else parse_binding(parsed.dashboard)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        _check_token_is_seen(binding, parsed.view)
        watching = spectator.watch_folder(Path(parsed.run), view, binding)
    print(runner.run_loop(watching), file=sys.stderr)
    return OK


def _conclude(folder: Path, outcome: runner.Outcome) -> int:
    """Print the summary of what is on disk, and turn the outcome into an exit code."""
    try:
        terminal.print_report(report.build(store.read(folder)), sys.stdout)
        sys.stdout.flush()
    except BrokenPipeError:
        terminal.let_go_of_stdout()
    except WriteError:  # the outcome says so: on a disk without any room nothing can be read either
        pass
    if outcome.message:
        print(f"arena: {outcome.message}", file=sys.stderr)
    print(f"run folder: {folder}", file=sys.stderr)
    return {
        "finished": OK,
        "unfinished": CHECK_FAILED,
        "engine_failed": ENGINE_FAILED,
        "interrupted": INTERRUPTED,
    }[outcome.ending]


def _validate(parsed: argparse.Namespace) -> int:
    config = configs.load(parsed.config, parsed.set)
    forecast = preflight.check(config)
    if parsed.json:
        _print_json(
            {
                "schema_version": 1,
                "name": config.name,
                "matches": forecast.matches,
                "requests_at_most": forecast.requests,
                "seconds_at_pace": forecast.seconds,
                "notes": list(forecast.notes),
            }
        )
        return OK
    requests = "no ply cap, so no bound" if forecast.requests is None else f"{forecast.requests:,}"
    seconds = (
        "unknown"
        if forecast.seconds is None
        else f"about {forecast.seconds:,.0f} s if every seat keeps the pace"
    )
    bound = "at most " if config.can_grow else ""
    print(f"{config.name}: {bound}{forecast.matches} matches")
    print(f"requests at most: {requests}")
    print(f"duration: {seconds}")
    for note in forecast.notes:
        print(f"note: {note}")
    return OK


def _report(parsed: argparse.Namespace) -> int:
    records = store.read(parsed.dir)
    if parsed.html is not None:
        page.write(parsed.html, records)
    elif parsed.pgn is not None:
        games.write_pgn(parsed.pgn, records)
    elif parsed.csv is not None:
        tables.write(parsed.csv, records)
    elif parsed.json:
        _print_json(report.build(records))
    else:
        terminal.print_report(report.build(records), sys.stdout)
    written = parsed.html or parsed.pgn or parsed.csv
    if written is not None:
        print(f"written: {written}", file=sys.stderr)
    return OK


def _replay(parsed: argparse.Namespace) -> int:
    result = replay.build(store.read(parsed.dir))
    if parsed.json:
        _print_json(result)
    else:
        for line in replay.lines(result):
            print(line)
    return OK if result["is_same"] else CHECK_FAILED


def _compare(parsed: argparse.Namespace) -> int:
    config = configs.load(parsed.config, parsed.set)
    if parsed.html is not None:
        chart_page.check(parsed.html)
    with contextlib.ExitStack() as stack:
        logs = parsed.logs or Path(tempfile.mkdtemp(prefix="arena-compare-"))
        if parsed.logs is None:
            stack.callback(shutil.rmtree, logs, ignore_errors=True)
        options = compare.CompareOptions(
            logs,
            parsed.seconds,
            parsed.repeats,
            parsed.concurrency and tuple(parsed.concurrency),
            parsed.workload,
            parsed.save_workload,
        )
        result = runner.run_loop(_comparing(config, parsed.engine, options))
        has_failed = any(engine["failures"] for engine in result["engines"])
        if has_failed and parsed.logs is None and any(logs.iterdir()):
            stack.pop_all()  # what failed names them
            print(f"kept: the engines' logs in {logs}", file=sys.stderr)
    if result["interrupted"] and not any(cell["offered"] for cell in result["cells"]):
        raise KeyboardInterrupt
    try:
        if parsed.html is not None:
            compare_page.write(parsed.html, result)
    finally:  # it took long, and is told also where the page cannot be written
        if parsed.json:
            _print_json(result)
        else:
            terminal.print_compare(result, sys.stdout)
    if parsed.html is not None:
        sys.stdout.flush()
        print(f"written: {parsed.html}", file=sys.stderr)
    if result["interrupted"]:
        print("arena: interrupted", file=sys.stderr)
        return INTERRUPTED
    return ENGINE_FAILED if has_failed else OK


async def _comparing(
    config: RunConfig, names: Sequence[str], options: compare.CompareOptions
) -> dict[str, Any]:
    """Compare; Ctrl-C or a SIGTERM ends it with what was measured until then."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    announce = terminal.view_for("plain").announce
    return await compare.run(config, names, options, announce=announce, stop=stop)


def _simulate(parsed: argparse.Namespace) -> int:
    if parsed.html is not None:
        chart_page.check(parsed.html)
    result = _simulated(parsed)
    _tell(result, parsed, simulate_page.write, terminal.print_simulation)
    return OK if simulate_fleet.all_within(result.get("against", ())) else CHECK_FAILED


def _simulated(parsed: argparse.Namespace) -> dict[str, Any]:
    def options(kind: type[_T]) -> _T:
        names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
        return kind(**{name: getattr(parsed, name) for name in names})

    if parsed.kind == "batching":
        return simulate.batching(options(simulate.BatchingOptions))
    if parsed.kind == "paging":
        return simulate.paging(options(simulate.PagingOptions))
    engine = options(simulate_fleet.EngineOptions)
    if parsed.kind == "overload":
        return simulate_fleet.overload(options(simulate_fleet.OverloadOptions), engine)
    return simulate_fleet.fleet(options(simulate_fleet.FleetOptions), engine)


def _plan(parsed: argparse.Namespace) -> int:
    if parsed.html is not None:
        chart_page.check(parsed.html)
    if parsed.config is None and parsed.set:
        raise ConfigError("--set: changes a config; give the config too")
    config = None if parsed.config is None else configs.load(parsed.config, parsed.set)
    result = plan.build(plan.ask_of(config, parsed))
    _tell(result, parsed, plan_page.write, terminal.print_plan)
    return OK


def _tell(
    result: dict[str, Any],
    parsed: argparse.Namespace,
    write: Callable[[Path, dict[str, Any]], None],
    show: Callable[[dict[str, Any], TextIO], None],
) -> None:
    """A result as the command line wants it: as a page, as JSON, or for people."""
    if parsed.html is not None:
        write(parsed.html, result)
        print(f"written: {parsed.html}", file=sys.stderr)
    elif parsed.json:
        _print_json(result)
    else:
        show(result, sys.stdout)


def _fake_server(parsed: argparse.Namespace) -> int:
    config = configs.load_fake_server(parsed.config, parsed.set)
    if not 0 <= parsed.port <= 65535:
        raise ConfigError(f"--port: {parsed.port} is not one of 0 to 65535")
    if not parsed.host:
        raise ConfigError("--host: give one; 0.0.0.0 is every address of this machine")
    urls: list[str] = []

    def started(url: str) -> None:
        urls.append(url)
        print(url, flush=True)

    try:
        _run_terminable(serve(config, parsed.host, parsed.port, started))
    except (OSError, UnicodeError) as error:
        if urls:
            raise
        why = getattr(error, "strerror", None) or str(error)
        host = f"[{parsed.host}]" if ":" in parsed.host else parsed.host
        raise ConfigError(
            f"--port: {host}:{parsed.port} cannot be listened on ({why}); name another"
        ) from None
    return OK


def _run_terminable(work: Coroutine[Any, Any, _T]) -> _T:
    """Run the work on a loop of its own. A SIGTERM ends it as Ctrl-C does, also where Ctrl-C is
    ignored, as in what a shell starts in the background: KeyboardInterrupt, with all closed."""
    try:
        return runner.run_loop(_ended_by_sigterm(work))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _ended_by_sigterm(work: Coroutine[Any, Any, _T]) -> _T:
    """Do the work; the first SIGTERM cancels it, and later ones leave it to close what it has."""
    loop, doing = asyncio.get_running_loop(), asyncio.ensure_future(work)

    def end() -> None:
        loop.add_signal_handler(signal.SIGTERM, lambda: None)
        doing.cancel()

    loop.add_signal_handler(signal.SIGTERM, end)
    return await doing


def _bench_games(parsed: argparse.Namespace) -> int:
    return _show_bench(bench.games(), parsed)


def _bench_overhead(parsed: argparse.Namespace) -> int:
    return _show_bench(bench.overhead(), parsed)


def _bench_pace(parsed: argparse.Namespace) -> int:
    if not 1 <= parsed.seconds <= 3600:
        raise ConfigError("--seconds: give 1 to 3600")
    if min(parsed.seats) < 2 or any(seats % 2 for seats in parsed.seats):
        raise ConfigError("--seats: a match has two seats; give even numbers")
    return _show_bench(bench.pace(parsed.seats, parsed.seconds), parsed)


def _bench_dashboard(parsed: argparse.Namespace) -> int:
    return _show_bench(bench.dashboard(), parsed)


def _bench_admission(parsed: argparse.Namespace) -> int:
    result = _measured(
        parsed, overload.measure, seconds=parsed.seconds, repeats=parsed.repeats, load=parsed.load
    )
    return ENGINE_FAILED if result is None else _show_bench(result, parsed)


def _bench_forecast(parsed: argparse.Namespace) -> int:
    result = _measured(parsed, forecast.measure, seconds=parsed.seconds, rounds=parsed.rounds)
    if result is None:
        return ENGINE_FAILED
    _show_bench(result, parsed)
    return OK if simulate_fleet.all_within(result["cells"]) else CHECK_FAILED


def _bench_shape(parsed: argparse.Namespace) -> int:
    if parsed.html is not None:
        chart_page.check(parsed.html)
    result = _measured(
        parsed,
        shape_bench.measure,
        streams=parsed.streams,
        seconds=parsed.seconds,
        repeats=parsed.repeats,
    )
    if result is None:
        return ENGINE_FAILED
    _tell(result, parsed, shapes_page.write, terminal.print_shapes)
    return OK if result["repeats"] == parsed.repeats else ENGINE_FAILED


def _bench_replicas(parsed: argparse.Namespace) -> int:
    options = replica_bench.ReplicaOptions(
        replicas=parsed.replicas,
        matches_per_replica=parsed.matches_per_replica,
        latency=parsed.latency,
        seconds=parsed.seconds,
        repeats=parsed.repeats,
    )
    announce = terminal.view_for("plain").announce
    result = _found(replica_bench.measure(options, announce=announce))
    if result is None:
        return ENGINE_FAILED
    if parsed.json:
        _print_json(result)
    else:
        terminal.print_replicas(result, sys.stdout)
    return OK if replica_bench.all_within(result) else CHECK_FAILED


def _measured(
    parsed: argparse.Namespace,
    measure: Callable[..., Coroutine[Any, Any, dict[str, Any]]],
    **options: Any,
) -> dict[str, Any] | None:
    """What `measure` finds of the engine named on the command line; None, and a line that says why,
    where it could not be measured. The engine's log is thrown away."""
    config = configs.load(parsed.config, parsed.set)
    announce = terminal.view_for("plain").announce
    with tempfile.TemporaryDirectory() as logs:
        return _found(measure(config, parsed.engine, logs=Path(logs), announce=announce, **options))


def _found(measuring: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any] | None:
    """What was measured; None, and a line that says why, where an engine failed."""
    try:
        return _run_terminable(measuring)
    except EngineError as error:
        print(f"arena: {error}", file=sys.stderr)
        return None


def _show_bench(result: dict[str, Any], parsed: argparse.Namespace) -> int:
    if parsed.json:
        _print_json(result)
    else:
        terminal.print_tree(result, sys.stdout)
    return OK


def _reference(parsed: argparse.Namespace) -> int:
    print(configs.reference(), end="")
    return OK


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def _refusing(command: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """A command that turns what the user has to mend into one line and exit code 2."""

    def run(parsed: argparse.Namespace) -> int:
        runner.log_to_stderr()
        try:
            code = command(parsed)
            sys.stdout.flush()
            return code
        except (ConfigError, StoreError, DashboardError) as error:
            print(f"arena: {error}", file=sys.stderr)
            return USAGE
        except BrokenPipeError:
            terminal.let_go_of_stdout()
            return OK
        except OSError as error:
            terminal.let_go_of_stdout()
            print(f"arena: the output cannot be written ({error.strerror})", file=sys.stderr)
            return CHECK_FAILED

    return run


COMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    name: _refusing(command)
    for name, command in {
        "run": _run,
        "resume": _resume,
        "stop": _stop,
        "watch": _watch,
        "validate": _validate,
        "report": _report,
        "replay": _replay,
        "compare": _compare,
        "plan": _plan,
        "simulate": _simulate,
        "fake_server": _fake_server,
        "bench_games": _bench_games,
        "bench_overhead": _bench_overhead,
        "bench_pace": _bench_pace,
        "bench_dashboard": _bench_dashboard,
        "bench_admission": _bench_admission,
        "bench_forecast": _bench_forecast,
        "bench_shape": _bench_shape,
        "bench_replicas": _bench_replicas,
        "reference": _reference,
    }.items()
}
