"""A Ray host without Ray that misbehaves by name: `fake_ray_host.py BEHAVIOUR SOCKET LIFELINE`.

answer       the first choice, by r1 and r2 in turn; a look at the replica after each
refuse       an error of each kind, in turn, and one of a kind that nobody knows
lose_one     r1 ends at the first request, which fails; r3 comes at the third
lonely       keeps the first request; all replicas end at the second, which fails; r3 comes once the
             first is aborted, and answers
lonely_once:F  all replicas end at the first request while file F is absent (it makes F), and none
             comes back; then answers
restarting   r1 and r2 are away in turn while their engines are started again, and answer then
die_once:F   ends at the first request while file F is absent (it makes F); then answers
die          ends at every request
hang         takes requests and says nothing more of them
freeze_once:F  stands still at the first request while file F is absent (it makes F); then answers
half         answers, and one replica cannot prime or reset
silent       neither primes nor resets, and does not say when it has deleted what was deployed
die_at_close ends when it is to delete what was deployed
crash        writes an error and ends before it is ready
"""

import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from serving.host_wire import decode, encode
from serving.process import guard_group
from serving.ray_wire import Look, RayStart, ReplicaPlan

NODES = {"r1": "10.0.0.1", "r2": "10.0.0.2", "r3": "10.0.0.3"}
KINDS = ["overloaded", "rejected", "transport", "malformed", "stalled", "engine_dead", "odd"]


class FakeRayHost:
    """One connection."""

    def __init__(self, behaviour: str, channel: socket.socket) -> None:
        self.behaviour, _, self.marker = behaviour.partition(":")
        self.channel = channel
        self.replicas = ["r1", "r2"]
        self.asked = 0
        self.lock = threading.Lock()

    def send(self, *messages: Any) -> None:
        with self.lock:
            self.channel.sendall(encode(messages))

    def serve(self) -> None:
        for line in self.channel.makefile("rb"):
            for tag, *fields in decode(line):
                getattr(self, tag)(*fields)

    def note(self, what: str) -> None:
        sys.stderr.write(f"{what}\n")
        sys.stderr.flush()

    def start(self, arguments: dict[str, Any], warm_up_ids: list[int]) -> None:
        start = RayStart(**arguments)
        plan = ReplicaPlan(**start.plan)
        assert plan.engine["kind"] == "scripted"
        assert warm_up_ids == []
        self.note(f"app {start.app}")
        if self.behaviour == "crash":
            self.note("RuntimeError: no node has 7 GPUs\nbye")
            os._exit(3)
        self.send(["replicas", []])
        self.see(*self.replicas)
        self.send(["ready", "9.9, ray 0.0"])
        threading.Thread(target=self.beat, daemon=True).start()

    def beat(self) -> None:
        with suppress(OSError):
            while True:
                time.sleep(0.05)
                self.send(["alive"])

    def see(self, *replicas: str) -> None:
        self.replicas = list(replicas)
        self.send(["replicas", self.replicas])

    def is_first_start(self) -> bool:
        was_there = Path(self.marker).exists()
        Path(self.marker).touch()
        return not was_there

    def ask(self, number: int, match_id: str, request: list[Any]) -> None:
        self.asked += 1
        assert request[1] == match_id
        nth = f"{self.behaviour} {self.asked}"
        if self.behaviour == "die" or (self.behaviour == "die_once" and self.is_first_start()):
            os._exit(1)
        elif self.behaviour == "freeze_once" and self.is_first_start():
            os.kill(os.getpid(), signal.SIGSTOP)
        elif nth == "lonely 2" or (self.behaviour == "lonely_once" and self.is_first_start()):
            self.see()
            self.fail(number, "engine_dead", "replica r2 ended")
        elif nth == "lose_one 1":
            self.fail(number, "engine_dead", "replica r1 ended")
            self.see("r2")
        elif self.behaviour == "refuse":
            kind = KINDS[self.asked - 1]
            self.fail(number, kind, f"replica r1: {kind}, on purpose")
        elif nth == "lose_one 3":
            self.see("r2", "r3")
            self.answer(number, request)
        elif self.behaviour == "restarting":
            self.answer_again(number, request)
        elif nth != "lonely 1" and self.behaviour != "hang":
            self.answer(number, request)

    def fail(self, number: int, kind: str, why: str) -> None:
        self.send(["error", number, kind, why])

    def answer_again(self, number: int, request: list[Any]) -> None:
        """After a restart of the engine inside the replica."""
        replica = self.replicas[self.asked % 2]
        self.send(["replicas", [replica]])
        self.answer(number, request)
        self.send(["replicas", self.replicas])

    def answer(self, number: int, request: list[Any]) -> None:
        replica = self.replicas[(self.asked - 1) % len(self.replicas)]
        choices = request[3]
        usage, durations = [100, 5, 32], [0.25, 0.5, 0.75]
        reply = [choices[0], "stop", usage, 0.0, durations, 2.0, ""]
        restarts = self.asked if self.behaviour == "restarting" else 0
        step = [0.0, "per_step", 2, 1, 2, 7, 0.25, 100 * self.asked, 64 * self.asked, 0, 0]
        look = Look(replica, restarts, True, NODES[replica], [step])
        self.send(["look", *look], ["reply", number, replica, reply])

    def abort(self, number: int) -> None:
        self.note(f"aborted {number}")
        if self.behaviour == "lonely":
            self.see("r3")

    def prime(self, number: int, prompt: list[Any]) -> None:
        assert prompt[0] == "ids"
        self.reset(number)

    def reset(self, number: int) -> None:
        if self.behaviour != "silent":
            self.send(["done", number, self.behaviour != "half"])

    def close(self) -> None:
        self.note("asked to delete")
        if self.behaviour == "die_at_close":
            os._exit(1)
        if self.behaviour != "silent":
            self.see()
            self.send(["closed"])


if __name__ == "__main__":
    guard_group(int(sys.argv[3]), os.environ["TMPDIR"])
    FakeRayHost(sys.argv[1], socket.socket(fileno=int(sys.argv[2]))).serve()
