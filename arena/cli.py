"""The `arena` command line. stdout is data, stderr is progress and logs.

Exit codes: 0 done; 1 finished, a check failed; 2 bad config or usage, nothing written; 3 an engine
could not start or died for good, the run is kept; 130 interrupted, the run is kept. A comparison
ends with 3 too where an engine was not measured in every cell; interrupted, it tells what it has.
"""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

USAGE, INTERRUPTED = 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parsed = _parser().parse_args(arguments)
    if sys.stdout is None or sys.stderr is None:  # started with one of them closed
        # for as long as the process lives
        nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name need not fit the locale
    try:
        if parsed.command == "doctor":
            return _doctor(parsed)
        # late: `doctor` must run where the rest cannot be imported, and Ctrl-C works meanwhile
        from arena import commands

        code: int = commands.COMMANDS[parsed.command](parsed)
    except ImportError as error:
        print(f"arena: {error}; `arena doctor` says what to mend", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("arena: interrupted", file=sys.stderr)
        return INTERRUPTED
    return code


def _doctor(parsed: argparse.Namespace) -> int:
    from arena import doctor

    checks = doctor.run_checks(probe=parsed.probe)
    if parsed.json:
        print(doctor.render_json(checks))
    else:
        for check in checks:
            print(f"{'ok  ' if check.ok else 'MEND'}  {check.name}: {check.detail}")
            if check.mend and not check.ok:
                print(f"      {check.mend}")
    return 0 if all(check.ok for check in checks) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="arena", description="Tournaments of language-model agents at chess and janggi."
    )
    parser.add_argument("--version", action="version", version=f"arena {version('boardfleet')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (
        _add_run,
        _add_resume,
        _add_watch,
        _add_validate,
        _add_report,
        _add_compare,
        _add_bench,
        _add_fake_server,
        _add_others,
    ):
        add(commands)
    return parser


def _add_run(commands: Any) -> None:
    run = commands.add_parser("run", help="play a tournament from a config")
    run.add_argument("config", type=Path, help="a TOML file")
    run.add_argument("--out", type=Path, help="the run's folder; default: a new one under runs/")
    run.add_argument("--replace", action="store_true", help="start a run in --out anew")
    _add_set(run)
    _add_show(run)
    run.set_defaults(command="run")


def _add_resume(commands: Any) -> None:
    resume = commands.add_parser("resume", help="go on with a run from its last committed plies")
    resume.add_argument("dir", type=Path, help="a run's folder")
    _add_show(resume)
    resume.set_defaults(command="resume")


def _add_watch(commands: Any) -> None:
    watch = commands.add_parser("watch", help="look at a run that is being played, or is over")
    watch.add_argument("run", metavar="DIR|URL", help="a run's folder, or a dashboard's address")
    _add_view(watch)
    watch.add_argument(
        "--dashboard",
        metavar="HOST:PORT",
        help="serve the dashboard of a run's folder there, until Ctrl-C",
    )
    watch.set_defaults(command="watch")


def _add_validate(commands: Any) -> None:
    validate = commands.add_parser("validate", help="check a config without starting an engine")
    validate.add_argument("config", type=Path, help="a TOML file")
    _add_set(validate)
    validate.add_argument("--json", action="store_true", help="print one JSON object")
    validate.set_defaults(command="validate")


def _add_report(commands: Any) -> None:
    show = commands.add_parser("report", help="a run in figures, finished or not")
    show.add_argument("dir", type=Path, help="a run's folder")
    form = show.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument(
        "--html", type=Path, metavar="F", help="write one self-contained page with charts and games"
    )
    show.set_defaults(command="report")


