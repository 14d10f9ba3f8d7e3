"""The rules of the tree that no linter knows: direction, third parties, size, names, state."""

import ast
import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("dsv4", "compiler", "runtime", "registry")

MAY_IMPORT = {
    "dsv4": set(),
    "compiler": {"dsv4"},
    "runtime": {"dsv4"},
    "registry": {"dsv4", "compiler", "runtime"},
    "tools": set(PACKAGES),
    "tests": {*PACKAGES, "tools"},
}

# Module -> the files that may import it. `*` also crosses folders.
THIRD_PARTY = {
    "numpy": ("runtime/*", "tools/*", "tests/*"),
    "prometheus_client": ("runtime/metrics.py", "tests/*"),
    "safetensors": ("runtime/*", "tools/*", "tests/*"),
    "torch.utils._pytree": ("dsv4/tree.py",),
    "torch_npu": ("compiler/torchair*",),
    "torchair": ("compiler/torchair*",),
    "transformers": ("registry/*", "tools/*", "tests/*"),
    "vllm": ("registry/vllm_*", "tests/*"),
}
READS_ENVIRONMENT = ("registry/vllm_*",)
PRINTS = ("registry/cli*.py",)
MAX_LINES = 400
NO_CONCEPT = {"utils", "util", "common", "helpers", "helper", "misc", "types"}

ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
MUTABLE_CALLS = {
    "list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict",
}  # fmt: skip
MUTABLE_LITERALS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, p) for p in patterns)


def files(*folders: str) -> list[Path]:
    return sorted(f for folder in folders for f in (ROOT / folder).rglob("*.py"))


def each(*folders: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("file", files(*folders), ids=name_of)


# What a module does, read from its tree.


def dotted(node: ast.AST) -> str:
    """`a.b.c` for an attribute chain that starts at a name, else the empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def imports(tree: ast.AST) -> set[str]:
    """Every module or member imported, with literal `import_module` calls and torch internals."""
    names: set[str] = set()
    for n in ast.walk(tree):
        if isinstance(n, ast.Import):
            names |= {a.name for a in n.names}
        elif isinstance(n, ast.ImportFrom) and n.module:
            names |= {n.module} | {f"{n.module}.{a.name}" for a in n.names}
        elif isinstance(n, ast.Attribute) and dotted(n).startswith("torch."):
            names.add(dotted(n))  # `import torch` alone reaches torch.utils._pytree
        elif isinstance(n, ast.Call) and n.args and isinstance(n.args[0], ast.Constant):
            called = dotted(n.func).split(".")[-1]
            if called in ("import_module", "__import__") and isinstance(n.args[0].value, str):
                names.add(n.args[0].value)
    return names


def relative_imports(tree: ast.AST) -> list[int]:
    return [n.lineno for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level > 0]


def environment_reads(tree: ast.AST) -> list[int]:
    lines = []
    for n in ast.walk(tree):
        if isinstance(n, ast.ImportFrom) and n.module == "os":
            hit = bool({a.name for a in n.names} & ENVIRONMENT)
        else:
            hit = isinstance(n, ast.Attribute) and n.attr in ENVIRONMENT
        if hit:
            lines.append(n.lineno)
    return lines


def prints(tree: ast.AST) -> list[int]:
    calls = (n for n in ast.walk(tree) if isinstance(n, ast.Call))
    return [n.lineno for n in calls if dotted(n.func) in ("print", "pprint", "pprint.pprint")]


def is_mutable(value: ast.AST | None) -> bool:
    """A container that could be written to; wrapped in another call, as a proxy, it is not."""
    if isinstance(value, ast.Call):
        return dotted(value.func).split(".")[-1] in MUTABLE_CALLS
    if isinstance(value, ast.Tuple):
        return any(is_mutable(v) for v in value.elts)
    if isinstance(value, ast.BinOp):
        return is_mutable(value.left) or is_mutable(value.right)
    if isinstance(value, ast.IfExp):
        return is_mutable(value.body) or is_mutable(value.orelse)
    return isinstance(value, MUTABLE_LITERALS)


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those that run at import: into `if`, `try`, `with`, loops and classes, not functions."""
    for s in body:
        yield s
        if isinstance(s, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for part in ("body", "orelse", "finalbody"):
            yield from statements(getattr(s, part, []))
        for handler in getattr(s, "handlers", []):
            yield from statements(handler.body)


def mutable_state(tree: ast.Module) -> list[int]:
    """Lines that make a mutable container at import, or rebind a module's name from inside."""
    assigned = (
        s
        for s in statements(tree.body)
        if isinstance(s, ast.Assign | ast.AnnAssign | ast.AugAssign) and is_mutable(s.value)
    )
    rebound = (n for n in ast.walk(tree) if isinstance(n, ast.Global))
    return sorted(s.lineno for s in (*assigned, *rebound))


def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))


# The rules.


