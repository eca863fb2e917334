"""Would the tests notice? `make mutants` breaks one small thing of a core module at a time and runs what guards it.

`make mutants ARGS="_tile masks --number 40 --seed 3"` chooses modules, how many mutants they share by their size, and
which. Only a copy of the repository is changed. A mutant is caught where a guard fails or takes far too long; one that
no test could catch is explained in `EQUIVALENT` and counts by itself. Of what survives the difference is printed.
"""

import argparse
import ast
import difflib
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

# The tests that guard each module, the cheapest and nearest first: what pytest is given, one run after another.
_OPTIONS = "tests/test_contract.py -k 'dense and options_agree and (everything or stats and sink)'"
_EDGES = (
    "tests/test_contract.py -k 'not blockwise and (derivatives_of_the_reference or empty_row or a_sink"
    " or half_precision or each_result_alone or overflow or infinite or softcap or largest_logit"
    " or finite_differences or dtypes or only_the_queries or only_itself or only_the_row or export or debug_flags)'"
)
_TILES = (
    "tests/test_contract.py -k 'not dense and (options or empty_row or each_result or overflow or softcap or tie"
    " or sink or only_the or half_precision or finite_differences or dropout or sizes)'"
)
_MISUSE = "tests/test_errors.py"
_WEIGHTS = "tests/test_contract.py -k 'weights or rows or merging or part or merge'"
GUARDS = {
    "_tile": [_OPTIONS, _EDGES, "tests/test_trace.py", _TILES],
    "_dense": ["tests/test_contract.py -k 'dense and (any_sizes or no_keys)'", _OPTIONS, _WEIGHTS, _EDGES],
    "_online": ["tests/test_contract.py -k 'merging or part or merge'", _TILES, _MISUSE + " -k another"],
    "_plan": ["tests/test_blockwise.py -k 'plan or sizes_change or not_read or skips'", _TILES],
    "_blockwise": [
        _TILES,
        "tests/test_blockwise.py -k 'plan or sizes_change or not_read or skips or third'",
        "tests/test_ring.py -k every_option",
    ],
    "_visible": [
        "tests/test_blockwise.py -k one_query",
        _OPTIONS,
        _EDGES,
        "tests/test_contract.py -k 'one_query or many_numbers or vmap'",
        _TILES,
    ],
    "_rows": [
        "tests/test_rows.py -k 'edges or axis or raise or refused or entropies'",
        "tests/test_rows.py jattn/_rows.py",
    ],
    "_rules": ["tests/test_masks.py tests/test_biases.py -k 'not derivatives'", _OPTIONS],
    "masks": ["tests/test_masks.py jattn/masks.py", "tests/test_blockwise.py -k plan"],
    "biases": ["tests/test_biases.py jattn/biases.py", "tests/test_contract.py -k 'dense and (table or returns)'"],
    "_attention": [
        _OPTIONS,
        _MISUSE,
        _WEIGHTS,
        "tests/test_contract.py -k 'not blockwise and (raise or dropout or vmap or traced or sizes or heads or axis"
        " or lengths)'",
        "tests/test_blockwise.py -k 'auto or repeated or one_query'",
        "tests/test_cudnn.py",
        "tests/test_cache.py -k padding",
    ],
    "_checks": [
        _MISUSE,
        "tests/test_contract.py -k 'not blockwise and (raise or softcap)'",
        "tests/test_masks.py -k refused",
        "tests/test_flax.py tests/test_multihead.py -k option",
    ],
    "_dropout": [
        "tests/test_contract.py -k 'dense and (dropout_bits or drops_as or keeps_the_mean or rate_0)'",
        "tests/test_contract.py -k 'not dense and (dropout_bits or rate_0)'",
    ],
    "_walk": ["tests/test_blockwise.py -k 'sizes_change or not_read or third'", _TILES],
    "_linear": ["tests/test_blockwise.py -k 'sizes_change or third'", "tests/test_contract.py -k shard_map"],
    "_rotary": ["tests/test_rotary.py jattn/_rotary.py"],
    "_cache": ["tests/test_cache.py jattn/_cache.py"],
    "_multihead": ["tests/test_multihead.py jattn/_multihead.py"],
    "ring": ["tests/test_ring.py jattn/ring.py"],
    "_round": ["tests/test_ring.py"],
    "_cudnn": ["tests/test_cudnn.py"],
    "interop/flax": ["tests/test_flax.py jattn/interop/flax.py"],
    "interop/equinox": ["tests/test_equinox.py jattn/interop/equinox.py"],
    "interop/jax_nn": ["tests/test_jax_nn.py jattn/interop/jax_nn.py"],
    "testing": ["tests/test_testing.py jattn/testing.py"],
    "_trace": ["tests/test_trace.py jattn/_trace.py"],
    "_debug_check": ["tests/test_debug_check.py tests/test_contract.py -k 'debug_check or traced_bad or checkify'"],
}

