"""The house keeps its shape: layers import downward, each dangerous thing has one room, and importing does nothing.

The rules are DESIGN's; they are read from the source with `ast`, so a module that nobody imports is held to them too.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "roundpipe_async"

LAYERS = [frozenset(line.split()) for line in (
    "errors events modes replica steps tracing tree versions",
    "buffers config microbatches scheduling",
    "boundary devices distributed failures optimizer packed recompute scaling stage store",
    "calls engine graph planner runs",
    "checkpoint data model models wrap",
    "__init__ __main__",
)]  # fmt: skip
ALONE = frozenset({"optim"})  # imports nothing of the package, and any layer may import it

ACCELERATOR_APIS = {
    "torch.cuda", "torch.accelerator", "torch.xpu", "torch.npu", "torch.mps", "torch.hpu", "torch.mtia",
    "torch.Stream", "torch.Event", "torch.backends.cuda", "torch.backends.cudnn", "torch.backends.mps",
}  # fmt: skip
THREAD_STARTERS = {
    "threading.Thread", "threading.Timer", "_thread.start_new_thread", "asyncio.to_thread", "anyio.to_thread",
    "concurrent.futures.ThreadPoolExecutor", "concurrent.futures.thread.ThreadPoolExecutor",
    "multiprocessing.pool.ThreadPool",
}  # fmt: skip

PUBLIC = {
    "ClosedError", "DevicePool", "GradScaler", "MicrobatchError", "ModelExecutePlan", "OptimizerCtx", "PlanError",
    "RoundPipe", "RoundPipeError", "RoundPipeRunConfig", "ScheduleError", "SkippedStepsError", "StepError",
    "WrongLoopError", "doing_recompute", "get_recompute_data", "no_grad", "optim", "prefetch", "save_for_recompute",
    "trace", "wrap_model_to_roundpipe",
}  # fmt: skip


class Module:
    """One source file: its dotted name below the package, and what it names of other modules."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.source = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.source, str(path))
        self.name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        self.room = self.name.split(".")[0]
        self.imported = set(self._imports())
        self.named = self.imported | set(self._attributes())

    def _imports(self) -> Iterator[str]:
        """Full dotted names of everything imported, at the top or inside functions; relative ones made absolute."""
        base = ["roundpipe_async", *self.path.relative_to(PACKAGE).parent.parts]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                start = ".".join(base[: len(base) - node.level + 1]) if node.level else ""
                source = ".".join(part for part in (start, node.module) if part)
                yield from (f"{source}.{alias.name}" for alias in node.names)

    def _attributes(self) -> Iterator[str]:
        """Dotted uses such as `torch.cuda.synchronize`, with `import x.y as z` and `from x import y` resolved."""
        aliases: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                aliases |= {alias.asname: alias.name for alias in node.names if alias.asname}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                aliases |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute):
                parts, value = [node.attr], node.value
                while isinstance(value, ast.Attribute):
                    parts, value = [value.attr, *parts], value.value
                if isinstance(value, ast.Name):
                    yield ".".join([aliases.get(value.id, value.id), *parts])

    def names_any(self, apis: set[str]) -> list[str]:
        """Which of the dotted names `apis` (or things below them) the module names."""
        return sorted(name for name in self.named if any(name == api or name.startswith(api + ".") for api in apis))

    def rooms_imported(self) -> set[str]:
        """The package's own modules that this one imports, by their first name below the package."""
        rooms = set()
        for name in self.imported:
            parts = name.split(".")
            if parts[0] == "roundpipe_async":
                first = parts[1] if len(parts) > 1 else "__init__"
                rooms.add(first if first in ROOMS else "__init__")
        return rooms - {self.room}


ROOMS = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
MODULES = [Module(path) for path in sorted(PACKAGE.rglob("*.py"))]


def layer_of(room: str) -> int:
    return next((index for index, rooms in enumerate(LAYERS) if room in rooms), 0)


@pytest.fixture(params=MODULES, ids=lambda module: module.name)
def module(request: pytest.FixtureRequest) -> Module:
    found = request.param
    assert isinstance(found, Module)
    return found


def test_every_module_has_a_layer() -> None:
    strangers = {module.room for module in MODULES} - frozenset().union(*LAYERS) - ALONE
    assert not strangers, f"give these a layer in LAYERS: {sorted(strangers)}"


def test_imports_go_downward(module: Module) -> None:
    if module.room in ALONE:
        assert not module.rooms_imported(), f"{module.name} stands alone"
        return
    upward = [room for room in module.rooms_imported() - ALONE if layer_of(room) > layer_of(module.room)]
    assert not upward, f"{module.name} (L{layer_of(module.room)}) imports from above: {sorted(upward)}"


def test_no_import_cycles() -> None:
    """Also inside one layer, and also among imports made late or for types only."""
    graph: dict[str, set[str]] = {}
    for module in MODULES:
        graph.setdefault(module.room, set()).update(module.rooms_imported() - {"__init__"})
    TopologicalSorter(graph).prepare()  # raises CycleError, which shows the cycle