@each(*PACKAGES, "tools", "tests")
def test_imports_point_inward(file: Path) -> None:
    here = file.relative_to(ROOT).parts[0]
    tops = {name.split(".")[0] for name in imports(parse(file))}
    outward = (tops & MAY_IMPORT.keys()) - MAY_IMPORT[here] - {here}
    assert not outward, f"{here} may import {sorted(MAY_IMPORT[here])}, not {sorted(outward)}"


@each(*PACKAGES, "tools", "tests")
def test_third_parties_stay_where_they_belong(file: Path) -> None:
    name, imported = name_of(file), imports(parse(file))
    for module, allowed in THIRD_PARTY.items():
        if not matches(name, allowed):
            hits = sorted(i for i in imported if f"{i}.".startswith(f"{module}."))
            assert not hits, f"{hits}: {module} belongs in {allowed}"


@each(*PACKAGES, "tools", "tests")
def test_imports_are_absolute(file: Path) -> None:
    assert relative_imports(parse(file)) == []


@each(*PACKAGES, "tools", "tests")
def test_the_name_is_a_concept(file: Path) -> None:
    parts = {Path(part).stem for part in file.relative_to(ROOT).parts}
    assert not parts & NO_CONCEPT, "a function that has no home means a missing concept: name it"


@each(*PACKAGES, "tools")
def test_a_file_can_be_read_at_one_sitting(file: Path) -> None:
    num_lines = len(file.read_text(encoding="utf-8").splitlines())
    assert num_lines <= MAX_LINES, f"{num_lines} lines; at most {MAX_LINES}: split by concern"


@each(*PACKAGES)
def test_no_environment_is_read(file: Path) -> None:
    if not matches(name_of(file), READS_ENVIRONMENT):
        assert environment_reads(parse(file)) == [], "pass it as an argument"


@each(*PACKAGES)
def test_nothing_prints(file: Path) -> None:
    if not matches(name_of(file), PRINTS):
        assert prints(parse(file)) == [], f"only {PRINTS} may print"


@each("dsv4")
def test_modules_hold_constants_only(file: Path) -> None:
    assert mutable_state(parse(file)) == [], "use a tuple, a frozen dataclass or MappingProxyType"


# The front page.


def test_ci_runs_what_the_readme_says() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    readme = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    command = script[-1]
    assert command.endswith("-m tools.check"), "the last line of .ci/run is the command"
    assert command in readme, f"not a line of README.md: {command}"


def test_set_up_is_two_commands() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = re.search(r"^## Set up\n(.*?)(?=^## |\Z)", readme, re.MULTILINE | re.DOTALL)
    assert section, "README.md has no section '## Set up'"
    blocks = re.findall(r"^```sh\n(.*?)^```$", section[1], re.MULTILINE | re.DOTALL)
    assert [len(b.splitlines()) for b in blocks] == [1, 1], "two sh blocks of one line each"


# The rules themselves: each must be able to fail.


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch.utils._pytree as p", "torch.utils._pytree"),
        ("from torch.utils import _pytree", "torch.utils._pytree"),
        ("from torch.utils._pytree import tree_map", "torch.utils._pytree"),
        ("import torch\nf = torch.utils._pytree.tree_map", "torch.utils._pytree"),
        ("def f():\n    import vllm.config", "vllm.config"),
        ("import importlib\nm = importlib.import_module('torch_npu')", "torch_npu"),
    ],
)
def test_imports_are_seen(source: str, name: str) -> None:
    assert name in imports(ast.parse(source))


@pytest.mark.parametrize(
    ("look", "source"),
    [
        (relative_imports, "from . import a"),
        (relative_imports, "from .a import b"),
        (environment_reads, "import os\na = os.environ['A']"),
        (environment_reads, "import os\ndef f():\n    return os.getenv('A')"),
        (environment_reads, "from os import environ"),
        (prints, "def f():\n    print(1)"),
        (mutable_state, "A = []"),
        (mutable_state, "A: dict[str, int] = {}"),
        (mutable_state, "A = {1} | {2}"),
        (mutable_state, "A = [i for i in range(3)]"),
        (mutable_state, "A = (1, {})"),
        (mutable_state, "A = dict(a=1)"),
        (mutable_state, "import collections\nA = collections.defaultdict(int)"),
        (mutable_state, "try:\n    pass\nexcept E:\n    A = set()"),
        (mutable_state, "class A:\n    seen = []"),
        (mutable_state, "A = 0\ndef f():\n    global A\n    A = 1"),
    ],
)
def test_what_is_refused_is_seen(look: Callable[[ast.Module], list[int]], source: str) -> None:
    assert len(look(ast.parse(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "A = (1, 2)",
        "A: int\nB = frozenset({1})",
        "from types import MappingProxyType\nA = MappingProxyType({'a': 1})",
        "A = Rules(names=('a',))",
        "def f():\n    a = []\n    return a",
        "class A:\n    def f(self):\n        a = {}\n        return a",
    ],
)
def test_constants_are_allowed(source: str) -> None:
    assert mutable_state(ast.parse(source)) == []
