"""The packages form one line, each outside library has one home, and functions stay short."""

import ast
import importlib.metadata
import importlib.util
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]

MAY_IMPORT: dict[str, set[str]] = {
    "games": set(),
    "serving": set(),
    "agents": {"games", "serving"},
    "arena": {"agents", "games", "serving"},
}

FIELD = ("arena/field.py", "arena/bradley_terry.py", "arena/rao_kupper.py")

# Files, or folders with a slash at the end.
HOMES = {
    "aiohttp": ("serving/http_client.py", "serving/fake_server.py", "arena/dashboard/"),
    "chess": ("games/chess.py",),
    "gguf": ("serving/models.py", "serving/model_files.py"),
    "huggingface_hub": ("serving/models.py", "serving/model_files.py"),
    "jinja2": ("serving/template.py",),
    "numpy": ("arena/pairwise.py", "arena/sprt.py", "arena/swiss.py", *FIELD),
    "opentelemetry": ("arena/tracing.py",),
    "prometheus_client": ("arena/metrics.py", "serving/vllm_host.py"),
    "ray": (
        "serving/ray_cluster.py",
        "serving/ray_deploy.py",
        "serving/ray_host.py",
        "serving/ray_nodes.py",
        "serving/ray_replica.py",
        "serving/ray_router.py",
    ),
    "rich": ("arena/terminal.py",),
    "scipy": (
        "arena/pairwise.py",
        "arena/sprt.py",
        "arena/standings.py",
        "arena/swiss.py",
        *FIELD,
    ),
    "sqlite3": ("arena/store.py", "arena/follow.py"),
    "tokenizers": ("serving/template.py",),
    "tomli_w": ("arena/config.py",),
    "torch": ("serving/models.py", "serving/model_files.py", "serving/sglang_cpu/shim/"),
    "transformers": ("serving/models.py", "serving/model_files.py"),
    "vllm": ("serving/vllm_host.py",),
    "xllamacpp": ("serving/llama_child.py",),
}

# They come with an engine's extra or with vLLM, and are imported in children of ours alone.
ENGINE_SIDE = {"gguf", "huggingface_hub", "ray", "torch", "transformers", "vllm", "xllamacpp"}
# They come with an extra of their own, and are imported when that is asked for.
OPTIONAL = {"opentelemetry"}

LONGEST_FUNCTION = 60
VAGUE_NAMES = {"utils", "util", "common", "core", "helpers", "misc"}

FILES = sorted(file for package in MAY_IMPORT for file in (ROOT / package).rglob("*.py"))
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Dotted names that are imported, at the top or inside functions. `from a import b` gives both
    `a` and `a.b`, for `b` may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_packages(tree: ast.AST) -> set[str]:
    return {module.partition(".")[0] for module in imported_modules(tree)}


def upward_imports(where: str, tree: ast.AST) -> set[str]:
    """Packages of ours that the file `where` must not import."""
    package = where.partition("/")[0]
    return (imported_packages(tree) & MAY_IMPORT.keys()) - MAY_IMPORT[package] - {package}


def strays(where: str, tree: ast.AST) -> set[str]:
    """Libraries that the file `where` imports although their home is elsewhere."""
    return {
        library
        for library in imported_packages(tree) & HOMES.keys()
        if not any(where == home or where.startswith(f"{home}/") for home in homes_of(library))
    }


def homes_of(library: str) -> Iterator[str]:
    return (home.removesuffix("/") for home in HOMES[library])


