"""The process that hosts vLLM for the arena: `python -m serving.vllm_host SOCKET LIFELINE`.

Both arguments are inherited file descriptors. The only module that knows vllm.
"""

import os
import sys

from serving.process import guard_group

if __name__ == "__main__":
    # before vllm is imported: that takes seconds, starts threads, and the arena may die meanwhile
    guard_group(int(sys.argv[2]), os.environ.get("TMPDIR"))
    # read when prometheus_client is imported: it would mix this engine's figures with those of
    # every process that ever wrote to the directory
    for name in ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"):
        os.environ.pop(name, None)

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import REGISTRY, Metric, generate_latest
from prometheus_client.registry import Collector
from vllm import __version__ as VLLM_VERSION
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from serving.host_wire import LONGEST_LINE, Outbox, decode
from serving.vllm_steps import StepTap
from serving.vllm_wire import Answer, Ask

STEPS_PERIOD_S = 0.1
"""Steps are sent together, at most this late."""

_HEALTH_PERIOD_S = 0.25
_SHUTDOWN_S = 2.0


def stat_logger(tap: StepTap) -> Any:
    """A factory of vLLM stat loggers that feed `tap`. One that raised would end the engine."""

    class Logger(StatLoggerBase):  # type: ignore[misc]  # vllm has no type information
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            del vllm_config, engine_index

        def record(
            self,
            scheduler_stats: Any,
            iteration_stats: Any,
            mm_cache_stats: Any = None,
            engine_idx: int = 0,
        ) -> None:
            try:
                tap.add(scheduler_stats, iteration_stats)
            # the one boundary where vLLM's own changes must not cost the engine
            except Exception as error:  # noqa: BLE001
                tap.failures += 1
                if tap.failures == 1:
                    sys.stderr.write(f"step statistics are lost: {error!r}\n")

        def log_engine_initialized(self) -> None:
            return None

    return Logger


class VllmMetrics(Collector):
    """vLLM's own metrics, without those of Python and of the process."""

    def collect(self) -> Iterator[Metric]:
        return (metric for metric in REGISTRY.collect() if metric.name.startswith("vllm:"))


def metrics_text() -> str:
    """vLLM's metrics in Prometheus' text format, names and labels as vLLM gives them."""
    return generate_latest(VllmMetrics()).decode()


@dataclass(slots=True)
class _Progress:
    """A request's output so far."""

    asked: float
    completion: int = 0
    last: Any = None
    pieces: list[str] = field(default_factory=list)

    def add(self, output: Any, *, is_delta: bool) -> None:
        part = output.outputs[0]
        if is_delta:
            self.pieces.append(part.text)
            self.completion += len(part.token_ids)
        else:
            self.pieces = [part.text]
            self.completion = len(part.token_ids)
        self.last = output