def _add_compare(commands: Any) -> None:
    compare = commands.add_parser("compare", help="the same questions asked of several engines")
    compare.add_argument("config", type=Path, help="a TOML file with the engines")
    compare.add_argument(
        "--engine", action="append", default=[], metavar="NAME", help="again for each; default: all"
    )
    _add_set(compare)
    compare.add_argument("--seconds", type=float, default=10.0, help="of one cell")
    compare.add_argument("--repeats", type=int, default=3)
    compare.add_argument(
        "--concurrency",
        type=int,
        nargs="+",
        action="extend",
        metavar="N",
        help="closed loops; default: 1 4 16, as far as there are so many matches",
    )
    compare.add_argument(
        "--workload", type=Path, metavar="F|DIR", help="a saved workload, or a run's folder"
    )
    compare.add_argument("--save-workload", type=Path, metavar="F")
    compare.add_argument(
        "--logs",
        type=Path,
        metavar="DIR",
        help="keep the engines' logs; default: thrown away, unless an engine fails",
    )
    form = compare.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--html", type=Path, metavar="F", help="write a page with charts too")
    compare.set_defaults(command="compare")


def _add_bench(commands: Any) -> None:
    kinds = commands.add_parser("bench", help="measure the arena itself").add_subparsers(
        required=True, metavar="KIND"
    )
    for name, command, about in (
        ("games", "bench_games", "legal moves and play, with pyffish beside where it is installed"),
        ("overhead", "bench_overhead", "plies a second of the whole path on one core"),
        ("pace", "bench_pace", "schedule lag of many seats that move once a second"),
        ("dashboard", "bench_dashboard", "what a dashboard that is looked at costs the arena"),
    ):
        kind = kinds.add_parser(name, help=about)
        kind.add_argument("--json", action="store_true", help="print one JSON object")
        kind.set_defaults(command=command)
        if name == "pace":
            kind.add_argument("--seats", type=int, nargs="+", default=[1000, 4000], metavar="N")
            kind.add_argument("--seconds", type=float, default=30.0)
    _add_bench_admission(kinds)


def _add_bench_admission(kinds: Any) -> None:
    kind = kinds.add_parser(
        "admission", help="what is answered in time of more than an engine can do, with and without"
    )
    kind.add_argument("config", type=Path, help="a TOML file with the engine")
    kind.add_argument("--engine", required=True, metavar="NAME")
    _add_set(kind)
    kind.add_argument("--seconds", type=float, default=12.0, help="of one open loop")
    kind.add_argument("--repeats", type=int, default=3)
    kind.add_argument("--load", type=float, default=2.0, help="times the measured capacity")
    kind.add_argument("--json", action="store_true", help="print one JSON object")
    kind.set_defaults(command="bench_admission")


def _add_others(commands: Any) -> None:
    check = commands.add_parser("doctor", help="what is wrong with this set-up, and the mend")
    check.add_argument("--json", action="store_true", help="print one JSON object")
    check.add_argument("--probe", action="store_true", help="import the engine too (half a minute)")
    check.set_defaults(command="doctor")
    about = commands.add_parser("config", help="the config reference").add_subparsers(
        required=True, metavar="WHAT"
    )
    about.add_parser("reference", help="every section and key").set_defaults(command="reference")


def _add_fake_server(commands: Any) -> None:
    fake = commands.add_parser(
        "fake-server", help="an OpenAI-compatible server with no model, for tests and rehearsals"
    )
    fake.add_argument("config", type=Path, nargs="?", help="a TOML file; omitted: the defaults")
    _add_set(fake)
    fake.add_argument("--host", default="127.0.0.1")
    fake.add_argument("--port", type=int, default=0, help="0: any free one")
    fake.set_defaults(command="fake_server")


def _add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key, such as tournament.pairs=4 or engines.main.max_concurrent=32",
    )


def _add_show(parser: argparse.ArgumentParser) -> None:
    _add_view(parser)
    parser.add_argument(
        "--dashboard",
        metavar="HOST:PORT|off",
        help="where the dashboard listens; default: 127.0.0.1:8642, or a free port if that is "
        "taken. Another address than this machine's own asks for a token",
    )
    parser.add_argument(
        "--otel",
        action="store_true",
        help="send a span per move by OTLP/HTTP, as the OTEL_* variables say (extra: otel)",
    )


def _add_view(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--view",
        choices=("auto", "rich", "plain", "none"),
        default="auto",
        help="progress on stderr; auto: rich on a terminal, else a line every few seconds",
    )


if __name__ == "__main__":
    sys.exit(main())
