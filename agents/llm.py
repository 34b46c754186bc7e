"""A language model as a player, in three modes.

constrained   The engine may only answer with a legal move, or with what else the tournament
              allows. Whatever else comes is the engine's failure, and is raised.
free          The model writes what it likes and `parse` reads it. A failed answer is told what
              was wrong and asked again, up to the turn's budget.
think         Two questions: the model reasons for at most `think_tokens`, then, with its thought
              closed by force, answers as in constrained mode. A thought that is cut at its bound is
              no fault.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import structlog

from agents.base import THOUGHT, AgentContext, Attempt, Decision, Fault, Interrupted, Turn
from agents.judge import (
    choices_of,
    decided,
    judge_choice,
    judge_free,
    judge_thought,
    longest_choice,
)
from agents.parse import Failure
from agents.prompt import (
    COMPLAINT_TOKENS,
    ContextNeed,
    Mode,
    base_ply,
    complaint,
    lead,
    longest_move_tokens,
    offered,
    prefix_tokens,
    sample_game,
    system_prompt,
)
from games import Game, Start, load_game
from serving import (
    Engine,
    EngineError,
    Prompt,
    PromptParts,
    Reply,
    Request,
    Sampling,
    ThinkingTemplate,
    Timings,
    TokenPrompt,
)

log = structlog.get_logger()

_SEED_MASK = 2**63 - 1
_CACHED_LEADS = 1024


@dataclass(frozen=True, slots=True)
class LlmSettings:
    """How an LLM agent asks."""

    mode: Mode = "constrained"
    persona: str = ""
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 256
    """Of one free answer; a constrained one is as long as the longest legal move."""
    think_tokens: int = 256
    """Of one thought."""


@dataclass(frozen=True, slots=True, eq=False)
class _GameView:
    """A rule set of a game as one agent tells it to its engine."""

    game: Game
    usual: Start
    """The start that needs no telling."""
    system: str
    need: ContextNeed


class LlmAgent:
    """Asks one engine. Safe to play in any number of matches at once: nothing in it belongs to one.

    `choose` raises EngineError only; everything that a model can do wrong is in its Decision.
    """

    def __init__(
        self, name: str, engine: Engine, context: AgentContext, settings: LlmSettings
    ) -> None:
        self.name = name
        self._engine = engine
        self._context = context
        self._settings = settings
        self._views: dict[tuple[str, str], _GameView] = {}
        self._lead = lru_cache(maxsize=_CACHED_LEADS)(self._make_lead)

    async def open(self) -> None:
        """Checks the engine's template on every game of the run, and has it compute what all
        prompts of a game begin with; a template that breaks the prefix is logged, not raised."""
        for game, ruleset in self._context.games:
            await self._prime(self._view(game, ruleset))

    async def _prime(self, view: _GameView) -> None:
        settings = self._settings
        opening = lead(settings.mode, None, self._context.concessions)
        parts = PromptParts(view.system, settings.persona, opening, ())
        key = ("primed", self._engine.name, parts.system, parts.persona, parts.lead)
        if key not in self._context.memo:
            self._context.memo[key] = 1
            await self._engine.prime(self._render(parts))

    async def close(self) -> None:
        """Nothing to do: the engine belongs to the run."""

    def context_need(self, game: str, ruleset: str) -> ContextNeed:
        """What a game takes of the engine's context, measured on its template."""
        return self._view(game, ruleset).need

    async def choose(self, turn: Turn) -> Decision:
        """A decision; raises Interrupted for what is the infrastructure's failure."""
        parts = self._parts(turn)
        if self._settings.mode == "constrained":
            return await self._choose_constrained(turn, self._render(parts), ())
        if self._settings.mode == "think":
            return await self._think_and_choose(turn, parts)
        return await self._choose_freely(turn, parts)

    # prompts

    def _render(self, parts: PromptParts) -> Prompt:
        if self._settings.mode == "think":
            return self._thinking_template.open_thought(parts)
        return self._engine.template.render(parts)

    @property
    def _thinking_template(self) -> ThinkingTemplate:
        template = self._engine.template
        if not isinstance(template, ThinkingTemplate):
            raise ValueError(cannot_think(self._engine.name))
        return template

    def _parts(self, turn: Turn) -> PromptParts:
        position = turn.position
        view = self._view(turn.game, position.start.ruleset)
        moves = position.moves
        if len(moves) <= view.need.window:
            opening = self._lead(view, position.start, ())
        else:
            base = self._rebased(turn, view)
            opening = self._lead(view, position.start, moves[:base])
            moves = moves[base:]
        note = offered(self._settings.mode) if turn.is_draw_offered else ""
        return PromptParts(view.system, self._settings.persona, opening, moves, note)

    def _rebased(self, turn: Turn, view: _GameView) -> int:
        """The ply that the transcript begins from; an event tells where it moved."""
        ply, window = turn.position.ply, max(1, view.need.window)
        base = base_ply(ply, window)
        if not turn.made and base_ply(max(0, ply - 2), window) != base:
            self._context.record_event(
                "prompt_rebased",
                {"match": turn.match_id, "agent": self.name, "ply": ply, "base_ply": base},
            )
        return base

    def _make_lead(self, view: _GameView, start: Start, before: tuple[str, ...]) -> str:
        if before:
            position = view.game.position(start)
            for move in before:
                position = position.play(move)
            fen: str | None = position.fen
        else:
            fen = None if start.fen == view.usual.fen else start.fen
        return lead(self._settings.mode, fen, self._context.concessions)

    def _view(self, name: str, ruleset: str) -> _GameView:
        view = self._views.get((name, ruleset))
        if view is None:
            view = self._views[name, ruleset] = self._look_at(name, ruleset)
        return view

    def _look_at(self, name: str, ruleset: str) -> _GameView:
        """Tell, measure and check a game; what does not depend on this agent is done once a run."""
        mode, template, memo = self._settings.mode, self._engine.template, self._context.memo
        concessions = self._context.concessions
        game = load_game(name)
        usual = game.openings("start", ruleset)[0]
        system = self._context.prompts.get(game.name) or system_prompt(game.name, ruleset)
        parts = PromptParts(system, self._settings.persona, lead(mode, None, concessions), ())
        key = (self._engine.name, name, ruleset)
        if ("move_tokens", *key) not in memo:
            memo["move_tokens", *key] = longest_move_tokens(template, parts, game, usual)
            sample = sample_game(game.position(usual), 12)
            broken = template.check(replace(parts, moves=sample)) if sample else None
            if broken is not None:
                log.warning(
                    "template_breaks_prefix", engine=self._engine.name, game=name, detail=broken
                )
        answer = longest_choice(game.longest_move, concessions) + 1
        if mode == "free":
            answer = self._settings.max_tokens + COMPLAINT_TOKENS
        need = ContextNeed(
            prefix_tokens=prefix_tokens(template, parts, mode, usual, concessions),
            move_tokens=memo["move_tokens", *key],
            answer_tokens=answer,
            context_tokens=self._engine.limits.context_tokens,
            thought_tokens=self._thought_tokens(parts) if mode == "think" else 0,
        )
        return _GameView(game, usual, system, need)

    def _thought_tokens(self, parts: PromptParts) -> int:
        """The longest thought, and what opens and closes one in this template."""
        template = self._thinking_template
        thoughtless = template.close_thought(parts, "", 0)
        assert isinstance(thoughtless, TokenPrompt)
        around = len(thoughtless.ids) - self._engine.template.count_tokens(parts)
        return self._settings.think_tokens + max(0, around)

    # constrained mode

    async def _choose_constrained(
        self, turn: Turn, prompt: Prompt, before: tuple[Attempt, ...]
    ) -> Decision:
        """One of the answers that there are; `before` was asked for it in the same call."""
        concessions = self._context.concessions
        choices = choices_of(turn.position, concessions, turn.is_draw_offered)
        n, past_tries = _counts(turn.made)
        request = self._request(
            turn,
            prompt,
            (n, past_tries),
            choices=choices,
            max_tokens=max(map(len, map(str.encode, choices))) + 1,
            deadline_s=self._context.move_limit_seconds,
        )
        reply = await self._ask(request, n, before)
        answer = judge_choice(
            reply.text, reply.finish, turn.position, concessions, turn.is_draw_offered
        )
        if not isinstance(answer, Failure):
            done = (*before, Attempt(n, reply, None, "", request.id))
            return decided(answer, turn.position, done)
        failed = (*before, Attempt(n, reply, answer.fault, answer.detail, request.id))
        if answer.fault.is_infrastructure:
            raise Interrupted(failed)
        return Decision(None, answer.fault, failed)

    # think mode

    async def _think_and_choose(self, turn: Turn, parts: PromptParts) -> Decision:
        """A thought that was whole when the infrastructure cut off its answer is kept."""
        made = next((a for a in turn.made if a.is_thought and a.fault is None), None)
        left = self._seconds_left(turn, ())
        if made is None and left <= 0:
            return Decision(None, Fault.FLAG_FALL, ())
        thought = made or await self._think(turn, parts, left)
        before = () if thought is made else (thought,)
        if thought.fault is not None:
            return Decision(None, thought.fault, before)
        reasoning = thought.reply.reasoning if thought.reply else ""
        most = self._settings.think_tokens
        prompt = self._thinking_template.close_thought(parts, reasoning, most)
        return await self._choose_constrained(turn, prompt, before)

    async def _think(self, turn: Turn, parts: PromptParts, deadline_s: float) -> Attempt:
        n, past_tries = _counts(turn.made)
        template = self._thinking_template
        asked = self._request(
            turn,
            template.open_thought(parts),
            (n, past_tries),
            choices=None,
            max_tokens=self._settings.think_tokens,
            deadline_s=deadline_s,
        )
        seed = stable_hash(f"{asked.sampling.seed}/think") & _SEED_MASK
        request = replace(
            asked,
            id=asked.id + THOUGHT,
            sampling=replace(asked.sampling, seed=seed),
            stop=(template.think_end,),
        )
        reply = await self._ask(request, n, ())
        # some engines leave the text that stopped them, and some write on
        reasoning = reply.text.partition(template.think_end)[0].rstrip()
        reply = replace(reply, text="", reasoning=reasoning)
        failure = judge_thought(reply.finish)
        if failure is not None:
            return Attempt(n, reply, failure.fault, failure.detail, request.id)
        return Attempt(n, reply, None, "", request.id)

    # free mode

    async def _choose_freely(self, turn: Turn, parts: PromptParts) -> Decision:
        attempts: list[Attempt] = []
        failed = [a for a in turn.made if a.is_own_failure]
        n, past_tries = _counts(turn.made)
        while not failed or (n < turn.attempt_budget and failed[-1].fault not in _DECIDES):
            left = self._seconds_left(turn, failed)
            if left <= 0:
                return Decision(None, Fault.FLAG_FALL, tuple(attempts))
            request = self._request(
                turn,
                self._free_prompt(parts, failed),
                (n, past_tries),
                choices=None,
                max_tokens=self._settings.max_tokens,
                deadline_s=left,
            )
            reply = await self._ask(request, n, attempts)
            answer = judge_free(
                reply.text,
                reply.finish,
                turn.position,
                reply.reasoning,
                concessions=self._context.concessions,
                is_draw_offered=turn.is_draw_offered,
            )
            if not isinstance(answer, Failure):
                attempts.append(Attempt(n, reply, None, "", request.id))
                return decided(answer, turn.position, tuple(attempts))
            attempts.append(Attempt(n, reply, answer.fault, answer.detail, request.id))
            failed.append(attempts[-1])
            n, past_tries = n + 1, 0
        return Decision(None, failed[-1].fault, tuple(attempts))

    def _free_prompt(self, parts: PromptParts, failed: Sequence[Attempt]) -> Prompt:
        """The prompt, with a complaint about the last failure where the context has room for it."""
        template = self._engine.template
        if not failed:
            return template.render(parts)
        last = failed[-1]
        room = self._engine.limits.context_tokens - self._settings.max_tokens
        for answer in (last.reply.text if last.reply else "", ""):
            notes = filter(None, (parts.tail_note, complaint(last.detail, answer)))
            noted = replace(parts, tail_note="\n".join(notes))
            if template.count_tokens(noted) <= room:
                return template.render(noted)
        return template.render(parts)

    def _seconds_left(self, turn: Turn, failed: Sequence[Attempt]) -> float:
        """Of the move limit and of the clock as it stood when the ply began."""
        spent = sum(charged_seconds(a.reply.timings) for a in failed if a.reply is not None)
        limit = self._context.move_limit_seconds
        if turn.clock_left_s is not None:
            limit = min(limit, turn.clock_left_s)
        return limit - spent

    # both

    def _request(
        self,
        turn: Turn,
        prompt: Prompt,
        count: tuple[int, int],
        *,
        choices: tuple[str, ...] | None,
        max_tokens: int,
        deadline_s: float,
    ) -> Request:
        n, past_tries = count
        ply, settings = turn.position.ply, self._settings
        seed = sampling_seed(self._context.run_seed, turn.match_id, turn.seat.side, ply, n)
        return Request(
            f"{turn.match_id}/{ply}/{n}/{past_tries}",
            turn.match_id,
            prompt,
            choices,
            max_tokens,
            Sampling(settings.temperature, settings.top_p, seed),
            deadline_s,
            stream=choices is None,
        )

    async def _ask(self, request: Request, n: int, before: Sequence[Attempt]) -> Reply:
        try:
            return await self._engine.generate(request)
        except EngineError as error:
            fault = _fault_of(error)
            attempt = Attempt(n, None, fault, str(error) or fault.value, request.id)
            raise Interrupted((*before, attempt)) from error


