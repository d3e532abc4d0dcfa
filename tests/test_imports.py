"""Imports point one way, JAX's internals stay in one file, and public names are documented."""

import ast
import dataclasses
import functools
import importlib
import inspect
from pathlib import Path
import pkgutil
import re
import subprocess
import sys
import types

import pytest

import spmd
from spmd import _doors

PACKAGE = Path(spmd.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

#: The core in the order of design.md: a module imports only modules before it.
CORE = (
    "_jax",
    "errors",
    "_counts",
    "_pickled",
    "_mesh",
    "_spec",
    "_recover",
    "_resolve",
    "_local",
    "_arguments",
    "_trace",
    "_call",
    "_lower",
    "_starting",
    "_doors",
    "_dispatch",
    "_options",
    "_pjit",
    "_constraint",
    "_binding",
    "stages",
    "_api",
    "_public",
)
#: What names features: what the core opens when it is called, and the list of public names.
POINT_UP = ("_doors", "_public")
#: Public doors: they hold no code of their own.
DOORS = ("primitives", "partition_spec", "op_sharding", "sharding_spec")
#: The feature that a public door opens, where it is not the core.
OPENS = {"sharding_spec": "_pmap"}


def module_name(path):
    """``inspection.hlo.text`` for a file of the package."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(p for p in parts if p != "__init__") or "spmd"


def top(name):
    """The part of the package that a module belongs to."""
    return name.split(".")[0]


def names_in(node):
    """Full names that an import statement may load; relative imports are refused elsewhere."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


@functools.lru_cache(maxsize=1)  # trees of all files would be most of what the process holds
def parsed(path):
    """The tree of a file."""
    return ast.parse(path.read_text())


@functools.cache
def imports(path):
    """``(function or None, imported name)`` for all imports of a file."""
    return list(_imports(parsed(path), None))


def _imports(node, function):
    for name in names_in(node):
        yield function, name
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        function = function or node.name
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, function)


