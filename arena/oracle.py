"""A child process that times pyffish, the rules oracle of the tests. It may crash alone here.

Reads one JSON line `{"variant", "fen", "lines": [[move, …], …]}` and prints the microseconds of
`legal_moves` for each line, as JSON; exits 3 where pyffish is not installed.
"""

import importlib
import json
import sys
import time


def main() -> int:
    try:
        pyffish = importlib.import_module("pyffish")
    except ImportError:
        return 3
    task = json.loads(sys.stdin.readline())
    times = []
    for line in task["lines"]:
        began = time.perf_counter()
        pyffish.legal_moves(task["variant"], task["fen"], line)
        times.append((time.perf_counter() - began) * 1e6)
    sys.stdout.write(json.dumps(times))
    return 0


if __name__ == "__main__":
    sys.exit(main())