class Host:
    """Serves one arena over one socket until either side ends."""

    def __init__(self, engine: AsyncLLM, tap: StepTap, writer: asyncio.StreamWriter) -> None:
        self._engine = engine
        self._tap = tap
        self._writer = writer
        self._outbox = Outbox(self._write)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._loop = asyncio.get_running_loop()

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Answer until the arena closes its end or the engine dies."""
        async with asyncio.TaskGroup() as background:
            steps = background.create_task(self._send_steps())
            health = background.create_task(self._watch_health())
            try:
                while line := await reader.readline():
                    for tag, *fields in decode(line):
                        self._take(tag, fields)
            finally:
                steps.cancel()
                health.cancel()
                for task in self._tasks.values():
                    task.cancel()

    def _take(self, tag: str, fields: list[Any]) -> None:
        if tag == "ask":
            ask = Ask(*fields)
            task = self._loop.create_task(self._answer(ask))
            self._tasks[ask.number] = task
            task.add_done_callback(lambda _: self._tasks.pop(ask.number, None))
        elif tag == "abort":
            if task_or_none := self._tasks.get(fields[0]):
                task_or_none.cancel()
        elif tag == "expire":
            self._start(self._engine.abort(str(fields[0])))
        elif tag == "reset":
            self._start(self._reset())
        elif tag == "metrics":
            self._start(self._send_metrics(fields[0]))
        else:
            raise ValueError(f"unknown message {tag!r}")

    def _start(self, work: Any) -> None:
        task = self._loop.create_task(work)
        key = -id(task)
        self._tasks[key] = task
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    def send(self, *message: Any) -> None:
        """Put a message into the line that leaves at the end of this turn of the loop."""
        self._outbox.put(*message)

    def _write(self, line: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(line)

    async def _answer(self, ask: Ask) -> None:
        request_id = str(ask.number)
        progress = _Progress(time.monotonic())
        try:
            prompt = {"prompt_token_ids": list(ask.ids)}
            async for output in self._engine.generate(prompt, sampling(ask), request_id):
                if ask.stream and not progress.completion and output.outputs[0].token_ids:
                    self.send("first", ask.number)
                progress.add(output, is_delta=ask.stream)
            mean = self._tap.step_requests_mean.get(request_id)
            self.send("reply", *answer(ask, progress, mean))
        except EngineDeadError as error:
            self._die(str(error))
        except GracefulHTTPError as error:
            self.send("error", ask.number, "overloaded", one_line(error))
        except (VLLMClientError, ValueError, TypeError) as error:
            self.send("error", ask.number, "rejected", one_line(error))
        # vLLM raises anything for one request and goes on; the arena must hear of each
        except Exception as error:  # noqa: BLE001
            self.send("error", ask.number, "transport", one_line(error))
        finally:
            self._tap.step_requests_mean.pop(request_id, None)

    async def _reset(self) -> None:
        is_idle = self._engine.get_num_unfinished_requests() == 0
        done = is_idle and bool(await self._engine.reset_prefix_cache())
        self.send("reset", done)

    async def _send_metrics(self, number: int) -> None:
        # milliseconds, more on a busy machine, in which the loop has tokens to deliver
        self.send("metrics", number, await asyncio.to_thread(metrics_text))

    async def _send_steps(self) -> None:
        while True:
            await asyncio.sleep(STEPS_PERIOD_S)
            if steps := self._tap.take():
                self.send("steps", *steps)

    async def _watch_health(self) -> None:
        # vLLM offers no event for this
        while not self._engine.errored:  # noqa: ASYNC110
            await asyncio.sleep(_HEALTH_PERIOD_S)
        self._die("vLLM's engine process ended")

    def _die(self, message: str) -> None:
        self.send("dead", message)
        self._outbox.flush()
        self._writer.close()


def sampling(ask: Ask) -> SamplingParams:
    """vLLM's parameters of a request."""
    choices = list(ask.choices) if ask.choices is not None else None
    return SamplingParams(
        max_tokens=ask.max_tokens,
        min_tokens=ask.min_tokens,
        temperature=ask.temperature,
        top_p=ask.top_p,
        seed=ask.seed,
        stop=list(ask.stop),
        skip_reading_prefix_cache=not ask.use_prefix_cache,
        structured_outputs=StructuredOutputsParams(choice=choices) if choices else None,
        output_kind=RequestOutputKind.DELTA if ask.stream else RequestOutputKind.FINAL_ONLY,
    )


def answer(ask: Ask, progress: _Progress, step_requests_mean: float | None) -> Answer:
    """What the arena is told of a finished or expired request."""
    last = progress.last
    times = last.metrics
    queue_s = prefill_s = decode_s = None
    if times is not None and times.scheduled_ts and times.first_token_ts:
        # from our receipt: a request waits for the step under way before vLLM counts it as queued.
        # Both are the machine's monotonic clock.
        queue_s = max(0.0, times.scheduled_ts - progress.asked)
        prefill_s = times.first_token_ts - times.scheduled_ts
        decode_s = times.last_token_ts - times.first_token_ts
    return Answer(
        number=ask.number,
        text="".join(progress.pieces),
        finish=last.outputs[0].finish_reason or "abort",
        prompt=len(ask.ids),
        completion=progress.completion,
        cached=last.num_cached_tokens,
        queue_s=queue_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
        step_requests_mean=step_requests_mean,
    )


def one_line(error: BaseException) -> str:
    """The error's text without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__


async def warm_up(engine: AsyncLLM, ids: list[int]) -> None:
    """One constrained request: the first step and the first grammar may take half a minute."""
    ask = Ask(0, ids, ["e2e4", "d2d4"], 6, 1.0, 1.0, 1, 0, False, False)
    async for _ in engine.generate({"prompt_token_ids": ids}, sampling(ask), "warm-up"):
        pass
    await engine.reset_prefix_cache()


async def main(descriptor: int) -> None:
    """Start vLLM as the arena's first line says, tell it, and serve."""
    channel = socket.socket(fileno=descriptor)
    reader, writer = await asyncio.open_connection(sock=channel, limit=LONGEST_LINE)
    (start,) = decode(await reader.readline())
    _, arguments, warm_up_ids = start
    tap = StepTap()
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(**arguments), stat_loggers=[stat_logger(tap)]
    )
    try:
        await warm_up(engine, warm_up_ids)
        tap.unsent.clear()
        host = Host(engine, tap, writer)
        host.send("ready", VLLM_VERSION)
        serving = asyncio.create_task(host.serve(reader))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await serving
    finally:
        engine.shutdown(timeout=_SHUTDOWN_S)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
