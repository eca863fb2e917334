"""The lessons in notebooks/: what is committed is what the source gives, it runs, and checkers know what is wrong."""

import base64
import re
import time

import build
import exercises
import jax
import nbformat
import pytest
import solutions

LESSONS = build.lessons()
MOST_BYTES = 1_000_000
MOST_SECONDS = 120

# The names of XML's vocabularies look like addresses, but nothing is fetched from them.
ADDRESS = re.compile(r"(?:https?|ftp|wss?)://(?!www\.w3\.org/)|(?:src|href)\s*=\s*[\"']//")


def committed(name):
    return nbformat.read(build.FOLDER / f"{name}.ipynb", 4)


def outputs(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def texts(output):
    """All that one output shows, as text; pictures too, whose bytes may hold some."""
    for kind, data in output.get("data", {"text": output.get("text", "")}).items():
        is_picture = kind.startswith("image/") and not kind.endswith("+xml")
        yield base64.b64decode(data).decode("latin-1") if is_picture else str(data)


@pytest.mark.parametrize("name", LESSONS)
def test_a_committed_notebook_is_its_source(name):
    notebook, source = committed(name), build.source(name)
    nbformat.validate(notebook)
    shown = [[(cell.id, cell.cell_type, cell.source, cell.metadata) for cell in x.cells] for x in (notebook, source)]
    assert shown[0] == shown[1], f"run `make lessons ARGS={name}`"
    assert notebook.metadata == source.metadata


@pytest.mark.parametrize("name", LESSONS)
def test_a_committed_notebook_was_run_to_its_end_in_order(name):
    cells = [cell for cell in committed(name).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert outputs(committed(name))
    assert [x for x in outputs(committed(name)) if x.output_type == "error" or x.get("name") == "stderr"] == []


@pytest.mark.parametrize("name", LESSONS)
def test_outputs_hold_no_address_and_no_path_of_a_machine(name):
    shown = "\n".join(text for output in outputs(committed(name)) for text in texts(output))
    assert ADDRESS.findall(shown) == []
    assert re.findall(r"(?:/home|/root|/tmp|/Users|site-packages|<\w+ .*at 0x)[^\n]{,40}", shown) == []


@pytest.mark.parametrize("name", LESSONS)
def test_a_committed_notebook_is_small(name):
    assert (build.FOLDER / f"{name}.ipynb").stat().st_size < MOST_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_runs_in_two_minutes(name):
    start = time.perf_counter()
    notebook = build.executed(name)
    assert time.perf_counter() - start < MOST_SECONDS
    kinds = [[(x.output_type, *sorted(x.get("data", ()))) for x in outputs(of)] for of in (notebook, committed(name))]
    assert kinds[0] == kinds[1], f"run `make lessons ARGS={name}`"


@pytest.mark.parametrize("name", LESSONS)
def test_every_exercise_that_a_lesson_checks_is_in_the_table(name):
    source = "\n".join(cell.source for cell in build.source(name).cells)
    checked = re.findall(r"\bcheck\(\"(\w+)\"", source)
    assert checked and set(checked) <= exercises.EXERCISES.keys()
    assert set(re.findall(r"\bhint\(\"(\w+)\"", source)) == set(checked)


def test_every_exercise_is_in_one_lesson():
    source = "\n".join(cell.source for name in LESSONS for cell in build.source(name).cells)
    assert sorted(re.findall(r"\bcheck\(\"(\w+)\"", source)) == sorted(exercises.EXERCISES)


@pytest.fixture(params=[False, True], ids=["float32", "float64"])
def a_reader(request):
    """JAX as those who answer have it: without the strictness of these tests."""
    loose = jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"), jax.enable_x64(request.param)
    with loose[0], loose[1], loose[2]:
        yield


@pytest.mark.parametrize("name", exercises.EXERCISES)
@pytest.mark.usefixtures("a_reader")
def test_a_solution_is_correct(name, capsys):
    exercises.check(name, solutions.SOLUTIONS[name])
    cases = len(exercises.EXERCISES[name].cases)
    assert capsys.readouterr().out == f"{name}: correct, on all {cases} inputs.\n"


@pytest.mark.usefixtures("a_reader")
@pytest.mark.parametrize(
    "name, answer, said", solutions.WRONG, ids=lambda x: getattr(x, "__name__", "") if callable(x) else ""
)
def test_a_wrong_answer_is_told_what_is_wrong_first(name, answer, said, capsys):
    exercises.check(name, answer)
    out = capsys.readouterr().out
    assert re.search(".*".join(map(re.escape, (f"{name}: ", *said))), out, re.DOTALL), out
    assert len(re.findall("^  (?:type|shape|value): ", out, re.MULTILINE)) <= 1


def test_every_exercise_has_wrong_answers_and_hints():
    for name, exercise in exercises.EXERCISES.items():
        assert sum(of == name for of, _, _ in solutions.WRONG) >= 3
        assert len(exercise.hints) >= 2


def test_hints_come_one_after_another_and_begin_again(monkeypatch, capsys):
    monkeypatch.setattr(exercises, "_GIVEN", {})
    hints = exercises.EXERCISES["softmax"].hints
    for hint in (*hints, hints[0]):
        exercises.hint("softmax")
        assert capsys.readouterr().out == f"softmax, hint {hints.index(hint) + 1} of {len(hints)}: {hint}\n"


def test_an_exercise_that_is_not_there_is_named():
    for call in (lambda: exercises.check("sofmax", len), lambda: exercises.hint("sofmax")):
        with pytest.raises(ValueError, match="name must be one of softmax, .*, got 'sofmax'"):
            call()
