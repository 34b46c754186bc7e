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
from typing import Any, NoReturn

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
    from arena import doctor, doctor_nodes
    from serving import EngineConfigError

    try:
        nodes = () if parsed.ray is None else doctor_nodes.check_nodes(parsed.ray)
    except EngineConfigError as error:
        print(f"arena: --ray: {error}", file=sys.stderr)
        return USAGE
    checks = (*doctor.run_checks(probe=parsed.probe), *nodes)
    if parsed.json:
        print(doctor.render_json(checks))
    else:
        for check in checks:
            print(f"{'ok  ' if check.ok else 'MEND'}  {check.name}: {check.detail}")
            if check.mend and not check.ok:
                print(f"      {check.mend}")
    return 0 if all(check.ok for check in checks) else 1


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as everything else does."""

    def error(self, message: str) -> NoReturn:
        told = "".join(char if char.isprintable() else " " for char in message)
        self.exit(USAGE, f"arena: {told}; see `{self.prog} --help`\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="arena", description="Tournaments of language-model agents at chess and janggi."
    )
    parser.add_argument("--version", action="version", version=f"arena {version('boardfleet')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (
        _add_run,
        _add_resume,
        _add_stop,
        _add_watch,
        _add_validate,
        _add_report,
        _add_replay,
        _add_compare,
        _add_plan,
        _add_simulate,
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
    _add_set(resume)
    _add_show(resume)
    resume.set_defaults(command="resume")


def _add_stop(commands: Any) -> None:
    stop = commands.add_parser("stop", help="ask the process that plays a run to stop")
    stop.add_argument("dir", type=Path, help="a run's folder")
    stop.add_argument(
        "--after",
        choices=("games", "plies"),
        default="games",
        help="let the games that are being played end, or only their current plies",
    )
    stop.set_defaults(command="stop")


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
    form.add_argument("--pgn", type=Path, metavar="F", help="write the chess games, pair by pair")
    form.add_argument("--csv", type=Path, metavar="DIR", help="write one CSV file a table")
    show.set_defaults(command="report")


def _add_replay(commands: Any) -> None:
    again = commands.add_parser(
        "replay", help="judge a run's stored replies again: parser, rules and ratings, no engine"
    )
    again.add_argument("dir", type=Path, help="a run's folder")
    again.add_argument("--json", action="store_true", help="print one JSON object")
    again.set_defaults(command="replay")


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


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan", help="what fits into a memory, what binds first, and what it costs"
    )
    plan.add_argument("config", type=Path, nargs="?", help="a TOML file: its engine and workload")
    plan.add_argument("--engine", metavar="NAME", help="default: the only one that is asked")
    _add_set(plan)
    goals = ("throughput", "latency")
    plan.add_argument("--goal", choices=goals, default=goals[0], help="a fleet, or one person")
    _add_plan_model(plan.add_argument_group("model, where it is not the config's"))
    _add_plan_device(plan.add_argument_group("device"))
    _add_plan_work(plan.add_argument_group("work, where it is not the config's"))
    _add_plan_cost(plan.add_argument_group("rent or buy, in one currency"))
    form = plan.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--html", type=Path, metavar="F", help="write a page with charts")
    plan.set_defaults(command="plan")


def _add_plan_model(group: Any) -> None:
    add = group.add_argument
    add("--model", metavar="M", help="packaged name, directory, config.json, .gguf file, Hub id")
    add("--layers", type=int, metavar="N", help="with --kv-heads and --head-size: a given shape")
    add("--kv-heads", type=int, metavar="N")
    add("--head-size", type=int, metavar="N")
    add("--parameters", type=float, metavar="N", help="such as 8e9")
    add("--active-parameters", type=float, metavar="N", help="that a token passes, with experts")
    add("--weights", metavar="TYPE", help="fp32, fp16, bf16, fp8, q8, q6, q5 or q4")
    add("--weights-bytes", metavar="SIZE", help="such as 16GiB")
    add("--kv-dtype", metavar="TYPE", help="of cached values, by the same names")
    add("--unit-tokens", type=int, metavar="N", help="reserved at once; the engine's, else 1")


def _add_plan_device(group: Any) -> None:
    add = group.add_argument
    add("--memory", metavar="SIZE", help="such as 24GiB")
    add("--memory-fraction", type=float, metavar="X", help="that the engine may take")
    add("--reserve", metavar="SIZE", help="for neither weights nor KV cache; default: 2GiB")
    add("--device", metavar="NAME", help="rtx4090, h100, …: memory and speed by its data sheet")
    add("--tflops", type=float, metavar="X", help="dense, 16 bits")
    add("--bandwidth", type=float, metavar="GB/S")
    add("--bench", type=Path, metavar="F", help="measured: what `arena bench shape --json` printed")


def _add_plan_work(group: Any) -> None:
    add = group.add_argument
    add("--context-tokens", type=int, metavar="N", help="of one sequence, prompt and answer")
    add("--shared-tokens", type=int, metavar="N", help="that all sequences begin with")
    add("--uncached-tokens", type=float, metavar="N", help="of a prompt, computed anew")
    add("--output-tokens", type=float, metavar="N", help="of an answer")
    add("--agents", type=int, metavar="N", help="each with a sequence of its own")
    add("--period", type=float, metavar="S", help="between the questions of one agent")


def _add_plan_cost(group: Any) -> None:
    add = group.add_argument
    add("--price", type=float, metavar="X", help="of a card; default: an illustration")
    add("--rent", type=float, nargs="+", metavar="X", help="of one like it, an hour")
    add("--running", type=float, metavar="X", help="power and hosting, an hour of use")
    add("--hours-per-week", type=float, metavar="X")
    add("--runs", type=Path, metavar="DIR", help="measured there: a run, or a folder of runs")


def _add_simulate(commands: Any) -> None:
    kinds = commands.add_parser(
        "simulate", help="what batching, paging, admission and routing are worth, on paper"
    ).add_subparsers(required=True, metavar="KIND")
    _add_simulate_batching(_simulation(kinds, "batching", "static against continuous batching"))
    _add_simulate_paging(_simulation(kinds, "paging", "the KV cache reserved by units, and whole"))
    load = _simulation(kinds, "overload", "more moves than an engine can make, with a cap and not")
    load.add_argument("--load", type=float, default=2.0, help="times the capacity")
    load.add_argument("--seconds", type=float, default=30.0, help="of the overload")
    _add_simulated_engine(load)
    _add_simulate_fleet(_simulation(kinds, "fleet", "many seats on many GPUs, routed by match"))


def _simulation(kinds: Any, name: str, about: str) -> argparse.ArgumentParser:
    kind: argparse.ArgumentParser = kinds.add_parser(name, help=about)
    kind.add_argument("--seed", type=int, default=0)
    kind.add_argument(
        "--from-run",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="take steps and moves from a run's folder; again for more of them",
    )
    kind.add_argument("--engine", metavar="NAME", help="which engine of the run; default: its one")
    form = kind.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--html", type=Path, metavar="F", help="write a page with charts")
    kind.set_defaults(command="simulate", kind=name)
    return kind


_LENGTHS = "150, 40-200, 85%%:40-200,15%%:400-1000, or mixed (that one), or talks"


def _add_simulate_batching(kind: argparse.ArgumentParser) -> None:
    add = kind.add_argument
    add("--requests", type=int, default=600)
    add("--slots", type=int, help="requests in a step at most; default: 8, or the run's")
    add("--token-ms", type=float, help="a step of one request; default: 8")
    add("--growth", type=float, help="share of that for each further request; default: 0")
    add(
        "--prompt-token-ms", type=float, help="for each prompt token computed, with --prompt-tokens"
    )
    add("--arrivals", choices=("poisson", "burst", "closed"), default="poisson")
    add("--rate", type=float, help="arrivals a second; default: 12")
    add("--burst", type=int, help="arrivals at once, with --arrivals burst; default: 32")
    add("--clients", type=int, help="with --arrivals closed; default: 16")
    add("--think-seconds", type=float, help="from an answer to a client's next question")
    add("--lengths", metavar="L", help=f"tokens of an answer: {_LENGTHS}; default: mixed")
    add("--prompt-tokens", type=int, help="of each prompt, with --prompt-token-ms")
    add("--shared-tokens", type=int, help="of --prompt-tokens, the same in all prompts")
    add("--block-tokens", type=int, help="of the prefix cache, with --shared-tokens; default: 16")
    add(
        "--no-prefix-cache",
        dest="prefix_cache",
        action="store_false",
        help="--shared-tokens are computed again each time",
    )
    add("--max-queued", type=int, help="requests that may wait; default: any number")
    add("--seeds", type=int, default=1, help="repeat with so many seeds, and tell the 95 %% band")


def _add_simulate_paging(kind: argparse.ArgumentParser) -> None:
    add = kind.add_argument
    add("--requests", type=int, default=20_000)
    add("--limit", type=int, default=4096, help="tokens that a request may hold")
    add("--lengths", metavar="L", help=f"tokens that requests hold: {_LENGTHS}; default: talks")
    add("--units", type=int, nargs="+", metavar="TOKENS", help="default: 1024 256 64 16")
    add("--memory", default="60GiB", help="for the KV cache")
    add("--kv-bytes-per-token", type=int, default=524_288, help="`arena plan` tells a model's")


def _add_simulated_engine(kind: argparse.ArgumentParser) -> None:
    add = kind.add_argument
    add("--slots", type=int, help="requests in a step at most; default: 256, or the run's")
    add("--slo-seconds", type=float, help="a move in time; default: 1, or the run's")
    add("--step-ms", type=float, help="a step takes at least; default: assumed, an 8B on an H100")
    add("--token-us", type=float, help="and for each token computed")
    add("--request-us", type=float, help="and for each request in it")
    add("--uncached-tokens", type=int, help="prompt tokens that a move computes; default: 26")
    add("--output-tokens", type=int, help="tokens that a move writes; default: 5")


def _add_simulate_fleet(kind: argparse.ArgumentParser) -> None:
    add = kind.add_argument
    add("--seats", type=int, help="default: 100,000")
    add(
        "--gpus",
        type=int,
        help="default: about the fewest that keep 95 %% of the moves in time, and of the pace",
    )
    add("--routing", choices=("hash", "bounded", "even"), default="hash", help="of matches to GPUs")
    add("--period-seconds", type=float, help="a seat moves so often; default: 1, or the run's")
    add("--seconds", type=float, default=10.0, help="simulated of each GPU")
    add("--sample", type=int, default=16, help="GPUs simulated; each stands for those like it")
    add(
        "--against",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="forecast this run, from --from-run alone, and say how far off it is; again for more. "
        "Exit code 1 where it is more than 30 %%. With nothing else of a fleet asked, only that",
    )
    _add_simulated_engine(kind)


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
    _add_bench_forecast(kinds)
    _add_bench_shape(kinds)
    _add_bench_replicas(kinds)


def _add_bench_replicas(kinds: Any) -> None:
    kind = kinds.add_parser(
        "replicas",
        help="how throughput grows with replicas on Ray, and what the way to them costs: exit code "
        "1 under 90 %% of linear, or over 10 ms",
    )
    add = kind.add_argument
    add("--replicas", type=_counts, default=(1, 2, 4, 8), metavar="N,N", help="default: 1,2,4,8")
    add("--matches-per-replica", type=int, default=8, metavar="N", help="at once; default: 8")
    add("--latency", type=float, default=0.5, metavar="S", help="of an answer; default: 0.5")
    add("--seconds", type=float, default=5.0, help="of one window; default: 5")
    add("--repeats", type=int, default=3, help="windows of each run; default: 3")
    add("--json", action="store_true", help="print one JSON object")
    kind.set_defaults(command="bench_replicas")


def _counts(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        message = f"{text!r} is no list such as 1,2,4,8"
        raise argparse.ArgumentTypeError(message) from None


def _add_bench_shape(kinds: Any) -> None:
    kind = kinds.add_parser("shape", help="what the shape of a request is worth on a real engine")
    kind.add_argument("config", type=Path, help="a TOML file with the engine")
    kind.add_argument("--engine", metavar="NAME", help="default: the first")
    _add_set(kind)
    kind.add_argument("--streams", type=int, default=16, help="questions at once")
    kind.add_argument("--seconds", type=float, default=10.0, help="of one cell, at least")
    kind.add_argument("--repeats", type=int, default=3, help="of 13 cells each")
    form = kind.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--html", type=Path, metavar="F", help="write a page with charts")
    kind.set_defaults(command="bench_shape")


def _add_bench_forecast(kinds: Any) -> None:
    kind = kinds.add_parser(
        "forecast", help="how far off a simulation of an engine is: exit code 1 over 30 %%"
    )
    kind.add_argument("config", type=Path, help="a TOML file with the engine")
    kind.add_argument("--engine", required=True, metavar="NAME")
    _add_set(kind)
    kind.add_argument("--seconds", type=float, default=4.0, help="of one cell")
    kind.add_argument("--rounds", type=int, default=8, help="of five cells each")
    kind.add_argument("--json", action="store_true", help="print one JSON object")
    kind.set_defaults(command="bench_forecast")


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
    check.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="look at every machine of that Ray cluster too: auto, host:port, ray://host:port",
    )
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
