"""The process that becomes a server: `python -m serving.server_child LIFELINE -- PROGRAM …`.

It leads a session of its own already. It leaves a guard beside itself that ends the session when
the arena is gone, and turns into the program, which need not know of any of this.
"""

import os
import sys

from serving.process import guard_group

NOT_RUN = 127
"""Exit code where the program cannot be run, as a shell's."""


def main(arguments: list[str]) -> int:
    """Does not return where the program can be run."""
    lifeline, _, program, *rest = arguments
    guard_group(int(lifeline), os.environ.get("TMPDIR"))
    try:
        os.execv(program, [program, *rest])
    except OSError as error:
        sys.stderr.write(f"{program} cannot be run: {error.strerror}\n")
        return NOT_RUN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
