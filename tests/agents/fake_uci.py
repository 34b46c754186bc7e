"""A UCI engine for tests: plays what its board-less list says, and fails as it is told.

    python fake_uci.py BEHAVIOUR [MOVE …]

It answers searches with the MOVEs in turn and writes what it is told to $FAKE_UCI_LOG.
"""

import os
import signal
import sys
import time

FAIRY = "option name UCI_Variant type combo default chess var chess var janggi"


def say(*lines: str) -> None:
    for line in lines:
        sys.stdout.write(line + ("\r\n" if behaviour == "crlf" else "\n"))
    sys.stdout.flush()


def greet() -> None:
    if behaviour == "no_uciok":
        say("id name Mute")
        return
    say("", "Fake 1 by nobody", "id name Fake 1", "id author nobody")
    say("option name Hash type spin default 16 min 1 max 1024")
    say("option name Skill Level type spin default 20 min 0 max 20")
    if behaviour == "fairy":
        say(FAIRY)
    say("uciok")


def search() -> None:
    if behaviour == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "exit":
        sys.exit(3)
    if behaviour == "hang":
        time.sleep(600)
    if behaviour == "long_line":
        say("info string " + "x" * (2 << 20))
    if behaviour == "flood":
        say(*(f"info depth {n} currmove a1a1" for n in range(20_000)))
    if behaviour == "mate":
        say("info depth 3 nodes 40 score mate -2 pv e7e5")
    say("info depth 7 seldepth 9 nodes 1234 score cp -31 lowerbound pv e7e5", "info string a note")
    if behaviour == "mate":
        say("info depth 4 nodes 50 score mate 3 pv e7e5")
    say("bestmove" + (f" {moves.pop(0)}" if moves else "") + " ponder a7a6")


behaviour, *moves = sys.argv[1:]
if behaviour == "crash_at_start":
    sys.exit(9)
log = os.environ.get("FAKE_UCI_LOG", os.devnull)
for told in sys.stdin:
    with open(log, "a", encoding="utf-8") as file:
        file.write(told)
    match told.split():
        case ["uci"]:
            greet()
        case ["isready"]:
            say("readyok")
        case ["go", *_]:
            search()
        case ["quit"]:
            break
