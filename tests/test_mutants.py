"""The tool that breaks the code on purpose: a line that a test sees, one that none does, and one that is explained."""

import ast

import pytest
from bench import mutants

TOY = '''"""Doubles, 2 * x."""

__all__ = ["twice"] * 1


def twice(x: "2 + 3") -> "x + 1":
    """Twice x: x + x."""
    return x + x


def product(x, y):
    return x * y


def opposite(x):
    return -x
'''
GUARD = """
from toy.thing import twice

def test_twice():
    assert twice(3) == 6
"""


@pytest.fixture
def root(tmp_path):
    for name, text in {"toy/thing.py": TOY, "test_thing.py": GUARD, "sleep.py": "import time; time.sleep(60)"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_what_no_test_sees_survives_and_what_is_explained_counts_by_itself(root, capsys):
    equivalent = {("thing", "return (x)"): "a reason"}
    counts, survivors = mutants.run(root, "toy", {"thing": ["test_thing.py"]}, 99, 0, equivalent)
    assert counts == {"thing": (3, 1, 1)}
    assert survivors == ["thing.py:12\n- return x * y\n+ return x / y"]
    out = capsys.readouterr().out
    assert "return x - x  caught by test_thing.py::test_twice" in out and "explained: a reason" in out
    assert mutants.table(counts).endswith("| all | 3 | 1 | 1 | 50 % |")
    assert (root / "toy" / "thing.py").read_text() == TOY


def test_guards_must_pass_before_anything_is_broken(root):
    with pytest.raises(SystemExit, match="thing: a guard fails without any mutant: "):
        mutants.run(root, "toy", {"thing": ["no_such_file.py"]}, 1, 0)


def test_a_guard_that_hangs_has_caught_its_mutant(root):
    well, why = mutants.passes(["sleep.py"], root, 0.5, None)
    assert not well and why == "sleep.py: more than 0 s"


SMALL = {
    "x < 1": {"x <= 1", "x >= 1", "x < 2", "x < 0"},
    "a and b and c": {"a or b and c", "a and b or c"},
    "jnp.where(c, a, -b)": {"jnp.where(c, -b, a)", "jnp.where(c, a, b)"},
    "(yes) if test else (no)": {"yes", "no"},
    "f(x)": {"x"},
    "f(x, axis=b)": {"f(x)"},
    "x.astype(d).any(z)": {"x.any(z)", "x.astype(d).all(z)", "z"},
    "f('é' * b, not x)": {"f('é' / b, not x)", "f('é' * b, x)"},
    "f(f'{x + 1}', 'x + 1')": set(),
}


@pytest.mark.parametrize("source", SMALL)
def test_mutants_are_these(source):
    expected = {ast.unparse(ast.parse(f"y = {x}")) for x in SMALL[source]}
    assert {ast.unparse(ast.parse(x)) for x in mutants.mutants(f"y = {source}")} == expected


def test_statements_are_left_out():
    source = "x = 0\nx += y\nx = x | z\nif x:\n    raise E(x + 1)\nf(x, y)\n"
    made = mutants.mutants(source)
    left_out = {tuple(old) for _, old, new in (mutants.difference(source, x) for x in made) if new == ["pass"]}
    assert left_out == {("x += y",), ("x = x | z",), ("raise E(x + 1)",), ("f(x, y)",)}
    assert any("if not (x):" in x for x in made)


def test_modules_share_by_size_and_more_are_these_and_others():
    sources = {"long": "y = [" + "x < 1, " * 30 + "]", "short": "y = x < 1", "none": "x = y"}
    few, many = (mutants.chosen(sources, n, 3) for n in (20, 40))
    assert {name: len(x) for name, x in few.items()} == {"long": 19, "short": 1, "none": 0}
    assert few["long"] == many["long"][:19]
    assert mutants.chosen(sources, 20, 4) != few