def long_functions(tree: ast.AST) -> dict[str, int]:
    """Functions over the limit, with their lines from `def` to the last one."""
    lengths = {
        node.name: (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    return {name: length for name, length in lengths.items() if length > LONGEST_FUNCTION}


def module_of(where: str) -> str:
    return where.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def import_cycle(trees: dict[str, ast.Module]) -> list[str] | None:
    """A cycle among modules of one package (its `__init__` is left out: importing any module runs
    it), or None."""
    modules = {module_of(where): tree for where, tree in trees.items() if "__init__" not in where}
    graph = {
        module: {name for name in imported_modules(tree) if name in modules}
        for module, tree in modules.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return None


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_imports_point_down(file: Path) -> None:
    upward = upward_imports(name_of(file), parse(file))
    assert not upward, f"imports {sorted(upward)}"


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_libraries_are_imported_at_home(file: Path) -> None:
    found = strays(name_of(file), parse(file))
    assert not found, f"imports {sorted(found)}, whose home is elsewhere"


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_functions_are_short(file: Path) -> None:
    assert long_functions(parse(file)) == {}


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_module_names_say_something(file: Path) -> None:
    assert not VAGUE_NAMES & set(file.relative_to(ROOT).with_suffix("").parts)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_no_import_cycle_inside_a_package(package: str) -> None:
    trees = {name_of(file): parse(file) for file in FILES if name_of(file).startswith(package)}
    cycle = import_cycle(trees)
    assert cycle is None, " -> ".join(cycle or [])


def test_every_library_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {canonicalize_name(Requirement(text).name) for text in project["dependencies"]}
    owners = importlib.metadata.packages_distributions()
    known = sys.stdlib_module_names | MAY_IMPORT.keys() | ENGINE_SIDE | OPTIONAL
    undeclared = {
        f"{name_of(file)}: {library}"
        for file in FILES
        for library in imported_packages(parse(file)) - known
        if not {canonicalize_name(owner) for owner in owners.get(library, ())} & declared
    }
    assert not undeclared


def test_agents_is_our_package() -> None:
    """PyPI's openai-agents installs the same top-level name."""
    spec = importlib.util.find_spec("agents")
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).resolve() == ROOT / "agents/__init__.py"


def test_there_are_configs() -> None:
    assert {"quickstart.toml", "fleet-gpu.toml"} <= {file.name for file in CONFIGS}


@pytest.mark.parametrize("file", CONFIGS, ids=name_of)
def test_every_config_loads(file: Path) -> None:
    from arena import config

    assert config.load(file).name == file.stem


def test_the_arena_imports_no_engine() -> None:
    """They take seconds and hundreds of MiB, and belong to children."""
    code = f"import sys, arena.cli; print({ENGINE_SIDE!r} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "set()\n", done.stderr


# The checks themselves, on sources that break each rule.


def test_an_upward_import_is_seen_wherever_it_hides() -> None:
    tree = ast.parse("def late():\n    from arena.store import Store\n")
    assert upward_imports("agents/llm.py", tree) == {"arena"}
    assert upward_imports("games/chess.py", ast.parse("import serving")) == {"serving"}
    assert upward_imports("serving/engine.py", ast.parse("import games.base")) == {"games"}
    assert upward_imports("arena/match.py", ast.parse("from agents import Turn")) == set()


def test_a_stray_library_is_seen() -> None:
    tree = ast.parse("import chess.pgn\nfrom aiohttp import web")
    assert strays("arena/report.py", tree) == {"chess", "aiohttp"}
    assert strays("arena/dashboard/server.py", ast.parse("import aiohttp")) == set()
    assert strays("games/chess.py", ast.parse("import chess")) == set()


def test_a_relative_import_is_refused() -> None:
    with pytest.raises(AssertionError, match="absolute"):
        list(imported_modules(ast.parse("from . import base")))


def test_a_long_function_is_seen() -> None:
    body = "\n".join("    pass" for _ in range(LONGEST_FUNCTION))
    assert long_functions(ast.parse(f"async def long():\n{body}")) == {"long": 61}
    assert long_functions(ast.parse(f"def fits():\n{body[9:]}")) == {}


def test_a_cycle_is_seen() -> None:
    trees = {
        "games/__init__.py": ast.parse("from games.one import A"),
        "games/one.py": ast.parse("from games import two"),
        "games/two.py": ast.parse("def late():\n    import games.three"),
        "games/three.py": ast.parse("from games.one import A"),
    }
    cycle = import_cycle(trees)
    assert cycle is not None
    assert set(cycle) == {"games.one", "games.two", "games.three"}
    trees["games/two.py"] = ast.parse("import games")
    assert import_cycle(trees) is None
