"""llama.cpp's own HTTP server out of the package xllamacpp, which has no executable of it:
`python -m serving.llama_child -m FILE.gguf --port PORT …`.

The flags are llama-server's, those that engines of ours set. The environment should hold
OMP_WAIT_POLICY=passive: spinning threads collapse when another process holds a core. LLAMA_API_KEY
there, if set, is the key that clients must send.
"""

import argparse
import errno
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from serving.llama_flags import parse
from serving.llama_package import REMEDY, is_installed

_GGUF_MAGIC = b"GGUF"
_REFUSED = 1
"""Exit code where the server cannot be started, as llama-server's."""


def refusal(asked: argparse.Namespace) -> str | None:
    """Why a server of these flags cannot start, as far as that is seen without loading it."""
    try:
        with Path(asked.model).open("rb") as file:
            if file.read(4) != _GGUF_MAGIC:
                return f"{asked.model} is not a GGUF file"
    except OSError as error:
        return f"model {asked.model}: {error.strerror}"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((asked.host, asked.port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"port {asked.host}:{asked.port} is in use"
            return f"cannot listen on {asked.host}:{asked.port}: {error.strerror}"
    return None if is_installed() else f"xllamacpp is not installed: {REMEDY}"


def start(asked: argparse.Namespace) -> Any:
    """The server, listening and its model loaded; raises RuntimeError.

    It listens before it loads, and answers 503 meanwhile.
    """
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = asked.model
    if asked.alias is not None:
        params.model_alias = {asked.alias}
    params.hostnames = [asked.host]
    params.port = asked.port
    params.n_ctx = asked.ctx_size
    params.n_parallel = asked.parallel
    params.n_batch = asked.batch_size
    params.n_ubatch = asked.ubatch_size
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = asked.threads
    params.kv_unified = asked.kv_unified
    params.cache_type_k = _cache_type(xllamacpp, asked.cache_type_k)
    params.cache_type_v = _cache_type(xllamacpp, asked.cache_type_v)
    params.cache_ram_mib = asked.cache_ram
    params.n_threads_http = asked.threads_http
    params.sse_ping_interval = asked.sse_ping_interval
    params.endpoint_metrics = asked.metrics
    params.endpoint_slots = asked.slots
    params.ui = False
    if key := os.environ.get("LLAMA_API_KEY"):
        params.api_keys = [key]
    return xllamacpp.Server(params)


def _cache_type(xllamacpp: Any, name: str) -> Any:
    return getattr(xllamacpp.ggml_type, f"GGML_TYPE_{name.upper()}")


def main(arguments: list[str]) -> int:
    """Serves until a signal ends the process; returns its exit code where it cannot serve."""
    # at once, also while a model loads: the server's own end waits for its clients
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    try:
        asked = parse(arguments)
        why = refusal(asked)
    except ValueError as error:
        why = str(error)
    if why is not None:
        sys.stderr.write(f"error: {why}\n")
        return _REFUSED
    try:
        server = start(asked)
    except RuntimeError:
        sys.stderr.write(f"error: llama.cpp did not start with {asked.model}: see its log above\n")
        return _REFUSED
    sys.stderr.write(f"listening on {server.listening_address}\n")
    sys.stderr.flush()
    while True:
        signal.pause()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
