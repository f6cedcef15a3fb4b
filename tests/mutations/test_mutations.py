"""The patches that break the engine on purpose keep up with it; ``make mutations`` applies them and runs the tests."""

import re
import textwrap

import pytest

from tests.mutations.patches import ROOT, Mutation, Sources, all_mutations

MUTATIONS = all_mutations()
UNUSED_PLUGINS = [f"-pno:{name}" for name in ("xdist", "cacheprovider", "faulthandler")]


def test_there_are_many():
    assert len(MUTATIONS) >= 100


@pytest.fixture(scope="module")
def sources():
    return Sources(ROOT / "hf_offload")


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_mutation_still_applies(mutation, sources):
    changed = mutation.changed(sources)
    assert changed
    for path, text in changed.items():
        assert text != "\n".join(sources.lines[path])
        compile(text, path, "exec")


class Collected:
    """A plugin that remembers which tests were collected and not deselected."""

    def pytest_collection_finish(self, session):
        self.tests = [item.nodeid for item in session.items]


def test_every_mutation_names_tests_that_make_test_runs():
    named = [mutation for mutation in MUTATIONS if mutation.seeds is None]
    files = sorted({mutation.tests.partition("::")[0] for mutation in named})
    collected = Collected()
    # In this process, where most of these files are loaded already.
    options = ["--collect-only", "-qq", "-m", "not full", *UNUSED_PLUGINS]
    code = pytest.main([*options, f"--rootdir={ROOT}", *(str(ROOT / file) for file in files)], plugins=[collected])
    assert code == pytest.ExitCode.OK
    runs = {*collected.tests, *(test.partition("[")[0] for test in collected.tests)}
    assert {mutation.name: mutation.tests for mutation in named if mutation.tests not in runs} == {}


def test_the_table_is_of_these_mutations():
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", (ROOT / "docs" / "mutations.md").read_text(), re.MULTILINE)
    assert set(rows) == {(mutation.name, mutation.rule) for mutation in MUTATIONS}, "run `make mutations`"


CODE = """class Box:
    def open(self):
        if self.closed:
            return None
        return self.content
"""
MUTATION = """Rule: What is closed stays closed
Tests: tests/test_box.py::test_box

@@ Box.open
 if self.closed:
-    return None
+    return self.content
"""


def changed(tmp_path, code, mutation=MUTATION):
    (tmp_path / "box.patch").write_text(mutation)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "box.py").write_text(code)
    return Mutation.read(tmp_path / "box.patch").changed(Sources(tmp_path / "package"))


@pytest.mark.parametrize(
    "code",
    [
        CODE,
        "import os\n\nLID = None\n\n\n" + CODE,
        "if True:\n" + textwrap.indent(CODE, "    "),
        CODE.replace("self):", "self):\n        print()"),
        CODE + "\n\nclass Bag:\n    def open(self):\n        if self.closed:\n            return None\n",
    ],
    ids=["as it was", "further down", "deeper", "in other lines", "beside another of that name"],
)
def test_a_mutation_follows_code_that_has_moved(code, tmp_path):
    expected = code.replace("return None", "return self.content", 1)
    assert changed(tmp_path, code) == {tmp_path / "package" / "box.py": expected}


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (CODE.replace("open", "unlock"), "nothing in package/ is called Box.open"),
        (CODE.replace("closed", "shut"), r"found 0 times in Box.open \(package/box.py:2\), not once:\nif self.closed:"),
        (CODE + CODE, r"found 2 times in Box.open \(package/box.py:3, package/box.py:8\), not once"),
    ],
)
def test_a_mutation_that_cannot_be_applied_says_why(code, words, tmp_path):
    with pytest.raises(LookupError, match=f"tests/mutations/box.patch has to be renewed: {words}"):
        changed(tmp_path, code)


def test_a_mutation_of_another_form_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"Box\.open: expected lines that begin with"):
        changed(tmp_path, CODE, MUTATION.replace(" if self", "if self"))