# Mutants that change nothing that a caller can see: (module, the changed line) and why.
EQUIVALENT: dict[tuple[str, str], str] = {
    ("_online", "lse = jnp.where(seen.any(0), peak[1] + jnp.log(safe), -jnp.inf)"): "an axis of 1 has no other index",
    (
        "_cudnn",
        "return finite & (query * key * max(2.0, abs(scale)) < jnp.finfo(jnp.float32).max / 2)",
    ): "a bound; where it is narrower, the other engine gives the same sooner",
    ("_dropout", "uniform = (bits >> (8)).astype(np.float32) * np.float32(2**-24)"): "a Python 8 is a uint32 here",
    ("_walk", "mlir.register_lowering(p, mlir.lower_fun(run))"): "several results are what lower_fun expects by itself",
    ("interop/jax_nn", "own = axes[4 - x.ndim :] if at_least <= x.ndim < 4 else axes"): "of four axes all are left",
    ("_rules", "got = (indices)"): "what is known is no tracer, and has the same least and greatest either way",
}

OPERATORS = {
    ast.Lt: ("<", "<=", ">="),
    ast.LtE: ("<=", "<", ">"),
    ast.Gt: (">", ">=", "<="),
    ast.GtE: (">=", ">", "<"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
NAMES = {"min": "max", "minimum": "maximum", "any": "all", "argmin": "argmax"}
NAMES |= {new: old for old, new in NAMES.items()}


class Mutant(NamedTuple):
    """The bytes from `start` to `stop` become `new`."""

    start: int
    stop: int
    new: bytes


class Finder(ast.NodeVisitor):
    """All mutants of a source. Not in docstrings, annotations, strings, `__all__`, and what an error says."""

    def __init__(self, source):
        self.source, self.found = source.encode(), []
        # Where each line starts; `ast` counts bytes.
        self.lines = [0, *(m.end() for m in re.finditer(b"\n", self.source))]
        self.visit(ast.parse(source))

    def span(self, node):
        return self.lines[node.lineno - 1] + node.col_offset, self.lines[node.end_lineno - 1] + node.end_col_offset

    def text(self, node):
        return self.source[slice(*self.span(node))]

    def add(self, node, new):
        self.found.append(Mutant(*self.span(node), new))

    def operator(self, op, left, right):
        """The operator that stands between two expressions."""
        old, *others = OPERATORS.get(type(op), [""])
        start, stop = self.span(left)[1], self.span(right)[0]
        at = re.search(rf"(?<!\w){re.escape(old)}(?!\w)".encode(), self.source[start:stop])
        for new in others if at else ():
            self.found.append(Mutant(start + at.start(), start + at.end(), new.encode()))

    def visit_JoinedStr(self, node):
        pass

    def visit_AnnAssign(self, node):
        if node.value is not None:
            self.visit(node.value)

    def visit_arg(self, node):
        pass

    def visit_FunctionDef(self, node):
        for child in (*node.decorator_list, node.args, *node.body):
            self.visit(child)

    def visit_Raise(self, node):
        self.add(node, b"pass")

    def visit_Expr(self, node):
        if isinstance(node.value, ast.Call):
            self.add(node, b"pass")
        self.generic_visit(node)

    def visit_Assign(self, node):
        names = {n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)}
        if "__all__" in names:
            return
        # x = f(x)
        if names and names <= {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}:
            self.add(node, b"pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node):
        self.add(node, b"pass")
        self.generic_visit(node)

    def visit_If(self, node):
        self.add(node.test, b"not (" + self.text(node.test) + b")")
        self.generic_visit(node)

    def visit_IfExp(self, node):
        for side in (node.body, node.orelse):
            self.add(node, b"(" + self.text(side) + b")")
        self.generic_visit(node)

    def visit_Compare(self, node):
        for op, left, right in zip(node.ops, [node.left, *node.comparators], node.comparators, strict=False):
            self.operator(op, left, right)
        self.generic_visit(node)

    def visit_BinOp(self, node):
        self.operator(node.op, node.left, node.right)
        self.generic_visit(node)

    def visit_BoolOp(self, node):
        # Any one condition alone may be one too many.
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.operator(node.op, left, right)
        self.generic_visit(node)

    def visit_UnaryOp(self, node):
        self.add(node, b"(" + self.text(node.operand) + b")")
        self.generic_visit(node)

    def visit_Constant(self, node):
        if isinstance(node.value, bool):
            self.add(node, str(not node.value).encode())
        elif isinstance(node.value, int | float):
            self.add(node, repr(node.value + 1).encode())
            if node.value == 1:
                self.add(node, b"0")

    def visit_Call(self, node):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in NAMES:
            at = self.span(node.func)[1]
            self.found.append(Mutant(at - len(name), at, NAMES[name].encode()))
        if name == "where" and len(node.args) == 3:
            test, yes, no = map(self.text, node.args)
            start, stop = self.span(node.args[0])[0], self.span(node.args[2])[1]
            self.found.append(Mutant(start, stop, b", ".join((test, no, yes))))
        if name == "astype":
            self.add(node, b"(" + self.text(node.func.value) + b")")
        elif len(node.args) == 1 and not node.keywords and not isinstance(node.args[0], ast.Starred | ast.GeneratorExp):
            self.add(node, b"(" + self.text(node.args[0]) + b")")
        # What `zip` asserts always holds.
        for keyword in (k for k in node.keywords if k.arg != "strict"):
            start, stop = self.span(keyword)
            if keyword.arg is not None and self.source[:start].rstrip().endswith(b","):
                self.found.append(Mutant(self.source[:start].rindex(b","), stop, b""))
        self.generic_visit(node)

    def visit_keyword(self, node):
        if node.arg != "strict":
            self.generic_visit(node)


def mutants(source):
    """All mutants of `source` that are Python, as new sources."""
    finder = Finder(source)
    out = []
    for start, stop, new in dict.fromkeys(finder.found):
        mutated = (finder.source[:start] + new + finder.source[stop:]).decode()
        try:
            if ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source)):
                out.append(mutated)
        except SyntaxError:
            pass
    return out


