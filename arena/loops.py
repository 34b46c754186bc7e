"""The open and the closed loop: a workload's questions, put to one engine."""

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import structlog

from agents import Fault
from arena.compare_figures import Answer, Measurement
from arena.workload import Question, WorkItem, as_agents_ask
from serving import (
    EngineDead,
    EngineError,
    Finish,
    Limited,
    Reply,
    Request,
    Sampling,
)

log = structlog.get_logger()

PAUSE_S = 0.05
"""A worker whose question failed waits so long: an engine that refuses at once is not to be asked
as fast as it refuses."""
FORGET_TRIES, FORGET_PAUSE_S = 5, 1.0
"""An engine that could forget and cannot now is still busy with what was given up."""
WARM_PLIES = 2
"""Of each match that begins a cell: the first brings what prompts begin with into the cache, the
second finds it there."""
WARM_S = 300.0
"""For a question that is not counted: a server's first may take long."""
GRACE_S = 5.0
"""Beyond a question's own limit, until it is given up."""

_T = TypeVar("_T")


class Asker:
    """A workload's questions, put to one engine that is open; `question` says how."""

    def __init__(
        self,
        engine: Limited,
        deadline_s: float,
        question: Callable[[WorkItem], Question] = as_agents_ask,
    ) -> None:
        self._engine = engine
        self._deadline_s = deadline_s
        self._question = question
        self._numbers = itertools.count()
        self._steps: list[tuple[float, int]] = []
        self._unanswered: dict[int, Answer] = {}
        """What is to be told of a question if it is given up."""
        self._can_forget = False
        self.dead: EngineDead | None = None
        """Set once nothing will be answered any more."""

    @property
    def restarts(self) -> int:
        """Times that the engine was started again so far."""
        return self._engine.restarts

    async def watch(self) -> None:
        """Keep the engine's steps, until cancelled."""
        try:
            async for seen in self._engine.snapshots():
                if seen.step_requests is not None:
                    self._steps.append((seen.at, seen.step_requests))
        # a user's own engine raises what it likes; its steps are not known then
        except Exception as error:  # noqa: BLE001
            log.warning("snapshots_lost", engine=self._engine.name, error=repr(error))

    async def forget(self) -> bool:
        """Empty the prefix cache; False where the engine cannot."""
        if not hasattr(self._engine.inner, "reset_prefix_cache"):
            return False
        for _ in range(FORGET_TRIES):
            if await self._engine.reset_prefix_cache():
                self._can_forget = True
                return True
            if not self._can_forget:
                break
            await asyncio.sleep(FORGET_PAUSE_S)
        return False

    async def warm(self, matches: Sequence[Sequence[WorkItem]]) -> int:
        """Ask the first `WARM_PLIES` questions of each match, all matches at once, uncounted; how
        many of them got no legal move."""
        failed = 0
        for ply in range(WARM_PLIES):
            items = [match[ply] for match in matches if len(match) > ply]
            now = time.monotonic()
            answers = await asyncio.gather(*(self._ask(item, now, WARM_S) for item in items))
            failed += sum(answer.fault is not None for answer in answers)
        return failed

    async def greedy(self, items: Sequence[WorkItem], limit_s: float) -> list[str | None]:
        """The likeliest answers, legal or not, asked one by one so that no batch changes them; None
        where none came in time, or not in `limit_s` for all."""
        texts: list[str | None] = []
        until = time.monotonic() + limit_s
        for item in items:
            if time.monotonic() > until:
                break
            answer = await self._ask(
                replace(item, sampling=Sampling(0.0, 1.0, 0)), time.monotonic()
            )
            is_late = answer.fault == Fault.STALLED.value
            texts.append(None if answer.reply is None or is_late else answer.reply.text)
        return texts + [None] * (len(items) - len(texts))

    async def open_loop(self, items: Sequence[WorkItem], seconds: float) -> Measurement:
        """Each question when it is due, whatever became of those before it."""
        arriving = list(itertools.takewhile(lambda item: item.arrival_s <= seconds, items))
        began = self._begin()
        unanswered: Counter[str] = Counter()

        async def ask(item: WorkItem, due: float) -> Answer:
            overlaps = unanswered[item.match_id] > 0
            unanswered[item.match_id] += 1
            answer = await self._ask(item, due, overlaps=overlaps)
            unanswered[item.match_id] -= 1
            return answer

        tasks: list[asyncio.Task[Answer]] = []
        never_sent: list[Answer] = []
        for item in arriving:
            due = began + item.arrival_s
            if self.dead is None:
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                tasks.append(asyncio.create_task(ask(item, due)))
            else:
                never_sent.append(Answer(due, due, due, None, Fault.ENGINE_DEAD.value))
        ended = began + min(seconds, max((item.arrival_s for item in items), default=0.0))
        answers = await self._drain(tasks, self._deadline_s + GRACE_S)
        return self._measured(began, ended, [*answers, *never_sent])

    async def closed_loop(
        self, matches: Iterable[Sequence[WorkItem]], concurrency: int, seconds: float
    ) -> Measurement:
        """So many questions at once: each worker plays one match after the other.

        The window opens once every worker has had an answer, as they begin all at once; what was
        answered before is not counted. It ends when the time is up, or no match is left for a
        worker. Raises what ended the engine for good before it opened.
        """
        left: Iterator[Sequence[WorkItem]] = iter(matches)
        answers: list[Answer] = []
        began, ended, is_open = self._begin(), math.inf, False
        heard: set[int] = set()

        async def work(number: int) -> None:
            nonlocal began, ended, is_open
            for item in itertools.chain.from_iterable(left):
                now = time.monotonic()
                if now >= ended or self.dead is not None:
                    return
                answer = await self._ask(item, now)
                answers.append(answer)
                heard.add(number)
                if ended == math.inf and len(heard) == concurrency:
                    began, is_open = answer.done, True
                    ended = began + seconds
                if answer.fault is not None:
                    await asyncio.sleep(PAUSE_S)
            ended = min(ended, time.monotonic())

        workers = [asyncio.create_task(work(number)) for number in range(concurrency)]
        await self._drain(workers, seconds + 2 * (self._deadline_s + GRACE_S))
        if not is_open:
            if self.dead is not None:
                raise self.dead
            ended = time.monotonic()
        counted = [answer for answer in answers if answer.done > began]
        return replace(self._measured(began, ended, counted), begins_full=is_open)

    async def waves(
        self, matches: Sequence[Sequence[WorkItem]], size: int, seconds: float
    ) -> Measurement:
        """So many questions at once, and the next when the last of them is answered, as static
        batches are. Each place in a wave plays one match after the other.

        Ends with the first wave after the time is up, or when matches for a whole one are not left.
        """
        left: Iterator[Sequence[WorkItem]] = iter(matches)
        places = [itertools.chain.from_iterable(left) for _ in range(size)]
        answers: list[Answer] = []
        began = ended = self._begin()
        while ended < began + seconds and self.dead is None:
            wave = [item for place in places for item in itertools.islice(place, 1)]
            if len(wave) < size:
                break
            now = time.monotonic()
            tasks = [asyncio.create_task(self._ask(item, now)) for item in wave]
            answered = await self._drain(tasks, self._deadline_s + GRACE_S)
            answers += answered
            ended = time.monotonic()
            if any(answer.fault is not None for answer in answered):
                await asyncio.sleep(PAUSE_S)
        return self._measured(began, ended, answers)

    async def _drain(self, tasks: Sequence[asyncio.Task[_T]], limit_s: float) -> list[_T]:
        """What the tasks return; those that take longer are ended, and leave `_unanswered`."""
        if not tasks:
            return []
        try:
            done, late = await asyncio.wait(tasks, timeout=limit_s)
        except BaseException:
            await _end(tasks)
            raise
        await _end(list(late))
        return [task.result() for task in tasks if task in done]

    def _begin(self) -> float:
        """Leave behind what came before; the time."""
        self._unanswered.clear()
        self._steps.clear()
        return time.monotonic()

    def _measured(self, began: float, ended: float, answers: Sequence[Answer]) -> Measurement:
        # an engine that is gone is told as that, and one that is there and silent as stalled
        fault = Fault.STALLED if self._engine.is_ready else Fault.ENGINE_DEAD
        given_up = [replace(a, fault=fault.value) for a in self._unanswered.values()]
        steps = Counter(requests for at, requests in self._steps if began <= at <= ended)
        return Measurement(began, ended, (*answers, *given_up), steps)

    async def _ask(
        self,
        item: WorkItem,
        due: float,
        deadline_s: float | None = None,
        *,
        overlaps: bool = False,
    ) -> Answer:
        """One question. Raises nothing for an engine."""
        number, sent = next(self._numbers), time.monotonic()
        deadline_s = deadline_s or self._deadline_s
        given_up = sent + deadline_s + GRACE_S
        self._unanswered[number] = Answer(due, sent, given_up, None, Fault.STALLED.value, overlaps)
        reply = None
        question = self._question(item)
        try:
            request = self._request(item, question, number, deadline_s)
            reply = await self._engine.generate(request)
            fault = fault_of(reply, question.choices)
        except EngineError as error:
            fault = error.kind
            if isinstance(error, EngineDead) and error.final:
                self.dead = error
        # a user's own engine raises what it likes
        except Exception as error:  # noqa: BLE001
            log.warning("engine_raised", engine=self._engine.name, error=repr(error))
            fault = Fault.TRANSPORT.value
        del self._unanswered[number]
        return Answer(due, sent, time.monotonic(), reply, fault, overlaps)

    def _request(
        self, item: WorkItem, question: Question, number: int, deadline_s: float
    ) -> Request:
        return Request(
            f"{item.match_id}/{item.ply}/0/{number}",
            item.match_id,
            self._engine.template.render(question.parts),
            question.choices,
            question.max_tokens,
            question.sampling,
            deadline_s,
            use_prefix_cache=question.use_prefix_cache,
        )


def fault_of(reply: Reply, choices: Sequence[str] | None) -> str | None:
    """What is wrong with an answer; None: it is one of the choices, or free and whole."""
    if choices is not None and reply.text in choices:
        return None
    if reply.finish is Finish.DEADLINE:
        return Fault.STALLED.value
    if choices is None:
        return None
    if any(choice.startswith(reply.text) for choice in choices):
        return Fault.CUT_SHORT.value
    return Fault.CONSTRAINT_IGNORED.value


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