def test_only_the_accelerator_device_names_accelerators(module: Module) -> None:
    if module.name != "devices.accelerator":
        assert not module.names_any(ACCELERATOR_APIS)


def test_only_devices_data_and_optimizer_start_threads(module: Module) -> None:
    if module.room not in {"devices", "data", "optimizer"}:
        assert not module.names_any(THREAD_STARTERS)
        assert ".run_in_executor(" not in module.source


def test_only_distributed_names_collectives(module: Module) -> None:
    specs = {"torch.distributed.pipelining.microbatch"}
    if module.room != "distributed":
        assert not set(module.names_any({"torch.distributed"})) - set(module.names_any(specs)) - specs


def test_only_models_names_transformers(module: Module) -> None:
    if module.room != "models":
        assert not module.names_any({"transformers"})


def test_no_star_imports(module: Module) -> None:
    assert not [name for name in module.imported if name.endswith("*")]


def test_every_module_says_why_it_exists(module: Module) -> None:
    assert ast.get_docstring(module.tree), f"{module.path.name} has no docstring"


def test_files_and_functions_are_short(module: Module) -> None:
    assert module.source.count("\n") <= 500, f"{module.path.name} is longer than 500 lines"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            assert node.end_lineno is not None and first.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node) is not None:
                lines -= first.end_lineno - first.lineno + 1
            assert lines <= 60, f"{module.path.name}:{node.lineno} {node.name} has {lines} lines: it hides a noun"


# --- importing does nothing ------------------------------------------------------------------------------------------

IMPORT_PROBE = """
import json, os, signal, sys, threading, logging, gc
import torch

def state():
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "tasks_in_os": len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0,
        "intra_op": torch.get_num_threads(), "inter_op": torch.get_num_interop_threads(),
        "dtype": str(torch.get_default_dtype()), "device": str(torch.get_default_device()),
        "grad": torch.is_grad_enabled(), "deterministic": torch.are_deterministic_algorithms_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"), "anomaly": torch.is_anomaly_enabled(),
        "precision": torch.get_float32_matmul_precision(), "seed": torch.initial_seed(),
        "random": torch.get_rng_state().sum().item(), "environment": dict(os.environ),
        "switch": sys.getswitchinterval(), "handlers": len(logging.root.handlers), "gc": gc.get_threshold(),
        "hooks": [str(sys.excepthook), str(threading.excepthook), str(sys.unraisablehook)],
        "signals": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)],
    }

probed = []
def watch(module, name):
    def called(*args, **kwargs):
        probed.append(f"{module.__name__}.{name}")
        raise RuntimeError("importing must probe no device")
    setattr(module, name, called)

for name in ("is_available", "device_count", "current_accelerator", "current_device_index"):
    watch(torch.accelerator, name)
for module in (torch.cuda, torch.xpu, torch.mps):
    for name in ("is_available", "device_count", "init", "_lazy_init"):
        if hasattr(module, name):
            watch(module, name)

before, modules = state(), set(sys.modules)
import roundpipe_async
after = state()
print(json.dumps({
    "changed": {key: [before[key], after[key]] for key in before if before[key] != after[key]},
    "probed": probed,
    "loaded": sorted({name.split(".")[0] for name in set(sys.modules) - modules}),
    "all": sorted(roundpipe_async.__all__),
    "missing": [name for name in roundpipe_async.__all__ if not hasattr(roundpipe_async, name)],
    "optim": [name for name in ("Adam", "AdamW") if hasattr(roundpipe_async.optim, name)],
}))
"""

HEAVY = {
    "IPython", "fastapi", "httpx", "ipykernel", "matplotlib", "nbclient", "numpy", "pandas", "psutil", "safetensors",
    "scipy", "sklearn", "tqdm", "transformers", "uvicorn", "uvloop",
}  # fmt: skip


@pytest.fixture(scope="module")
def imported() -> dict[str, object]:
    """What importing the package did in a process of its own that had imported torch before."""
    if not (PACKAGE / "__init__.py").exists():
        pytest.skip("the package has no face yet")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORT_PROBE],
        cwd=PACKAGE.parent, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_import_changes_nothing(imported: dict[str, object]) -> None:
    """No thread, no torch setting, no random number, no signal handler, no environment variable."""
    assert imported["changed"] == {}


def test_import_probes_no_device(imported: dict[str, object]) -> None:
    assert imported["probed"] == []


def test_import_loads_nothing_heavy(imported: dict[str, object]) -> None:
    loaded = imported["loaded"]
    assert isinstance(loaded, list)
    assert not HEAVY & set(loaded)


def test_public_names(imported: dict[str, object]) -> None:
    assert imported["all"] == sorted(PUBLIC)
    assert imported["missing"] == []
    assert imported["optim"] == ["Adam", "AdamW"]
