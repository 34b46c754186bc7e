"""What a plan knows of a model, by the files of it that are on this machine. Reads no weights."""

import struct
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from serving.capacity import MOST_BYTES, MOST_TOKENS, Model, weights_bytes
from serving.checked import Fields, json_object
from serving.config import PACKAGED_MODEL, EngineConfigError
from serving.gguf_header import GgufHeader, read_header
from serving.model_shapes import (
    architecture_of,
    cache_of,
    cache_of_gguf,
    context_of,
    embedding_parameters,
    estimated_parameters,
    has_experts,
    is_quantised,
    nearest_dtype,
    parameters_of,
    text_settings,
    weights_dtype,
)
from serving.models import local_directory, model_path, model_settings, packaged_gguf

_VALUES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "F8_E5M2": 1}
"""Bytes of a weight by safetensors' name of its type; in other types several share a number."""
_LONGEST_HEADER = 100 << 20
"""Bytes; safetensors' own limit."""


def facts_of(model: str, *, as_gguf: bool = False) -> Model:
    """The facts of a packaged name, model directory, config.json, .gguf file, or Hub id whose files
    are here. `as_gguf`: of the packaged model's GGUF file rather than of its copy for vLLM.

    Raises EngineConfigError: one line, what is missing and the remedy.
    """
    path = model_path(model)
    if model == PACKAGED_MODEL and (as_gguf or local_directory(model) is None):
        return _of_gguf(model, packaged_gguf(), is_copied=not as_gguf)
    if path.suffix in (".gguf", ".json"):
        if not path.is_file():
            raise EngineConfigError(f"model {model!r}: no such file")
        if path.suffix == ".json":
            return _of_settings(model, path)
        return _of_gguf(model, path, is_copied=not as_gguf)
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
        num_files = Fields(header.metadata).number("split.count", least=0) or 1
        stored = None
        if header.parameters and header.weights_bytes is not None:
            stored = nearest_dtype(header.weights_bytes, header.parameters)
    except ValueError as error:
        raise EngineConfigError(f"model {str(file)!r}: {error}") from None
    except OSError as error:
        raise EngineConfigError(f"model {str(file)!r} cannot be read: {error.strerror}") from None
    read = Model(
        model,
        facts.shape,
        context,
        source="its GGUF header",
        notes=facts.notes,
        weights_dtype="fp16" if is_copied else stored,
        is_quantised=not is_copied,
        attention_heads=facts.attention_heads,
    )
    if num_files > 1:
        told = "the file is one of several: its weights are not all counted; give --parameters"
        return replace(read, notes=(*facts.notes, told))
    if not header.parameters:
        raise EngineConfigError(f"model {str(file)!r}: holds no weights, only a vocabulary")
    weights = 2 * header.parameters if is_copied else header.weights_bytes
    read = replace(read, parameters=header.parameters, weights_bytes=weights)
    if has_experts(header.metadata):
        return replace(read, notes=(*read.notes, _EXPERTS_NOTE))
    return read


_EXPERTS_NOTE = (
    "the model chooses experts: every step is counted as if each token passed all of them; give "
    "--active-parameters"
)

_QUANTISED_NOTE = (
    "how its config.json says that its weights are quantised is not known here: where their size "
    "is not that of its files, give --weights"
)


def _gguf_context(header: GgufHeader) -> int | None:
    told = Fields(header.metadata, f"{architecture_of(header.metadata)}.")
    return told.number("context_length", most=MOST_TOKENS)


def _of_settings(model: str, file: Path) -> Model:
    """A config.json alone: its weights are estimated where it is a dense model."""
    settings = model_settings(file)
    read = _read(model, file, settings)
    parameters = estimated_parameters(settings)
    if parameters is None:
        told = "its weights cannot be derived from its config.json: give --parameters"
        return replace(read, notes=(*read.notes, told))
    size = None
    if read.weights_dtype is not None:
        size = weights_bytes(parameters, read.weights_dtype, read.unquantised)
    told = "its weights are counted by its config.json, as of a dense model"
    if "text_config" in settings:
        told += ", its language part alone"
    if read.is_quantised:
        told += ", embeddings and head at 16 bits"
    told += "; --parameters says better"
    return replace(read, parameters=parameters, weights_bytes=size, notes=(*read.notes, told))


def _read(model: str, file: Path, settings: dict[str, Any]) -> Model:
    """Without its weights' number and size."""
    try:
        facts, context = cache_of(settings), context_of(settings)
        dtype, quantised = weights_dtype(settings), is_quantised(settings)
        unquantised = embedding_parameters(settings) if quantised else 0
    except ValueError as error:
        raise EngineConfigError(
            f"model {str(file)!r}: {error}; name another, or give --layers, --kv-heads and "
            "--head-size"
        ) from None
    return Model(
        model,
        facts.shape,
        context,
        source="its config.json",
        notes=facts.notes if dtype or not quantised else (*facts.notes, _QUANTISED_NOTE),
        weights_dtype=dtype,
        is_quantised=quantised,
        unquantised=unquantised,
        attention_heads=facts.attention_heads,
    )


def _of_directory(model: str, directory: Path) -> Model:
    file = directory / "config.json"
    settings = model_settings(file)
    read = _read(model, file, settings)
    try:
        weights, parameters = _count_weights(_weight_files(directory))
    except OSError as error:
        name = Path(error.filename or "").name
        raise EngineConfigError(
            f"model directory {str(directory)!r}: {name} cannot be read ({error.strerror}): get it "
            "again"
        ) from None
    except ValueError as error:
        raise EngineConfigError(f"model directory {str(directory)!r}: {error}") from None
    if not weights:
        weights = sum(file.stat().st_size for file in directory.glob("*.bin"))
    if not weights:
        return _of_settings(model, file)
    if parameters is None and read.weights_dtype is not None:
        parameters = parameters_of(weights, read.weights_dtype, read.unquantised)
    return replace(
        read,
        parameters=parameters or None,
        weights_bytes=weights,
        source="its files",
        notes=(*read.notes, _EXPERTS_NOTE) if has_experts(text_settings(settings)) else read.notes,
    )


def _weight_files(directory: Path) -> list[Path]:
    """Those that make up the model once, where a folder holds it in two forms."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return [directory / name for name in sorted(_shards(index))]
    whole = directory / "model.safetensors"
    return [whole] if whole.is_file() else sorted(directory.glob("*.safetensors"))


def _shards(index: Path) -> set[str]:
    """Names of the files that an index lists; all of them lie beside it."""
    weight_map = model_settings(index).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ValueError(f"{index.name} has no weight_map of files beside it: get it again")
    return set(names)


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
        header = json_object(text)
        header.pop("__metadata__", None)
        found = [_tensor(Fields(header).inner(name)) for name in header]
    except ValueError:
        raise ValueError(f"{file.name} has no header of tensors: get it again") from None
    end = max((last for _, _, last in found), default=0)
    if 8 + length + end > file.stat().st_size:
        raise ValueError(f"{file.name} is cut short: get it again")
    return [(kind, last - first) for kind, first, last in found]


def _tensor(told: Fields | None) -> tuple[str, int, int]:
    """Type, and where it begins and ends."""
    kind = told and told.word("dtype")
    offsets = told and told.numbers("data_offsets", 2, most=MOST_BYTES)
    if not kind or not offsets or offsets[1] < offsets[0]:
        raise ValueError("is no tensor")
    return kind, offsets[0], offsets[1]
