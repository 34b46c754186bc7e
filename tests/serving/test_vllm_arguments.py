"""The installed vLLM's own AsyncEngineArgs takes every translated argument."""

import importlib.util
import json
import subprocess
import sys

import pytest

from serving import VllmConfig
from serving.models import ModelShape
from serving.vllm_config import engine_args

pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]

FLEET = {
    "model": "Qwen/Qwen3-0.6B",
    "max_concurrent": 64,
    "max_batched_tokens": 8192,
    "memory_fraction": 0.85,
    "kv_dtype": "fp8",
    "prefix_cache": True,
    "block_tokens": 16,
    "dtype": "bfloat16",
    "tensor_parallel": 2,
    "enforce_eager": False,
    "extra_args": {"max_num_queued_reqs": 256, "prefix_caching_hash_algo": "xxhash"},
}


def test_async_engine_args_are_built_for_cpu_and_gpu() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    shape = ModelShape(8192, 23_040)
    plain, fleet = VllmConfig(), VllmConfig.model_validate(FLEET)
    translated = [
        engine_args(plain, "somewhere", "cpu", shape),
        engine_args(plain, "somewhere", "cuda", shape),
        engine_args(fleet, "Qwen/Qwen3-0.6B", "cuda"),
    ]
    code = (
        "import json, sys\n"
        "from vllm.engine.arg_utils import AsyncEngineArgs\n"
        "for given in json.load(sys.stdin):\n"
        "    made = AsyncEngineArgs(**given)\n"
        "    assert all(getattr(made, name) == value for name, value in given.items()), given\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(translated),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
