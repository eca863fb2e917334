"""The README's table of the contract links tests that are there."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent


def test_every_clause_of_the_contract_links_tests_that_are_there():
    rows = re.findall(r"^\| (\d+) \|.*\| (.*) \|$", (ROOT / "README.md").read_text("utf-8"), re.M)
    assert [int(clause) for clause, _ in rows] == list(range(1, 15))
    for clause, tests in rows:
        linked = re.findall(r"\[`(\w+)`\]\(([\w/.]+)\)", tests)
        assert linked and len(linked) == tests.count("`") // 2, f"clause {clause}"
        for name, path in linked:
            assert f"\ndef test_{name}(" in (ROOT / path).read_text("utf-8"), f"clause {clause}: {name}"
