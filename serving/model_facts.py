"""What a plan knows of a model, by the files of it that are on this machine. Reads no weights."""

import json
import struct
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from serving.capacity import Model, weights_bytes
from serving.config import PACKAGED_MODEL, EngineConfigError
from serving.gguf_header import GgufHeader, read_header
from serving.model_shapes import (
    cache_of,
    cache_of_gguf,
    context_of,
    estimated_parameters,
    parameters_of,
    text_settings,
    weights_dtype,
)
from serving.models import local_directory, model_settings, packaged_gguf

_VALUES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "F8_E5M2": 1}
"""Bytes of a weight by safetensors' name of its type; in other types several share a number."""
_LONGEST_HEADER = 100 << 20
"""Bytes; safetensors' own limit."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def facts_of(model: str, *, as_gguf: bool = False) -> Model:
    """The facts of a packaged name, model directory, config.json, .gguf file, or Hub id whose files
    are here. `as_gguf`: of the packaged model's GGUF file rather than of its copy for vLLM.

    Raises EngineConfigError: one line, what is missing and the remedy.
    """
    path = Path(model).expanduser()
    if model == PACKAGED_MODEL and (as_gguf or local_directory(model) is None):
        return _of_gguf(model, packaged_gguf(), is_copied=not as_gguf)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise EngineConfigError(f"model {model!r}: no such file")
        return _of_gguf(model, path, is_copied=not as_gguf)
    if path.suffix == ".json" and path.is_file():
        return _of_settings(model, path)
    directory = local_directory(model)
    if directory is None:
        raise EngineConfigError(
            f"model {model!r} is not on this machine: name its config.json, directory or .gguf "
            "file, or give its shape by --layers, --kv-heads, --head-size and --parameters"
        )
    return _of_directory(model, directory)


def _of_gguf(model: str, file: Path, *, is_copied: bool) -> Model:
    """`is_copied`: the engine computes with a copy of it in 16 bits."""
    try:
        header = read_header(file)
        facts = cache_of_gguf(header.metadata)
        context = _gguf_context(header)
    except ValueError as error:
        raise EngineConfigError(f"model {str(file)!r}: {error}") from None
    except OSError as error:
        raise EngineConfigError(f"model {str(file)!r} cannot be read: {error.strerror}") from None
    read = Model(model, facts.shape, context, source="its GGUF header", notes=facts.notes)
    if header.metadata.get("split.count", 1) > 1:
        told = "the file is one of several: its weights are not all counted; give --parameters"
        return replace(read, notes=(*facts.notes, told))
    weights = 2 * header.parameters if is_copied else header.weights_bytes
    read = replace(read, parameters=header.parameters, weights_bytes=weights)
    if header.metadata.get(f"{header.metadata['general.architecture']}.expert_count"):
        return replace(read, notes=(*read.notes, _EXPERTS_NOTE))
    return read


_EXPERTS_NOTE = (
    "the model chooses experts: every step is counted as if each token passed all of them; give "
    "--active-parameters"
)


def _gguf_context(header: GgufHeader) -> int | None:
    context = header.metadata.get(f"{header.metadata['general.architecture']}.context_length")
    return context_of({"max_position_embeddings": context})


def _of_settings(model: str, file: Path) -> Model:
    """A config.json alone: its weights are estimated where it is a dense model."""
    settings = model_settings(file)
    read = _read(model, file, settings)
    parameters, dtype = estimated_parameters(settings), weights_dtype(settings)
    if parameters is None:
        told = "its weights cannot be derived from its config.json: give --parameters"
        return replace(read, notes=(*read.notes, told))
    return replace(
        read,
        parameters=parameters,
        weights_bytes=None if dtype is None else weights_bytes(parameters, dtype),
        notes=(*read.notes, "its weights are counted by its config.json, as of a dense model"),
    )


def _read(model: str, file: Path, settings: dict[str, Any]) -> Model:
    try:
        facts, context = cache_of(settings), context_of(settings)
    except ValueError as error:
        raise EngineConfigError(
            f"model {str(file)!r}: {error}; name another, or give --layers, --kv-heads and "
            "--head-size"
        ) from None
    return Model(model, facts.shape, context, source="its config.json", notes=facts.notes)


def _of_directory(model: str, directory: Path) -> Model:
    file = directory / "config.json"
    settings = model_settings(file)
    read = _read(model, file, settings)
    try:
        weights, parameters = _count_weights(_weight_files(directory))
    except (OSError, ValueError) as error:
        raise EngineConfigError(f"model directory {str(directory)!r}: {error}") from None
    if not weights:
        weights = sum(file.stat().st_size for file in directory.glob("*.bin"))
    if not weights:
        return _of_settings(model, file)
    dtype = weights_dtype(settings)
    if parameters is None and dtype is not None:
        parameters = parameters_of(weights, dtype)
    has_experts = any(text_settings(settings).get(key) for key in _EXPERTS)
    return replace(
        read,
        parameters=parameters,
        weights_bytes=weights,
        source="its files",
        notes=(*read.notes, _EXPERTS_NOTE) if has_experts else read.notes,
    )


def _weight_files(directory: Path) -> list[Path]:
    """Those that make up the model once, where a folder holds it in two forms."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = model_settings(index).get("weight_map")
        if not isinstance(names, dict):
            raise ValueError(f"{index.name} has no weight_map: get it again")
        return [directory / name for name in sorted(set(map(str, names.values())))]
    whole = directory / "model.safetensors"
    return [whole] if whole.is_file() else sorted(directory.glob("*.safetensors"))


def _count_weights(files: Iterable[Path]) -> tuple[int, int | None]:
    """Bytes of all tensors, and how many weights they are; None where several share a number."""
    size, count = 0, 0
    is_countable = True
    for file in files:
        for kind, taken in _tensors(file):
            width = _VALUES.get(kind)
            is_countable = is_countable and width is not None
            size += taken
            count += taken // (width or 1)
    return size, count if is_countable else None


def _tensors(file: Path) -> list[tuple[str, int]]:
    """Type and bytes of each, by the format's header: 8 bytes of length, then JSON."""
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        text = stream.read(length) if length <= _LONGEST_HEADER else b""
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        found = [
            (str(tensor["dtype"]), int(tensor["data_offsets"][0]), int(tensor["data_offsets"][1]))
            for tensor in header.values()
        ]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        raise ValueError(f"{file.name} has no header of tensors: get it again") from None
    end = max((last for _, _, last in found), default=0)
    if 8 + length + end > file.stat().st_size:
        raise ValueError(f"{file.name} is cut short: get it again")
    return [(kind, last - first) for kind, first, last in found]
