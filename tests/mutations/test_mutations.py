"""The patches that break the engine on purpose keep up with it; ``make mutations`` applies them and runs the tests."""

import re
import shutil

import pytest

from tests.mutations.patches import ROOT, all_mutations

MUTATIONS = all_mutations()


def test_there_are_many():
    assert len(MUTATIONS) >= 100


@pytest.mark.skipif(shutil.which("git") is None, reason="patches are applied by git, which is not installed")
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_mutation_still_applies(mutation, tmp_path):
    assert mutation.files
    for file in mutation.files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    assert mutation.apply(tmp_path) == "", f"renew tests/mutations/{mutation.name}.patch"
    for file in mutation.files:
        changed = (tmp_path / file).read_text()
        assert changed != (ROOT / file).read_text()
        compile(changed, file, "exec")


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_mutation_names_tests_that_exist(mutation):
    if mutation.seeds is None:
        path, _, name = mutation.tests.partition("::")
        assert f"def {name.split('[')[0]}(" in (ROOT / path).read_text()


def test_the_table_is_of_these_mutations():
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", (ROOT / "docs" / "mutations.md").read_text(), re.MULTILINE)
    assert set(rows) == {(mutation.name, mutation.rule) for mutation in MUTATIONS}, "run `make mutations`"
