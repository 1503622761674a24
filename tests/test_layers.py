"""The arrow of imports points down only, and every public module says in `__all__` what it offers."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchcrew

ROOT = Path(torchcrew.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))

# A layer may import the ones above its own line, never its neighbours.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"errors", "stats"}),
    frozenset({"torch_private"}),
    frozenset({"memory"}),
    frozenset({"channel"}),
    frozenset({"crew"}),
    frozenset({"collectives"}),
    frozenset({"data", "tasks", "launcher", "train", "infer", "multiprocessing"}),
    frozenset({"cli", "testing"}),
    frozenset({"__init__", "__main__"}),
)
RANK = {layer: rank for rank, layers in enumerate(LAYERS) for layer in layers}


def name_of(path: Path) -> str:
    """The dotted name of a module file: ``torchcrew.memory.arena``."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(name: str) -> str:
    """The layer of a dotted name; the package's own file is a layer of its own, on top of all."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imported_names(path: Path) -> Iterator[tuple[int, str]]:
    """Every name of torchcrew that a file imports, wherever in the file, with its line."""
    package = name_of(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *((node.module or "").split(".") if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{source}.{alias.name}" if source == "torchcrew" else source


def breaches(path: Path) -> Iterator[str]:
    """What a file imports against the arrow."""
    own = layer_of(name_of(path))
    for line, name in imported_names(path):
        if name.split(".")[0] != "torchcrew" or name == "torchcrew.__version__":
            continue
        other = layer_of(name)
        if other != own and not RANK[other] < RANK[own]:
            yield f"{path.relative_to(ROOT.parent)}:{line}: {own} imports {other}"


def is_public(path: Path) -> bool:
    """Whether a module offers names to import: not one that is private, run by exec, or only a package's docstring."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if any(part.startswith("_") and part != "__init__" for part in parts) or parts[-1].endswith("_main"):
        return False
    return len(ast.parse(path.read_text()).body) > 1


def declared(tree: ast.Module) -> list[str] | None:
    """The names of the module's `__all__`, or None where it is missing or no tuple of plain strings."""
    for node in tree.body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            if not isinstance(node.value, ast.Tuple):
                return None
            names = [e.value for e in node.value.elts if isinstance(e, ast.Constant) and isinstance(e.value, str)]
            return names if len(names) == len(node.value.elts) else None
    return None


def bound(body: list[ast.stmt]) -> Iterator[tuple[str, bool]]:
    """Each name bound by a module's statements, with whether it is a function or class made there."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, True
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                yield (alias.asname or alias.name).split(".")[0], False
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name):
                        yield name.id, False
        elif isinstance(node, ast.If):
            yield from bound([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            handlers = [statement for handler in node.handlers for statement in handler.body]
            yield from bound([*node.body, *handlers, *node.orelse, *node.finalbody])


def test_there_are_modules_to_check():
    """A wrong root would make the other tests here pass on nothing."""
    assert {"errors", "memory", "channel", "crew"} <= {layer_of(name_of(path)) for path in MODULES}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_every_module_belongs_to_a_layer(path):
    """A new package is given its place in the arrow before it is used."""
    assert layer_of(name_of(path)) in RANK


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_down_only(path):
    """memory -> channel -> crew -> what people use -> cli; `errors` and `torch_private` are for all."""
    assert not list(breaches(path))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_nothing_but_the_tests_imports_testing(path):
    """The leak check and the crash table never run in a user's program."""
    names = [name for _, name in imported_names(path) if name.startswith("torchcrew.testing")]
    assert layer_of(name_of(path)) == "testing" or not names


@pytest.mark.parametrize("path", [path for path in MODULES if is_public(path)], ids=name_of)
def test_all_is_a_tuple_that_matches_the_module(path):
    """`__all__` is a tuple of names the module has, and no public function or class is left out of it."""
    tree = ast.parse(path.read_text())
    names = declared(tree)
    assert names is not None, f"{name_of(path)} has no __all__ tuple"
    assert len(names) == len(set(names))
    have = dict(bound(tree.body))
    assert set(names) <= set(have), f"in __all__ but not in the module: {set(names) - set(have)}"
    made = {name for name, is_made in bound(tree.body) if is_made and not name.startswith("_")}
    assert made <= set(names), f"public but not in __all__: {made - set(names)}"
