"""What the vLLM host learns of each engine step. Reads vLLM's statistics, imports nothing of it."""

import time
from collections import deque
from typing import Any

from serving.vllm_wire import Step

_STEPS_REMEMBERED = 16_384


class StepTap:
    """What is learnt of every engine step, kept until it is sent."""

    def __init__(self) -> None:
        self.unsent: list[tuple[float, Step]] = []
        self.step_requests_mean: dict[str, float] = {}
        """By request, from its last step until its reply is made."""
        self.failures = 0
        self._requests: deque[int] = deque(maxlen=_STEPS_REMEMBERED)

    def add(self, scheduler: Any, iteration: Any) -> None:
        """Take vLLM's own statistics of one step; either may be None."""
        details = scheduler.iteration_details if scheduler is not None else None
        if details is not None and not details.is_dummy:
            requests = details.num_ctx_requests + details.num_generation_requests
            tokens = details.num_ctx_tokens + details.num_generation_tokens
            self._requests.append(requests)
            self._keep(scheduler, iteration, requests, tokens)
        if iteration is not None:
            for finished in iteration.finished_requests:
                self._finish(str(finished.request_id), finished.num_generation_tokens)

    def _keep(self, scheduler: Any, iteration: Any, requests: int, tokens: int) -> None:
        prefix = scheduler.prefix_cache_stats
        step = Step(
            age_s=0.0,
            requests=requests,
            tokens=tokens,
            # vLLM counts after finished requests have left
            running=max(scheduler.num_running_reqs, requests),
            # those skipped wait for their grammar, not for room in the batch
            waiting=scheduler.num_waiting_reqs,
            kv_usage=scheduler.kv_cache_usage,
            prefix_queries=prefix.queries if prefix is not None else 0,
            prefix_hits=prefix.hits if prefix is not None else 0,
            preemptions=iteration.num_preempted_reqs if iteration is not None else 0,
        )
        self.unsent.append((time.monotonic(), step))

    def _finish(self, request_id: str, tokens: int) -> None:
        """A request took part in the last `tokens` steps: each gave it one token."""
        count = min(tokens, len(self._requests))
        if count:
            taken = [self._requests[-at] for at in range(1, count + 1)]
            self.step_requests_mean[request_id] = sum(taken) / count

    def take(self) -> list[Step]:
        """The steps not yet sent, each with its age now."""
        now = time.monotonic()
        steps = [step._replace(age_s=now - at) for at, step in self.unsent]
        self.unsent.clear()
        return steps