def difference(old, new):
    """Where they differ, in one place: the number of the line, the old lines and the new ones."""
    old, new = old.splitlines(), new.splitlines()
    blocks = difflib.SequenceMatcher(None, old, new, False).get_opcodes()
    i, j, k, m = next(block[1:] for block in blocks if block[0] != "equal")
    return i + 1, [line.strip() for line in old[i:j]], [line.strip() for line in new[k:m]]


def passes(guards, folder, limit, environment):
    """Whether all guards pass within seconds."""
    stop = time.monotonic() + limit
    for guard in guards:
        command = [sys.executable, "-m", "pytest", "-xq", "-rfE", "-p", "no:cacheprovider", *shlex.split(guard)]
        to = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        run = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **to)
        try:
            out, _ = run.communicate(timeout=max(stop - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
            run.communicate()
            return False, f"{guard}: more than {limit:.0f} s"
        if run.returncode:
            failed = re.findall(r"^(?:FAILED|ERROR) (.*)", out.decode(), re.MULTILINE)
            return False, failed[0] if failed else f"{guard}: exit {run.returncode}"
    return True, ""


def shares(sizes, number):
    """How many of `number` each gets by its size, {name: int}: at least one, where there are as many."""
    whole = sum(sizes.values())
    exact = {name: number * size / whole for name, size in sizes.items()}
    out = {name: min(max(int(x), 1), sizes[name]) for name, x in exact.items()}
    for name in sorted(exact, key=lambda name: exact[name] % 1, reverse=True):
        out[name] += out[name] < sizes[name] and sum(out.values()) < number
    return out


def chosen(sources, number, seed):
    """{module: new sources}: the first of all its mutants in a shuffled order, so that more are these and others."""
    every = {name: mutants(source) for name, source in sources.items()}
    for name, of_one in every.items():
        random.Random(f"{seed} {name}").shuffle(of_one)
    return {name: every[name][:n] for name, n in shares({name: len(x) for name, x in every.items()}, number).items()}


def run(root, package, guards, number, seed, equivalent=EQUIVALENT):
    """Runs the mutants of the modules that `guards` names; of each module how many were made, explained and caught."""
    ours = [name for name in os.listdir(root) if not name.startswith(".") and name != "dist"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    sources = {name: (root / package / f"{name}.py").read_text("utf-8") for name in guards}
    counts, survivors = {}, []
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        for name in ours:
            copy = shutil.copytree if (root / name).is_dir() else shutil.copy
            copy(root / name, folder / name)
        environment["PYTHONPATH"] = str(folder)
        for name, made in chosen(sources, number, seed).items():
            path = folder / package / f"{name}.py"
            environment.pop("PYTHONDONTWRITEBYTECODE", None)
            start = time.monotonic()
            well, why = passes(guards[name], folder, 600, environment)
            if not well:
                raise SystemExit(f"{name}: a guard fails without any mutant: {why}")
            # A mutant may be as old and as long as what was compiled before it.
            environment["PYTHONDONTWRITEBYTECODE"] = "1"
            for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
                compiled.unlink()
            # Twice as long as the unbroken module takes, and time to start.
            limit = 2 * (time.monotonic() - start) + 30
            print(f"{name}: {len(made)} mutants, {time.monotonic() - start:.0f} s for all guards", flush=True)
            caught = explained = 0
            for i, mutant in enumerate(made, 1):
                line, old, new = difference(sources[name], mutant)
                reason = next((equivalent[name, text] for text in new if (name, text) in equivalent), None)
                path.write_text(mutant, "utf-8")
                survives, why = (False, "") if reason else passes(guards[name], folder, limit, environment)
                explained += reason is not None
                caught += not survives and reason is None
                verdict = f"explained: {reason}" if reason else "SURVIVES" if survives else f"caught by {why}"
                print(f"  {i}/{len(made)} line {line}: {' '.join(new) or '(deleted)'}  {verdict}", flush=True)
                if survives:
                    survivors.append(
                        "\n".join([f"{name}.py:{line}", *(f"- {x}" for x in old), *(f"+ {x}" for x in new)])
                    )
            counts[name] = len(made), explained, caught
            path.write_text(sources[name], "utf-8")
    return counts, survivors


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("modules", nargs="*", default=list(GUARDS), help=", ".join(GUARDS))
    parser.add_argument("--number", type=int, default=150, help="how many mutants, 150 if not given")
    parser.add_argument("--seed", type=int, default=0, help="which of all that there are")
    given = parser.parse_args()
    counts, survivors = run(ROOT, "jattn", {name: GUARDS[name] for name in given.modules}, given.number, given.seed)
    print("".join(f"\n{survivor}\n" for survivor in survivors))
    print(table(counts))


def table(counts):
    """Of each module and of all: how many mutants, how many of them are explained, and the share of the rest caught."""
    whole = tuple(map(sum, zip(*counts.values(), strict=True)))
    lines = ["| module | mutants | explained | caught | share |", "|---|---|---|---|---|"]
    for name, (made, explained, caught) in (counts | {"all": whole}).items():
        share = 100 * caught / max(made - explained, 1)
        lines.append(f"| {name} | {made} | {explained} | {caught} | {share:.0f} % |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