def taken_from(path, modules):
    """The modules among these that a file takes names from, or as names."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield from {name if name in modules else node.module} & modules
        elif isinstance(node, ast.Import):
            yield from {alias.name for alias in node.names} & modules


def files_of(part):
    """The files of a part of the package: one, or those of a folder."""
    folder = PACKAGE / part
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{part}.py"]


def part_imports(part):
    """``(function or None, another part)`` for what a part imports of the package."""
    found = {one for path in files_of(part) for one in own_imports(path)}
    return {(function, other) for function, other in found if other != part}


def own_imports(path):
    """``(function or None, part of the package)`` for what a file imports of the package."""
    parts = {p.stem if p.is_file() else p.name for p in PACKAGE.iterdir()} - {"__init__"}
    found = {
        (function, top(name.removeprefix("spmd.")))
        for function, name in imports(path)
        if name.startswith("spmd.")
    }
    return {(function, part) for function, part in found if part in parts}


def test_the_order_is_complete():
    """Every private module of the core stands in the order, and every name in it is a file."""
    private = {p.stem for p in PACKAGE.glob("_*.py")} - {"__init__", "__main__"}
    assert private <= set(CORE)
    assert all(path.is_file() for name in (*CORE, *DOORS) for path in files_of(name))


@pytest.mark.parametrize("name", CORE)
def test_core_imports_point_one_way(name):
    """A core module imports only what stands before it, in functions and for types as well."""
    found = {part for _, part in part_imports(name)}
    assert found <= {*CORE[: CORE.index(name)]} or name in POINT_UP


@pytest.mark.parametrize("name", _doors.DOORS)
def test_doors_open(name):
    """What an object of the core opens is a function of a feature, which the core does not load."""
    assert callable(_doors.opened(name))
    assert _doors.DOORS[name].removeprefix("spmd.") not in CORE
    openers = [path for path in FILES if f'opened("{name}")' in path.read_text()]
    assert openers
    assert all(path.parent == PACKAGE for path in openers)


@pytest.mark.parametrize("name", DOORS)
def test_doors_only_re_export(name):
    """A public door is a docstring and re-exports, each name spelled as public."""
    docstring, *statements = parsed(PACKAGE / f"{name}.py").body
    assert isinstance(docstring.value.value, str)
    for statement in statements:
        assert isinstance(statement, ast.ImportFrom)
        part = top(statement.module.removeprefix("spmd."))
        assert part == OPENS[name] if name in OPENS else part in CORE
        assert all(alias.name == alias.asname for alias in statement.names)


@pytest.mark.parametrize("name", [*CORE, *DOORS])
def test_core_imports_modules_not_the_package(name):
    """`from spmd import x` in the core names a module: public names do not exist yet there."""
    found = {n for path in files_of(name) for _, n in imports(path)}
    taken = {n.removeprefix("spmd.") for n in found if n.startswith("spmd.")}
    assert {top(n) for n in taken} <= {*CORE, OPENS.get(name)} or name in POINT_UP


@pytest.mark.slow
def test_no_circle_of_files():
    """Files import one another in no circle, in functions and for types as well.

    What the core opens of features does not count: `_doors` is there for it.
    """
    modules = {f"spmd.{module_name(path)}" for path in FILES}
    taken = {f"spmd.{module_name(path)}": {*taken_from(path, modules)} for path in FILES}
    del taken["spmd._doors"]
    while ends := [module for module, others in taken.items() if not others & taken.keys()]:
        for module in ends:
            del taken[module]
    assert not taken


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_of_each_file(path):
    """They are absolute, none is of `spmd.__main__`, and JAX's internals stay in one folder.

    `jax._src` and `jaxlib` are named elsewhere in no way that an import statement has.
    """
    assert "spmd.__main__" not in {name for _, name in imports(path)}
    is_adapter = path.parent == PACKAGE / "_jax"
    for node in ast.walk(parsed(path)):
        assert not (isinstance(node, ast.ImportFrom) and node.level), ast.unparse(node)
        for name in names_in(node):
            assert is_adapter or not name.startswith(("jax._src", "jaxlib")), name
        if isinstance(node, ast.Attribute):
            assert is_adapter or node.attr != "_src", ast.unparse(node)
        if isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            assert is_adapter or "jax" not in ast.unparse(node), ast.unparse(node)


def test_the_adapter_imports_nothing_of_ours():
    """The adapter stands on JAX alone."""
    assert part_imports("_jax") == set()


def test_the_adapter_reads_from_top_to_bottom():
    """Its files import one another only in the order in which it lists them."""
    docstring = ast.get_docstring(parsed(PACKAGE / "_jax" / "__init__.py"))
    order = re.findall(r"^- `(\w+)`:", docstring, re.M)
    assert {path.stem for path in files_of("_jax")} == {"__init__", *order}
    for i, name in enumerate(order):
        path = PACKAGE / "_jax" / f"{name}.py"
        taken = {n.split(".")[2] for _, n in imports(path) if n.startswith("spmd._jax.")}
        assert taken <= {*order[:i]}, name
        assert len(path.read_text().splitlines()) <= 450


@pytest.mark.slow
def test_import_is_light():
    """`import spmd` loads no JAX; its names load no demo, no other feature, and no backend."""
    code = (
        "import sys, spmd\n"
        "assert 'jax' not in sys.modules, 'JAX was imported'\n"
        "assert spmd.pjit is sys.modules['spmd._api'].pjit\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends, 'a backend was started'\n"
        "print(*sys.modules)\n"
        "assert spmd.host_callback is sys.modules['spmd.host_callback']\n"
        "assert 'rich' not in sys.modules, 'rich was imported'\n"
        "assert not xla_bridge._backends, 'a backend was started'"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    loaded = set(done.stdout.split())
    assert "spmd._api" in loaded
    for unwanted in ("optax", "rich", "hypothesis", "pytest", "libtpu"):
        assert unwanted not in loaded
    ours = {top(m.removeprefix("spmd.")) for m in loaded if m.startswith("spmd.")}
    assert not ours & {"demo", "inspection", "testing", "bundle", "cli", "__main__"}
    assert not ours & {"host_callback", "colocated_python"}


def test_names_of_the_issue():
    """Everything that the issue promises is where it promises it."""
    promised = {
        "spmd": """Mesh PartitionSpec NamedSharding P pjit with_sharding_constraint make_mesh
            current_mesh clear_caches FROM_ARRAY counts Counts host_callback colocated_python
            visualize""",
        "spmd.partition_spec": "ParsedPartitionSpec SpecSync REPLICATED",
        "spmd.op_sharding": """parse_op_sharding unflatten_array unflatten_superdims
            explode_superdims strides_for_sizes get_array_mapping get_aval_sharding_proto""",
        "spmd.colocated_python": """colocated_python colocated_python_class
            colocated_cpu_devices barrier ColocatedPythonError""",
        "spmd.host_callback": """id_tap id_print call barrier_wait stop_outfeed_receiver configure
            CallbackException TapFunctionException progress metrics_tap record""",
        "spmd.primitives": "pjit_p sharding_constraint_p",
        "spmd.stages": "Traced Lowered Compiled",
    }
    for module, names in promised.items():
        for name in names.split():
            assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


PUBLIC = [
    "spmd",
    *(
        f"spmd.{m.name}"
        for m in pkgutil.iter_modules(spmd.__path__)
        if not m.name.startswith("_") and m.name != "demo"
    ),
]


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_documented(module):
    """Every public function, class, method and property has a docstring of whole sentences."""
    module = importlib.import_module(module)
    assert module.__doc__
    bare = []
    for name, value in vars(module).items():
        if name.startswith("_") or not getattr(value, "__module__", "").startswith("spmd"):
            continue
        if inspect.isfunction(value) or inspect.isclass(value):
            bare += [name] * (not _documented(value))
        if inspect.isclass(value):
            bare += [f"{name}.{m}" for m in _members(value) if not _documented(vars(value)[m])]
    assert not bare


def _members(cls):
    """Public methods and properties that a class defines itself."""
    kinds = (property, classmethod, staticmethod)
    return [
        name
        for name, value in vars(cls).items()
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, kinds))
    ]


def _documented(value):
    text = inspect.getdoc(value)
    return bool(text) and text.splitlines()[0].rstrip("`").endswith((".", ":"))


@pytest.mark.parametrize(
    "function",
    [spmd.pjit, spmd.with_sharding_constraint, spmd.make_mesh, spmd.current_mesh],
    ids=lambda f: f.__name__,
)
def test_entry_points_say_what_they_take_and_raise(function):
    """Each way in documents every parameter, the result and the errors."""
    text = inspect.getdoc(function)
    for parameter in inspect.signature(function).parameters:
        assert f"    {parameter}: " in text, parameter
    assert "Returns" in text
    assert "Raises:" in text


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=module_name)
def test_all_names_exist(path):
    """What `__all__` lists is there."""
    if path.name == "__main__.py":
        return
    module = importlib.import_module(f"spmd.{module_name(path)}".removesuffix(".spmd"))
    assert all(hasattr(module, name) for name in getattr(module, "__all__", ()))


def test_public_names_are_those_of_public():
    """`spmd` has exactly the public names of `spmd._public`, and an unknown one is an error."""
    core = {n for n in vars(spmd._public) if not n.startswith("_")}
    features = spmd._public._FEATURES
    modules = spmd._public._MODULES
    assert set(dir(spmd)) == core | set(features) | {"__version__", *modules}
    assert all(getattr(spmd, n) is getattr(spmd._public, n) for n in core)
    for name, module in features.items():
        module = importlib.import_module(module)
        value = module if module.__name__ == f"spmd.{name}" else getattr(module, name)
        assert getattr(spmd, name) is value
    with pytest.raises(AttributeError, match="module 'spmd' has no attribute 'pjitt'"):
        _ = spmd.pjitt


def test_marks_stand_at_their_tests():
    """No conftest of a folder changes what was collected: its hook would see all folders' tests.

    That of `tests` looks only at what has the mark `few`.
    """
    top = Path(__file__).parent / "conftest.py"
    for path in {*top.parent.rglob("conftest.py")} - {top}:
        assert "pytest_collection_modifyitems" not in path.read_text(), path


@dataclasses.dataclass(eq=False)
class Item:
    """What the hook of `tests/conftest.py` sees of a case."""

    originalname: str
    marks: dict
    parent: str = "file"
    path: Path = Path("/root/file")

    def get_closest_marker(self, name):
        return self.marks.get(name)

    def add_marker(self, name):
        self.marks[name] = None


def marked(request, items, third=None, alone=()):
    """What the hook leaves of these, and what it says that it takes out."""
    (conftest,) = (
        one
        for one in request.config.pluginmanager.get_plugins()
        if getattr(one, "__file__", "") == str(Path(__file__).parent / "conftest.py")
    )
    left, out = [*items], []
    hook = types.SimpleNamespace(pytest_deselected=lambda items: out.extend(items))
    given = {"--third": third, "--alone": alone}
    config = types.SimpleNamespace(getoption=given.get, hook=hook, rootpath=Path("/root"))
    conftest.pytest_collection_modifyitems(config, left)
    return left, out


def cases_of(count, few, **options):
    """Cases of a test with the mark `few`, after a slow one and before others."""
    mark = pytest.mark.few(few, **options).mark
    cases = [Item("test_f", {"few": mark}) for _ in range(count)]
    slow = Item("test_f", {"few": mark, "slow": pytest.mark.slow.mark})
    return slow, cases, [Item("test_g", {}) for _ in range(3)]


@pytest.mark.parametrize(
    ("count", "few", "kept"),
    [(1, 1, [0]), (5, 0, []), (5, 1, [0]), (7, 3, [0, 2, 4]), (4, 2, [0, 2]), (3, 9, [0, 1, 2])],
)
def test_few_cases_of_a_test_run_by_default(request, count, few, kept):
    """Of each test with the mark `few` so many cases stay, spread evenly; other tests all stay."""
    slow, cases, other = cases_of(count, few)
    left, out = marked(request, [slow, *cases, *other])
    assert (left, out) == ([slow, *cases, *other], [])
    assert [i for i, item in enumerate(cases) if "slow" not in item.marks] == kept
    assert not any(item.marks for item in other)


@pytest.mark.parametrize("mark", ["slow", "soak"])
def test_few_are_none_that_are_slow_by_hand(request, mark):
    """The first one would be kept; it is slow, or soaks, so the one after it is."""
    _, cases, other = cases_of(2, 1)
    cases[0].marks[mark] = getattr(pytest.mark, mark).mark
    marked(request, [*cases, *other])
    assert ["slow" in item.marks for item in cases] == [True, False]


def test_slow_tests_of_one_case_are_in_one_third(request):
    """The first has every third one, the second the rest; what soaks, or is alone, all have."""
    slow = [Item(f"test_{i}", {"slow": pytest.mark.slow.mark}) for i in range(5)]
    soaks = Item("test_s", {"slow": pytest.mark.slow.mark, "soak": pytest.mark.soak.mark})
    left = [marked(request, [*slow, soaks], third)[0] for third in ("first", "second", "third")]
    first, rest = [slow[0], slow[3]], [slow[1], slow[2], slow[4]]
    assert left == [[*first, soaks], [*rest, soaks], [soaks]]
    assert marked(request, [*slow, soaks]) == ([*slow, soaks], [])
    assert marked(request, slow, "third", alone=["other", "file"]) == (slow, [])
    assert marked(request, slow, "third", alone=["other"]) == ([], slow)


def test_thirds_of_slow_cases(request):
    """Each slow case of a test with the mark `few` is in one third; all else is in every one.

    Those that the mark leaves out are slow, and those that have a mark of their own.
    """
    thirds, by_hand = [], []
    for third in ("first", "second", "third"):
        slow, cases, other = cases_of(7, 3)
        left, out = marked(request, [slow, *cases, *other], third)
        assert [one for one in (slow, *cases, *other) if one not in out] == left
        thirds.append([i for i, item in enumerate(cases) if item in left])
        by_hand.append(slow in left)
    assert thirds == [[0, 2, 4, 5], [0, 1, 2, 4, 6], [0, 2, 3, 4]]
    assert by_hand == [True, False, False]
    slow, cases, other = cases_of(7, 3, shared=False)
    assert marked(request, [slow, *cases, *other], "first") == ([slow, *cases, *other], [])
