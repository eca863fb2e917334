"""The README's table of the contract names tests that are there."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent


def test_every_clause_of_the_contract_names_tests_that_are_there():
    there = set(re.findall(r"^def test_(\w+)", "".join(p.read_text() for p in (ROOT / "tests").glob("*.py")), re.M))
    rows = re.findall(r"^\| (\d+) \|.*\| (.*) \|$", (ROOT / "README.md").read_text("utf-8"), re.M)
    assert [int(clause) for clause, _ in rows] == list(range(1, 15))
    for clause, tests in rows:
        named = re.findall(r"`(\w+)`", tests)
        assert named and set(named) <= there, f"clause {clause}: {set(named) - there}"
