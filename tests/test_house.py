"""The rules of the house: the surface is what the table says, and nothing else is imported, shipped or left lying."""

import inspect
import json
import operator
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jattn
import jattn.interop.equinox
import jattn.interop.flax

ROOT = Path(__file__).parent.parent

# Every public name, and what a call may give it by position: arrays, or what would read oddly with its name.
# Whatever else it takes is an option, by keyword only.
SURFACE = {
    "Cache": "key value lengths positions",
    "Explorer": None,
    "MultiHead": "query key value out query_bias key_bias value_bias out_bias query_norm key_norm",
    "Stats": "lse max_logit entropy",
    "Trace": "",
    "attend": "query key value mask bias",
    "attention": "query key value mask bias",
    "attention_weights": "query key mask bias",
    "biases": None,
    "cached_attention": "query key value cache mask bias",
    "dot_product_attention": "query key value bias mask",
    "entropy": "weights axis",
    "explore": "query key value mask",
    "init_multihead": "rng features N K H D",
    "log_softmax": "x axis where",
    "logsumexp": "x axis where",
    "masks": None,
    "merge": "outs lses",
    "multihead": "params x context mask bias **options",
    "naive_softmax": "x axis",
    "pictures": None,
    "ring": None,
    "rotary": "x positions",
    "rows_normalised": "weights tol axis",
    "softmax": "x axis where",
    "testing": None,
    "trace": "query key value mask bias",
}
RULES = {
    "masks.array": "mask",
    "masks.causal": "offset",
    "masks.lengths": "key query",
    "masks.prefix": "length",
    "masks.rule": "fn *arrays",
    "masks.segments": "query_ids key_ids padding",
    "masks.window": "left right",
    "biases.alibi": "slopes",
    "biases.array": "bias",
    "biases.relative": "table buckets",
    "biases.rule": "fn *arrays",
}
INTEROP = {
    "interop.flax_attention_fn": "**options",
    "interop.equinox.from_equinox": "layer",
    "interop.equinox.to_equinox": "params **options",
    "interop.flax.from_flax": "layer",
    "interop.flax.to_flax": "params",
}
METHODS = {
    "Cache.create": "capacity K H D",
    "Explorer.save": "self path",
    "Trace.rows": "self query",
    "Trace.table": "self query tokens",
}
ASSERTIONS = {
    "testing.assert_causal": "fn x axis",
    "testing.assert_visible": "fn x mask axis",
}
PICTURES = {
    "pictures.curves": "lines",
    "pictures.entropy": "entropies",
    "pictures.mask": "mask T S",
    "pictures.weights": "weights tokens key_tokens",
}
RING = {
    "ring.attention": "query key value mask bias",
    "ring.unzigzag": "x P axis",
    "ring.zigzag": "x P axis",
}
TABLES = SURFACE | RULES | INTEROP | METHODS | ASSERTIONS | PICTURES | RING
CALLS = {name: at for name, at in TABLES.items() if at is not None}
FUNCTIONS = sorted(CALLS.keys() - {"Cache", "MultiHead", "Stats", "Trace"})


def public(name):
    return operator.attrgetter(name)(jattn)


@pytest.fixture(scope="module")
def fresh():
    """What `import jattn` brings into a process that already has its dependencies."""
    code = """
import chex, jax, jaxlib, json, sys
tops = lambda: {name.partition(".")[0] for name in sys.modules}
before = tops()
import jattn
import jattn.interop.equinox
import jattn.interop.flax
print(json.dumps({"names": list(vars(jattn)), "modules": list(tops() - before - sys.stdlib_module_names)}))
"""
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_all_is_the_whole_surface(fresh):
    assert jattn.__all__ == sorted(SURFACE)
    # A public package, which `dot_product_attention` comes from.
    assert {name for name in fresh["names"] if not name.startswith("_")} == SURFACE.keys() | {"interop"}


def test_importing_jattn_imports_only_jax_and_chex(fresh):
    assert fresh["modules"] == ["jattn"]


@pytest.mark.parametrize("module", ["masks", "biases", "pictures", "ring", "testing"])
def test_the_table_is_the_whole_surface_of_a_module(module):
    functions = {name for name in public(module).__all__ if not inspect.isclass(public(f"{module}.{name}"))}
    assert {f"{module}.{name}" for name in functions} == {name for name in CALLS if name.startswith(f"{module}.")}


@pytest.mark.parametrize("name", CALLS)
def test_options_are_keyword_only(name):
    parameters = inspect.signature(public(name)).parameters.values()
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    others = [f"{stars.get(p.kind, '')}{p.name}" for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert " ".join(others) == CALLS[name]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_docstring_has_its_sections(name):
    function = public(name)
    docstring = inspect.getdoc(function) or ""
    sections = re.findall(r"^([A-Z][a-z]+):", docstring, re.MULTILINE)
    args = docstring.partition("\nArgs:\n")[2].partition("\n\n")[0]
    parameters = [name for name in inspect.signature(function).parameters if name != "self"]
    assert re.findall(r"^    \*?(\w+):", args, re.MULTILINE) == parameters
    # A rule is named by what it returns, and an assertion returns nothing.
    needed = {"Example"} | (set() if name in RULES else {"Raises"} if name in ASSERTIONS else {"Returns", "Raises"})
    assert needed <= set(sections)
    assert ">>> " in docstring.partition("\nExample:\n")[2]


def test_every_relative_link_in_the_readme_resolves():
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", (ROOT / "README.md").read_text("utf-8"))
    assert [link for link in links if not re.match(r"\w+:", link) and not (ROOT / link).exists()] == []


def test_the_examples_in_the_readme_run(tmp_path):
    text = (ROOT / "README.md").read_text("utf-8")
    assert ">>> " in text
    examples = tmp_path / "README.txt"
    examples.write_text(re.sub("^```.*$", "", text, flags=re.MULTILINE), "utf-8")
    run = subprocess.run(
        [sys.executable, "-m", "doctest", examples], cwd=ROOT, capture_output=True, text=True, encoding="utf-8"
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_top_level_holds_only_what_it_must():
    ours = {"pyproject.toml", "README.md", "jattn", "tests", "notebooks", "Makefile", "LICENSE"}
    built = {line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split()}
    names = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    assert names - built <= ours
