"""The flags of llama.cpp's server that it takes out of the package xllamacpp."""

import argparse
from typing import NoReturn

_CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")


class _Flags(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Flags by llama-server's names, short or long; raises ValueError for another one."""
    flags = _Flags(prog="llama_child", allow_abbrev=False, add_help=False)
    flags.add_argument("-m", "--model", required=True)
    flags.add_argument("-a", "--alias")
    flags.add_argument("--host", default="127.0.0.1")
    flags.add_argument("--port", type=int, default=8080)
    flags.add_argument("-c", "--ctx-size", type=int, default=0)
    flags.add_argument("-np", "--parallel", type=int, default=1)
    flags.add_argument("-b", "--batch-size", type=int, default=2048)
    flags.add_argument("-ub", "--ubatch-size", type=int, default=512)
    flags.add_argument("-t", "--threads", type=int, default=-1)
    flags.add_argument("-kvu", "--kv-unified", action="store_true")
    flags.add_argument("-ctk", "--cache-type-k", choices=_CACHE_TYPES, default="f16")
    flags.add_argument("-ctv", "--cache-type-v", choices=_CACHE_TYPES, default="f16")
    flags.add_argument("-cram", "--cache-ram", type=int, default=8192)
    flags.add_argument("--threads-http", type=int, default=-1)
    flags.add_argument("--sse-ping-interval", type=int, default=30)
    flags.add_argument("--metrics", action="store_true")
    flags.add_argument("--slots", action="store_true")
    flags.add_argument("--no-ui", action="store_true")
    return flags.parse_args(arguments)
