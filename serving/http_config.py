"""What every kind of server has in its configuration."""

import math
import os
import re
import string
from collections import Counter
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    ByteSize,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from serving.config import PACKAGED_MODEL, EngineConfig, EngineConfigError

URL_START_S = 10.0
"""A server that runs already answers within this."""
LAUNCH_START_S = 300.0
"""A server that we launch loads its model first, on a busy machine for minutes."""

DType = Literal["auto", "half", "float16", "bfloat16", "float", "float32"]


def _server_url(url: str) -> str:
    if not {"@", "?", "#"}.isdisjoint(url):
        raise ValueError("keys and parameters stand in no url: see api_key_env")
    if wrong := _wrong_with(url):
        raise ValueError(f"{wrong}; write it like 'http://127.0.0.1:8080'")
    return url.rstrip("/").removesuffix("/v1")


ServerUrl = Annotated[str, AfterValidator(_server_url)]
"""Without a key, and without the /v1 that each path begins with."""


class HttpEngineConfig(EngineConfig):
    """A server of language models: one that runs at `url`, or one that is launched for the run."""

    launch_only: ClassVar[frozenset[str]] = frozenset({"start_seconds", "extra_args"})
    """Knobs that only a launch can set; with `url` they are the server's own."""
    taken_flags: ClassVar[dict[str, str]] = {}
    """Flags of the server that `extra_args` must not give, each with the knob to use; empty where
    the flag must stand as it is."""

    model: str = Field(
        default=PACKAGED_MODEL,
        description="Packaged name, model directory, .gguf file or Hub id; for a server that takes "
        "chat messages the name it knows.",
    )
    url: ServerUrl | None = Field(
        default=None,
        description="Of a running server, like 'http://127.0.0.1:8080'; omitted: launched for the "
        "run on a free port of this machine.",
    )
    served_model: str | None = Field(
        default=None, description="The name sent in requests, where it differs from `model`."
    )
    api_key_env: str | None = Field(
        default=None,
        description="Name of the environment variable that holds the server's key; with url.",
    )
    start_seconds: float = Field(
        default=LAUNCH_START_S,
        gt=0,
        strict=True,
        description="Until a launched server must answer.",
    )
    scrape_seconds: float = Field(
        default=1.0,
        gt=0,
        le=3600,
        strict=True,
        description="Between looks at the server's metrics.",
    )
    scrape: bool = Field(
        default=True,
        strict=True,
        description="Look at the server's own metrics; false behind a router that passes those of "
        "one of its servers on as if they were all of them.",
    )
    extra_args: tuple[str, ...] = Field(
        default=(), description="Further words for the end of the launched server's command line."
    )

    @field_validator("api_key_env")
    @classmethod
    def _is_a_name(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[A-Za-z_]\w*", name):
            # not quoted: it may be the key itself
            raise ValueError("the name of an environment variable is wanted, not a key")
        return name

    @model_validator(mode="after")
    def _knobs_have_a_server(self) -> "HttpEngineConfig":
        if self.is_launched:
            if self.api_key_env is not None:
                raise ValueError(
                    "api_key_env: a launched server listens to this machine alone and takes no "
                    "key; leave it out"
                )
        else:
            for knob in sorted(self.launch_only & self.model_fields_set):
                raise ValueError(f"{knob}: is the server's own with url; leave it out")
        for word in self.extra_args:
            if word.startswith("-"):
                self._check_flag(word.partition("=")[0])
        return self

    @model_serializer(mode="wrap")
    def _can_be_read_again(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the knobs that would be refused where they are said."""
        refused = set(self.lacking) | (set() if self.is_launched else self.launch_only)
        return {name: value for name, value in dump(self).items() if name not in refused}

    def _check_flag(self, flag: str) -> None:
        if any(_means(flag, address) for address in _ADDRESS_FLAGS):
            raise ValueError(f"extra_args: {flag}: the address of a launched server is chosen here")
        if _means(flag, "--api-key") or "api-key" in flag.replace("_", "-"):
            raise ValueError("extra_args: --api-key: keys stand in no configuration")
        for taken, knob in self.taken_flags.items():
            if _means(flag, taken):
                remedy = f"use {knob}" if knob else "the engine needs it as it is"
                raise ValueError(f"extra_args: {flag}: {remedy}")

    @property
    def request_model(self) -> str:
        """The model's name in requests."""
        return self.served_model or self.model

    @property
    def is_launched(self) -> bool:
        """It is started for the run; else it runs already."""
        return self.url is None


_ADDRESS_FLAGS = ("--host", "--port", "-H", "--uds", "--data-parallel-address")


def _means(word: str, flag: str) -> bool:
    """Whether some server takes the word for the flag: with _ for -, cut short where it is a long
    one, and with its value's digits behind where it is a short one."""
    if word.startswith("--"):
        return flag.startswith(word.replace("_", "-"))
    return word.rstrip(string.digits) == flag


def _wrong_with(url: str) -> str:
    """Why there can be no server at the url, as far as its letters tell; empty where there can."""
    if re.search(r"\s", url):
        return "there is a space in it"
    if not url.lower().startswith(("http://", "https://")):
        return "it does not begin with http:// or https://"
    try:
        parts = urlsplit(url)
    except ValueError:
        return "its brackets hold no address"
    try:
        host = (parts.hostname or "").encode("idna")
    except ValueError:
        host = b""
    if not host:
        return "it names no host"
    try:
        port = parts.port
    except ValueError:
        port = 0
    return "its port is no number of 1 to 65535" if port == 0 else ""


def replica_name(url: str) -> str:
    """What tells the server of a valid url from others: `host:port`, and the path if there is
    one."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return f"{f'[{host}]' if ':' in host else host}:{port}{parts.path}"


class BatchKnobs(HttpEngineConfig):
    """Knobs that servers with one paged KV cache share with the embedded vLLM, and the urls of
    several such servers."""

    launch_only: ClassVar[frozenset[str]] = HttpEngineConfig.launch_only | {
        "device",
        "max_batched_tokens",
        "kv_cache_bytes",
        "memory_fraction",
        "kv_dtype",
        "prefix_cache",
        "block_tokens",
        "dtype",
        "threads",
    }

    urls: tuple[ServerUrl, ...] | None = Field(
        default=None,
        min_length=1,
        description="Of running servers of one model, in the place of `url`. A match stays at one "
        "of them; `max_concurrent` is of all together, and each gets its even share at most.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="What it computes on; auto: what its installation is for."
    )
    max_batched_tokens: int | None = Field(
        default=None,
        ge=1,
        strict=True,
        description="Tokens per step; omitted: the server's own choice.",
    )
    kv_cache_bytes: ByteSize | None = Field(
        default=None, gt=0, description="Memory of the KV cache, as a number or like '512MiB'."
    )
    memory_fraction: float | None = Field(
        default=None,
        gt=0.0,
        le=1.0,
        strict=True,
        description="Share of the device's memory for weights and KV cache.",
    )
    kv_dtype: str | None = Field(
        default=None, description="Type of cached values, such as fp8; omitted: the model's."
    )
    prefix_cache: bool = Field(
        default=True, strict=True, description="Reuse the KV of shared prompt prefixes."
    )
    block_tokens: int | None = Field(
        default=None,
        ge=1,
        strict=True,
        description="Tokens per KV block; omitted: the server's own choice.",
    )
    dtype: DType | None = Field(
        default=None,
        description="Type of weights; omitted: on a CPU bfloat16 where it can multiply that, else "
        "float32; on a GPU the model's.",
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        strict=True,
        description="OpenMP threads on a CPU; omitted: half of the processors, at least one.",
    )

    @property
    def is_launched(self) -> bool:
        return self.url is None and self.urls is None

    @property
    def batch_limit(self) -> int:
        return math.ceil(self.max_concurrent / len(self.urls or (self.url,)))

    @property
    def is_replicated(self) -> bool:
        return len(self.urls or ()) > 1

    def at(self, url: str) -> Self:
        """The same for one of the `urls`, with its share of the requests."""
        only = {"url": url, "urls": None, "max_concurrent": self.batch_limit}
        return self.model_copy(update=only)

    @model_validator(mode="after")
    def _one_place_each(self) -> "BatchKnobs":
        if self.url is not None and self.urls is not None:
            raise ValueError("url and urls: give one of them")
        for name, times in Counter(map(replica_name, self.urls or ())).items():
            if times > 1:
                raise ValueError(f"urls: {name} stands there {times} times; name each server once")
        return self

    @model_validator(mode="after")
    def _one_size_of_cache(self) -> "BatchKnobs":
        if self.kv_cache_bytes is not None and self.memory_fraction is not None:
            raise ValueError("kv_cache_bytes and memory_fraction: give one of them")
        return self


def check_http(config: HttpEngineConfig) -> None:
    """Raises EngineConfigError where the key's variable is not set."""
    api_key(config)


def api_key(config: HttpEngineConfig) -> str | None:
    """The server's key out of the environment; raises EngineConfigError where it is not set."""
    if config.api_key_env is None:
        return None
    key = os.environ.get(config.api_key_env)
    if not key:
        # names are written in capitals; others are not quoted, for some keys look like them
        is_name = config.api_key_env.isupper()
        told = f"api_key_env = {config.api_key_env!r}" if is_name else "api_key_env"
        raise EngineConfigError(
            f"{told}: there is no such environment variable, or it is empty: export it before the "
            "run"
        )
    return key
