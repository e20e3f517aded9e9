"""Docstrings: every public name says what it takes and gives, and shows it in an example that runs.

Public are the names that ``mla_jax``, ``mla_jax.layers`` and ``mla_jax.models`` export, what stands in an exported module, and the
methods and properties of exported classes. Sections are those of Google's style.
"""

import ast
import dataclasses
import doctest
import enum
import importlib
import inspect
import itertools
import re
import types
from collections.abc import Iterator
from typing import Any

import jax
import pytest

PACKAGES = ("mla_jax", "mla_jax.layers", "mla_jax.models")

WITHOUT_EXAMPLE = {
    "mla_jax.layers.AttentionKind": "an alias",
    "mla_jax.models.train.Stage": "an alias",
    "mla_jax.models.train.STAGES": "the alias's values",
}
"""Public names that need no example, and why."""

SLOW_EXAMPLES = {"mla_jax.models.generate"}
"""Those that compile a whole model."""


@dataclasses.dataclass(frozen=True)
class Public:
    """A public name: ``value`` is what it names, ``doc`` its docstring, for data the string below its assignment."""

    name: str
    value: Any
    doc: str
    owner: type | None = None

    @property
    def short_name(self) -> str:
        return self.name.rsplit(".", 1)[1]

    @property
    def function(self) -> Any:
        """What has the parameters; None for data and properties."""
        if inspect.isclass(self.value):
            return self.value.__init__ if not issubclass(self.value, BaseException | enum.Enum | tuple) else None
        return self.value if is_function(self.value) else None


def is_function(value: Any) -> bool:
    """Whether it was written as a function, whatever wraps it (``functools.cache``, ``jax.jit``)."""
    return inspect.isfunction(inspect.unwrap(value)) if callable(value) else False


def data_docstrings(module: types.ModuleType) -> dict[str, str]:
    """The strings below the assignments of a module, which Python itself does not keep."""
    body = ast.parse(inspect.getsource(module)).body
    docs = {}
    for node, below in itertools.pairwise(body):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and isinstance(below.value.value, str):
                docs[target.id] = inspect.cleandoc(below.value.value)
    return docs


def exports(package: str) -> Iterator[tuple[str, str]]:
    """(module, name) of what a package exports: the imports that are written ``x as x``."""
    for node in ast.parse(inspect.getsource(importlib.import_module(package))).body:
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None
            yield from ((node.module, alias.name) for alias in node.names if alias.asname == alias.name)


def public_names() -> Iterator[Public]:
    for package in PACKAGES:
        for source, name in exports(package):
            module = importlib.import_module(source)
            value = getattr(module, name)
            if isinstance(value, types.ModuleType):
                yield from (public(f"{package}.{name}.{own}", value, own) for own in defined_names(value))
            else:
                yield public(f"{package}.{name}", module, name)


def defined_names(module: types.ModuleType) -> Iterator[str]:
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
        else:
            continue
        yield from (name for name in names if not name.startswith("_"))


def public(name: str, module: types.ModuleType, attribute: str) -> Public:
    value = getattr(module, attribute)
    is_code = inspect.isclass(value) or is_function(value)
    doc = inspect.cleandoc(vars(value).get("__doc__") or "") if inspect.isclass(value) else inspect.getdoc(value)
    return Public(name, value, (doc or "") if is_code else data_docstrings(module).get(attribute, ""))


def members(item: Public) -> Iterator[Public]:
    """The methods and properties that a class itself defines."""
    if not inspect.isclass(item.value):
        return
    for name, value in vars(item.value).items():
        is_public = not name.startswith("_") or name in ("__call__", "__getitem__", "__setitem__")
        if is_public and (inspect.isfunction(value) or isinstance(value, property)):
            yield Public(f"{item.name}.{name}", value, inspect.getdoc(value) or "", owner=item.value)


PUBLIC = {item.name: item for item in public_names()}
MEMBERS = {member.name: (item, member) for item in PUBLIC.values() for member in members(item)}
EVERYTHING = {**PUBLIC, **{name: member for name, (_, member) in MEMBERS.items()}}


def section(doc: str, *titles: str) -> str:
    """The indented text below one of ``titles``."""
    match = re.search(rf"^(?:{'|'.join(titles)}):\n((?:[ ]+.*\n?|\n)+)", doc, re.MULTILINE)
    return match.group(1) if match else ""


def entries(doc: str) -> set[str]:
    """The names that Args or Attributes list."""
    lines = re.findall(r"^ {4}(\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: \([^)]*\))?:", section(doc, "Args", "Attributes"), re.MULTILINE)
    return {name.lstrip("*") for line in lines for name in line.split(", ")}


