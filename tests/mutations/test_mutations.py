"""The patches that break the engine on purpose keep up with it; ``make mutations`` applies them and runs the tests."""

import shutil

import pytest

from tests.mutations.patches import ROOT, all_mutations

MUTATIONS = all_mutations()
FOLDERS = ("hf_offload/engine", "hf_offload/storage")  # what they change


def test_there_are_many():
    assert len(MUTATIONS) >= 25


@pytest.mark.skipif(shutil.which("git") is None, reason="patches are applied by git, which is not installed")
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_mutation_still_applies(mutation, tmp_path):
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tmp_path / folder)
    assert mutation.apply(tmp_path) == "", f"renew tests/mutations/{mutation.name}.patch"
    changed = [
        path
        for folder in FOLDERS
        for path in (tmp_path / folder).glob("*.py")
        if path.read_text() != (ROOT / folder / path.name).read_text()
    ]
    assert changed
    for path in changed:
        compile(path.read_text(), path, "exec")


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_mutation_names_tests_that_exist(mutation):
    if mutation.seeds is None:
        path, _, name = mutation.tests.partition("::")
        assert f"def {name.split('[')[0]}(" in (ROOT / path).read_text()