_DECIDES = (Fault.FLAG_FALL, Fault.RESIGNED)
"""Faults of the agent that no further try can mend."""


def cannot_think(engine: str) -> str:
    """The refusal of think mode where a prompt cannot be continued."""
    return (
        f'mode: "think" needs an engine that takes token ids, and engine "{engine}" does not; '
        'write "free" or "constrained", or use a vllm, vllm_server, sglang or llama_server engine'
    )


def sampling_seed(run_seed: int, match_id: str, side: int, ply: int, n: int) -> int:
    """The dice of one try: the same in every run of the same seed, 63 bits.

    A try repeated after an infrastructure fault keeps its `n`, and so its dice.
    """
    return stable_hash(f"{run_seed}/{match_id}/{side}/{ply}/{n}") & _SEED_MASK


def stable_hash(text: str) -> int:
    """64 bits that depend on the text alone, in every process and on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def charged_seconds(timings: Timings) -> float:
    """What an attempt costs a clock: the engine's prefill and decode, or, where it reports
    neither, the time from admission (CONTRACTS, Time)."""
    if timings.prefill_s is None or timings.decode_s is None:
        return timings.done - timings.admitted
    return timings.prefill_s + timings.decode_s


def _counts(made: Sequence[Attempt]) -> tuple[int, int]:
    """`n` of the next try, and how often the infrastructure has already cut off that `n`."""
    if not made:
        return 0, 0
    n = sum(a.is_own_failure for a in made)
    past = sum(1 for a in made if a.n == n and a.fault is not None and a.fault.is_infrastructure)
    return n, past


def _fault_of(error: EngineError) -> Fault:
    """The record's name of an engine's error; a user's own kind counts as transport."""
    try:
        fault = Fault(error.kind)
    except ValueError:
        return Fault.TRANSPORT
    return fault if fault.is_infrastructure else Fault.TRANSPORT
