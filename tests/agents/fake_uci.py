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
    while behaviour == "endless":
        say("y" * 999)
    if behaviour in ("child", "child_apart") and os.fork() == 0:
        if behaviour == "child_apart":
            os.setsid()
        with open(log, "a", encoding="utf-8") as file:
            file.write(f"child {os.getpid()}\n")
        time.sleep(600)
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
    if behaviour == "complain":
        sys.stderr.write("x" * 100_000 + "\nloading net\n\n\x1bno such net: a.nnue\n")
        sys.exit(3)
    if behaviour == "close_output":
        os.close(1)
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
    if behaviour == "multipv":
        say("info depth 8 multipv 1 nodes 60 score cp 12 pv e7e5")
        say(*(f"info depth 8 multipv {n} nodes 60 score cp -{n}00" for n in (2, 13)))
    if behaviour == "huge_move":
        moves[:] = ["e" * 900_000]
    if behaviour == "huge_numbers":
        say(f"info depth {'9' * 9999} nodes {'9' * 9999} score cp {'9' * 9999}")
    ponder = "" if behaviour == "bare" else " ponder a7a6"
    say("bestmove" + (f" {moves.pop(0)}" if moves else "") + ponder)


behaviour, *moves = sys.argv[1:]
if behaviour == "crash_at_start":
    sys.exit(9)
is_asked = False
log = os.environ.get("FAKE_UCI_LOG", os.devnull)
for told in sys.stdin if behaviour != "stubborn" else iter(sys.stdin.readline, None):
    with open(log, "a", encoding="utf-8") as file:
        file.write(told)
    match told.split():
        case ["uci"]:
            greet()
        case ["ucinewgame"]:
            is_asked = True
        case ["isready"]:
            if is_asked and behaviour == "slow_ready":
                time.sleep(0.5)
            if is_asked and behaviour == "never_ready":
                continue
            say("readyok")
        case ["go", *_]:
            search()
        case ["quit"] if behaviour != "stubborn":
            break
