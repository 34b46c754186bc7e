"""A host without vLLM that misbehaves by name: `fake_host.py BEHAVIOUR SOCKET LIFELINE`.

answer       the first choice, with one step; metrics that count the questions for them
die_once:F   ends at the first request while file F is absent (it makes F); then answers
die          ends at every request, also for metrics
dead         reports `dead` at every request
hang         takes requests and says nothing more
drip         sends steps for ever; answers only when told to expire, with what there is
drip:S       the same, and says that S seconds passed in its queue
freeze       like drip, without the steps
pause:S      like drip, but stands still for S seconds once it is asked
cut_short    half of "MOVE: e2e4", as one that ran out of tokens
refuse       an error of each kind, in turn
crash        writes an error and ends before it is ready
"""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from serving.host_wire import decode, encode
from serving.process import guard_group
from serving.vllm_wire import Answer, Ask, Step

STEP = Step(0.0, 2, 7, 2, 1, 0.25, 100, 64, 0)


class FakeHost:
    """One connection."""

    def __init__(self, behaviour: str, channel: socket.socket) -> None:
        self.behaviour, _, self.marker = behaviour.partition(":")
        self.channel = channel
        self.asked: dict[int, Ask] = {}
        self.errors = ["overloaded", "rejected", "transport"]
        self.scrapes = 0
        self.still_until = 0.0

    def send(self, *messages: Any) -> None:
        self.channel.sendall(encode(messages))

    def serve(self) -> None:
        for line in self.channel.makefile("rb"):
            for tag, *fields in decode(line):
                getattr(self, tag)(*fields)

    def start(self, arguments: dict[str, Any], warm_up_ids: list[int]) -> None:
        assert arguments["max_model_len"]
        assert warm_up_ids
        if self.behaviour == "crash":
            sys.stderr.write("RuntimeError: no memory for 7 blocks\nbye\n")
            sys.stderr.flush()
            os._exit(3)
        subprocess.Popen(["sleep", "1000"])  # stands for vLLM's own processes
        self.send(["ready", "9.9"])
        if self.behaviour in ("drip", "pause"):
            threading.Thread(target=self.drip, daemon=True).start()

    def drip(self) -> None:
        while True:
            if time.monotonic() >= self.still_until:
                self.send(["steps", STEP])
            time.sleep(0.02)

    def ask(self, *fields: Any) -> None:
        ask = Ask(*fields)
        self.asked[ask.number] = ask
        if self.behaviour == "answer":
            self.answer(ask)
        elif self.behaviour == "die_once":
            if Path(self.marker).exists():
                self.answer(ask)
            else:
                Path(self.marker).touch()
                os._exit(1)
        elif self.behaviour == "die":
            os._exit(1)
        elif self.behaviour == "pause":
            self.still_until = time.monotonic() + float(self.marker)
        elif self.behaviour == "cut_short":
            cut = Answer(ask.number, "MOVE:", "length", 9, 3, 0, 0.0, 0.0, 0.0, None)
            self.send(["reply", *cut])
        elif self.behaviour == "dead":
            self.send(["dead", "vLLM said goodbye"])
        elif self.behaviour == "refuse":
            kind = self.errors[(ask.number - 1) % 3]
            self.send(["error", ask.number, kind, f"{kind}, on purpose"])

    def answer(self, ask: Ask) -> None:
        text = ask.choices[0] if ask.choices else "MOVE: e2e4"
        answer = Answer(ask.number, text, "stop", len(ask.ids), 5, 32, 0.25, 0.5, 0.75, 2.0)
        first = [["first", ask.number]] if ask.stream else []
        self.send(["steps", STEP], *first, ["reply", *answer])

    def expire(self, number: int) -> None:
        if self.behaviour in ("drip", "freeze", "pause"):
            queue_s = float(self.marker or 0) if self.behaviour == "drip" else 0.0
            partial = Answer(number, "I thi", "abort", 9, 3, 0, queue_s, 0.0, 0.0, None)
            self.send(["reply", *partial])

    def abort(self, number: int) -> None:
        sys.stderr.write(f"aborted {number}\n")
        sys.stderr.flush()

    def reset(self) -> None:
        self.send(["reset", True])

    def metrics(self, number: int) -> None:
        if self.behaviour == "die":
            os._exit(1)
        if self.behaviour == "answer":
            self.scrapes += 1
            self.send(["metrics", number - 1, "stale"], ["metrics", number, f"n {self.scrapes}\n"])


if __name__ == "__main__":
    guard_group(int(sys.argv[3]), os.environ["TMPDIR"])
    FakeHost(sys.argv[1], socket.socket(fileno=int(sys.argv[2]))).serve()
