"""Write docs/recipe.md from the sections in src/zerogap/config/: every key, its type, default and consequence.

    python docs/make_recipe_reference.py

A test (tests/cli/test_documents.py) fails when the page is not current.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "src" / "zerogap" / "config"
PAGE = ROOT / "docs" / "recipe.md"

INTRODUCTION = """# The recipe

<!-- Written by docs/make_recipe_reference.py from src/zerogap/config/; do not edit by hand. -->

A recipe is a YAML file of the sections below. Unknown keys are refused with the nearest known one. Any key can be
changed on the command line by its dotted name (`zerogap train recipes/tiny.yaml train.lag=8`); `null` removes a
section or goes back to "not set" (`warm_start=null`). `zerogap train RECIPE --dry-run` prints the recipe with every
default written out.

There is no top-p, top-k, min-p or penalty in training: they change the distribution that tokens are drawn from, so
they are refused with that reason.
"""

# Section class -> dotted prefix, in the order of the page. Sections with the same prefix are told apart by `name`.
SECTIONS = {
    "Recipe": "",
    "Model": "model",
    "CreateModel": "model.create",
    "RopeScaling": "model.rope_scaling",
    "Task": "task",
    "Tools": "task.tools",
    "WarmStart": "warm_start",
    "Rollout": "rollout",
    "Learner": "learner",
    "ReinforceZero": "learner.objective",
    "PpoClip": "learner.objective",
    "TruncatedIs": "learner.objective",
    "MaskedIs": "learner.objective",
    "GeometricGate": "learner.objective",
    "ProductGate": "learner.objective",
    "Cispo": "learner.objective",
    "IsOff": "learner.objective",
    "Train": "train",
    "Evaluation": "evaluation",
    "Audit": "audit",
    "Checkpoint": "checkpoint",
    "Logging": "logging",
    "Runtime": "runtime",
}
LIMITS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def make_page() -> str:
    nodes = [node for source in SOURCES.glob("*.py") for node in ast.parse(source.read_text()).body]
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    bases = {base for node in classes.values() for base in _bases(node)}
    unlisted = {name for name, node in classes.items() if _bases(node) & classes.keys()} - bases - SECTIONS.keys()
    if unlisted:
        raise SystemExit(f"sections that docs/make_recipe_reference.py does not list: {unlisted}")
    return INTRODUCTION + "".join(_section(name, prefix, classes) for name, prefix in SECTIONS.items())


def _bases(node: ast.ClassDef) -> set[str]:
    return {base.id for base in node.bases if isinstance(base, ast.Name)}


def _section(name: str, prefix: str, classes: dict[str, ast.ClassDef]) -> str:
    rows = _rows(name, prefix, classes)
    title = prefix or "Top level"
    if list(SECTIONS.values()).count(prefix) > 1:
        title += f", name: {_type(_fields(classes[name])['name'][0].annotation)}"
    lines = [f"\n## {title}\n"]
    if text := ast.get_docstring(classes[name]):
        lines.append(f"{text}\n")
    return "\n".join([*lines, "| key | type | default | what follows |", "|---|---|---|---|", *rows.values()]) + "\n"


def _rows(name: str, prefix: str, classes: dict[str, ast.ClassDef]) -> dict[str, str]:
    """Key -> its row: a section's own keys, then those that it inherits and does not give anew."""
    rows = {key: _row(field, after, prefix) for key, (field, after) in _fields(classes[name]).items()}
    for base in _bases(classes[name]) & classes.keys():
        rows = rows | {key: row for key, row in _rows(base, prefix, classes).items() if key not in rows}
    return rows


def _fields(node: ast.ClassDef) -> dict[str, tuple[ast.AnnAssign, ast.stmt | None]]:
    """Key -> (its declaration, the statement after it)."""
    pairs = zip(node.body, [*node.body[1:], None], strict=True)
    return {
        f.target.id: (f, after) for f, after in pairs if isinstance(f, ast.AnnAssign) and isinstance(f.target, ast.Name)
    }


def _row(field: ast.AnnAssign, following: ast.stmt | None, prefix: str) -> str:
    assert isinstance(field.target, ast.Name)
    name = f"{prefix}.{field.target.id}".lstrip(".")
    default, limits = _default(field.value)
    kind = ", ".join([_type(field.annotation), *limits])
    return f"| `{name}` | {kind} | {default} | {_docstring(following, field.annotation)} |"


def _default(value: ast.expr | None) -> tuple[str, list[str]]:
    """(default as text, limits such as `>= 1`)."""
    if value is None:
        return "required", []
    if not (isinstance(value, ast.Call) and ast.unparse(value.func) == "Field"):
        return f"`{_yaml(value)}`", []
    limits = [f"{LIMITS[k.arg]} {ast.unparse(k.value)}" for k in value.keywords if k.arg in LIMITS]
    if value.args:
        return f"`{_yaml(value.args[0])}`", limits
    factory = next((ast.unparse(k.value) for k in value.keywords if k.arg == "default_factory"), None)
    if factory is None:
        return "required", limits
    return {"dict": "`{}`", "list": "`[]`"}.get(factory, "its defaults"), limits


def _yaml(value: ast.expr) -> str:
    """A constant as it is written in a recipe."""
    text = ast.unparse(value)
    plain = text.strip("'")
    return {"None": "null", "True": "true", "False": "false"}.get(plain, plain)


def _type(annotation: ast.expr) -> str:
    """`Literal['a', 'b'] | None` -> `a, b or null`; a section -> `section`."""
    parts = []
    for part in ast.unparse(annotation).split(" | "):
        if part.startswith("Literal["):
            part = " or ".join(choice.strip("'") for choice in part[len("Literal[") : -1].split(", "))
        part = {"None": "null", "str": "text", "int": "integer", "float": "number", "bool": "true or false"}.get(
            part, part
        )
        part = {"dict[str, Any]": "mapping", "list[str]": "list of texts"}.get(part, part)
        parts.append("section" if part in SECTIONS or part == "ObjectiveConfig" else part)
    return " or ".join(parts)


def _docstring(node: ast.stmt | None, annotation: ast.expr) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split()).replace("|", "\\|")
    name = ast.unparse(annotation).removesuffix(" | None")
    return f"See [{SECTIONS[name]}](#{SECTIONS[name].replace('.', '')})." if name in SECTIONS else ""


if __name__ == "__main__":
    PAGE.write_text(make_page())
    print(f"wrote {PAGE}")
