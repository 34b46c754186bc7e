"""A child process for what needs heavy libraries: `convert GGUF DIRECTORY`, `download HUB_ID`.

Prints the resulting directory as its last line; ends with os.EX_DATAERR for a GGUF file that is
not whole.
"""

import os
import sys
from pathlib import Path


def convert(gguf: Path, directory: Path) -> Path:
    """Write the weights of `gguf`, dequantised to bfloat16, with config and tokenizer."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_OFFLINE"] = "1"
    _check_whole(gguf)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)
    return directory


def _check_whole(gguf: Path) -> None:
    """End the process where not all is in the file that its head promises."""
    from gguf import GGUFReader

    try:
        GGUFReader(gguf)
    # out of bytes that mean nothing the library raises what it likes
    except Exception as error:
        raise SystemExit(os.EX_DATAERR) from error


def download(model: str) -> Path:
    """Bring a Hub model's files into the Hub's own cache."""
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            model, allow_patterns=["*.json", "*.jinja", "*.safetensors", "*.model", "*.txt"]
        )
    )


def main(arguments: list[str]) -> None:
    """Do one job; what a library raises ends the process, and its last line tells the parent."""
    if arguments[0] == "convert":
        place = convert(Path(arguments[1]), Path(arguments[2]))
    else:
        place = download(arguments[1])
    sys.stdout.write(f"\n{place}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