def examples(item: Public) -> str:
    """The source of all examples in a docstring."""
    return "".join(example.source for example in doctest.DocTestParser().get_examples(item.doc))


def test_the_walk_finds_what_is_public():
    assert {"mla_jax.write_kv", "mla_jax.GEOMETRIES", "mla_jax.models.train.loss", "mla_jax.layers.rotate"} <= PUBLIC.keys()
    assert {"mla_jax.PageAllocator.extend", "mla_jax.CacheLayout.row_bytes", "mla_jax.layers.MoE.__call__"} <= MEMBERS.keys()
    assert WITHOUT_EXAMPLE.keys() | SLOW_EXAMPLES <= PUBLIC.keys()
    assert "mla_jax.annotations" not in PUBLIC and "mla_jax.config" not in PUBLIC


@pytest.mark.parametrize("package", PACKAGES)
def test_all_names_what_a_package_exports(package):
    # What help() and an editor list.
    listed = importlib.import_module(package).__all__
    assert sorted(listed) == sorted(name for _, name in exports(package))


@pytest.mark.parametrize("name", EVERYTHING)
def test_docstring_says_what_goes_in_and_what_comes_out(name: str) -> None:
    item = EVERYTHING[name]
    assert item.doc, f"{name} has no docstring"
    assert item.doc != (item.value.__base__.__doc__ if inspect.isclass(item.value) else None)
    assert item.doc.split("\n")[0][-1] in ".:", f"{name}: the first line is no sentence"
    listed = entries(item.doc)
    if inspect.isclass(item.value):
        fields = [*getattr(item.value, "_fields", ()), *(getattr(item.value, "__members__", ()))]
        fields += [field.name for field in dataclasses.fields(item.value)] if dataclasses.is_dataclass(item.value) else []
        assert set(fields) <= listed, f"{name}: no entry for {sorted(set(fields) - listed)}"
    if item.function is None:
        return
    signature = inspect.signature(item.function)
    parameters = {parameter for parameter in signature.parameters if parameter != "self"}
    assert parameters <= listed, f"{name}: no entry for {sorted(parameters - listed)}"
    if not inspect.isclass(item.value):
        assert listed <= parameters, f"{name}: {sorted(listed - parameters)} are no parameters"
        has_result = signature.return_annotation not in (None, "None")
        assert has_result == bool(section(item.doc, "Returns")), f"{name}: Returns and the signature disagree"


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in WITHOUT_EXAMPLE])
def test_there_is_an_example_that_uses_the_name(name: str) -> None:
    source = examples(PUBLIC[name])
    assert re.search(rf"\b{PUBLIC[name].short_name}\b", source) or inspect.isclass(PUBLIC[name].value), (
        f"{name} is not used in its example"
    )
    assert source, f"{name} has no example"


@pytest.mark.parametrize("name", MEMBERS)
def test_members_are_used_in_an_example(name: str) -> None:
    """In one of their own or in the class's, which may show several."""
    owner, member = MEMBERS[name]
    # A layer is called by writing it like a function.
    use = {"__call__": r"\w\(", "__getitem__": r"\w\[", "__setitem__": r"\w\[\w+\] = "}.get(
        member.short_name, rf"\.{member.short_name}\b"
    )
    assert re.search(use, examples(owner) + examples(member)), f"no example of {owner.name} uses {member.short_name}"


def doctests() -> dict[str, doctest.DocTest]:
    """The doctests of every public docstring, and of the packages themselves. Each imports what it uses."""
    docs = {name: item.doc for name, item in EVERYTHING.items()}
    docs |= {package: inspect.getdoc(importlib.import_module(package)) or "" for package in PACKAGES}
    parser = doctest.DocTestParser()
    tests = {name: parser.get_doctest(doc, {}, name, None, None) for name, doc in docs.items()}
    return {name: test for name, test in tests.items() if test.examples}


DOCTESTS = doctests()


@pytest.fixture(autouse=True)
def quick_to_compile() -> Iterator[None]:
    """Compiling is nearly all that the examples take."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW_EXAMPLES)) for name in DOCTESTS])
def test_examples_run(name: str) -> None:
    test = DOCTESTS[name]
    assert not any(doctest.SKIP in example.options for example in test.examples), (
        f"{name}: an example that is skipped shows nothing"
    )
    report: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.REPORT_NDIFF).run(test, out=report.append, clear_globs=False)
    assert result.failed == 0, "\n" + "".join(report)
