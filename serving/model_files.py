"""A child process for what needs heavy libraries: `convert GGUF DIRECTORY`, `download HUB_ID`.

Prints the resulting directory as its last line.
"""

import os
import sys
from pathlib import Path


def convert(gguf: Path, directory: Path) -> Path:
    """Write the weights of `gguf`, dequantised to bfloat16, with config and tokenizer."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_OFFLINE"] = "1"
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
