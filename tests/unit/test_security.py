"""What SECURITY.md promises: nothing is run that comes from outside, and no other user can get in between."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hf_offload
from hf_offload.errors import OffloadConfigError
from hf_offload.settings.recipes import load_recipe
from hf_offload.storage.file_systems import check_directory

PACKAGE = Path(hf_offload.__file__).parent
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen"),
    *("yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "yaml.unsafe_load_all", "yaml.full_load_all"),
}


def problems_of(source: str) -> list[str]:
    """What ``source`` does that can run code which came as data."""
    found = []
    tree = ast.parse(source)
    safe_loaders = {"SafeLoader", "CSafeLoader"} | {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and [ast.unparse(base) for base in node.bases] == ["yaml.SafeLoader"]
    }
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        found += [f"import of {name}" for name in names if name.split(".")[0] in FORBIDDEN_MODULES]
        found += [f"import of {name}" for name in names if name in FORBIDDEN_CALLS]
        if not isinstance(node, ast.Call):
            continue
        call = ast.unparse(node.func)
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if call in FORBIDDEN_CALLS:
            found.append(f"call of {call}")
        if call == "torch.load" and keywords.get("weights_only") != "True":
            found.append("torch.load without weights_only=True")
        loader = keywords.get("Loader", ast.unparse(node.args[1]) if len(node.args) > 1 else "none")
        if call == "yaml.load" and loader.split(".")[-1] not in safe_loaders:
            found.append(f"yaml.load with the loader {loader}")
        if keywords.get("allow_pickle", "False") != "False" or keywords.get("shell", "False") != "False":
            found.append(f"{call} with allow_pickle or shell")
        if keywords.get("trust_remote_code", "False") != "False":
            found.append(f"{call} with trust_remote_code")
    return found


def test_no_code_of_the_package_runs_data():
    files = list(PACKAGE.rglob("*.py"))
    assert len(files) > 100
    found = {str(path.relative_to(PACKAGE)): problems_of(path.read_text(encoding="utf-8")) for path in files}
    assert found.pop("run.py") == ["call of exec", "call of compile"]  # of the script that it was started with
    assert {path: problems for path, problems in found.items() if problems} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads", "import dill as d", "eval(x)", "exec(x)", "from os import system",
        "import os\nos.system(x)", "torch.load(f)", "torch.load(f, weights_only=False)", "yaml.load(f)",
        "yaml.load(f, Loader=yaml.Loader)", "yaml.load(f, yaml.UnsafeLoader)", "yaml.full_load(f)",
        "np.load(f, allow_pickle=True)", "subprocess.run(x, shell=True)", "AutoModel.from_pretrained(n, trust_remote_code=x)",
        "class L(yaml.Loader): pass\nyaml.load(f, Loader=L)",
    ],
)  # fmt: skip
def test_the_search_finds_what_it_looks_for(source):
    assert problems_of(source)


@pytest.mark.parametrize(
    "source", ["module.eval()", "torch.load(f, weights_only=True)", "yaml.load(f, Loader=yaml.SafeLoader)"]
)
def test_the_search_finds_nothing_else(source):
    assert problems_of(source) == []


@pytest.mark.parametrize(
    "value",
    [
        "!!python/object/apply:os.system ['touch {mark}']",
        "!!python/object/new:subprocess.Popen [['touch', '{mark}']]",
        "!!python/name:os.system",
        "!!python/module:os",
    ],
)
def test_a_recipe_runs_no_code(tiny_recipe, tmp_path, value):
    mark = tmp_path / "ran"
    text = tiny_recipe.read_text()
    tiny_recipe.write_text(f"{text}\noffload: {value.format(mark=mark)}\n")
    with pytest.raises(OffloadConfigError, match="python"):
        load_recipe(tiny_recipe, [])
    tiny_recipe.write_text(text)
    with pytest.raises(OffloadConfigError):
        load_recipe(tiny_recipe, [f"offload={value.format(mark=mark)}"])
    assert not mark.exists()


# -- other users -----------------------------------------------------------------------------------------------------------

SOMEBODY = 65534
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act for another user")


def test_links_of_one_s_own_are_followed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "absolute").symlink_to(tmp_path / "link")
    (tmp_path / "up").symlink_to("../" + tmp_path.name + "/absolute")
    for name in ("link", "absolute", "up"):
        assert check_directory(tmp_path / name)


@only_root
@pytest.mark.parametrize("target", ["real", "{tmp_path}/real", "own", "real/../own"])
def test_links_of_another_user_are_refused(tmp_path, target):
    (tmp_path / "real").mkdir()
    (tmp_path / "own").symlink_to("real")
    theirs = tmp_path / "theirs"
    theirs.symlink_to(target.format(tmp_path=tmp_path))
    os.lchown(theirs, SOMEBODY, SOMEBODY)
    (tmp_path / "mine").symlink_to("theirs")
    (theirs / "inside").mkdir()
    real = tmp_path / "real"
    for path in (theirs, tmp_path / "mine", theirs / "inside", theirs / ".." / "real"):
        if path == theirs / ".." / "real" and target == "real/../own":
            continue
        with pytest.raises(
            OffloadConfigError, match=rf"symbolic link that belongs to another user \(uid {SOMEBODY}\).*{real}"
        ):
            check_directory(path)


SHARED = """
import os, sys
import torch
import transformers.modeling_layers  # all that is imported later: another user may not read this Python
from torch import nn
from hf_offload import OffloadConfig, offload_activations
from hf_offload.session import attach

directory, *users = sys.argv[1:]
go, tell = os.pipe()

def run(uid):
    os.close(tell)
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    with offload_activations(model, OffloadConfig(directory=directory, min_bytes=0)) as session:
        loss = model(torch.randn(64, 64)).sum()
        session._engine.transfer._wait_for_writes(0)  # before backward, which takes from memory what is not written yet
        loss.backward()
        print(os.geteuid(), session.stats.total.written_bytes, flush=True)
        os.read(go, 1)  # until the other has come as far

torch.set_num_threads(1)
children = []
for uid in map(int, users):
    children.append(os.fork())
    if not children[-1]:
        code = 1
        try:
            run(uid)
            code = 0
        finally:
            os._exit(code)
sys.stdin.readline()
os.close(tell)
sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
"""


@only_root
def test_two_users_share_a_directory_with_the_sticky_bit():
    shared = Path("/tmp") / f"hf_offload-shared-{os.getpid()}"  # every folder on the way has to let others through
    shared.mkdir()
    try:
        shared.chmod(0o1777)
        command = [sys.executable, "-c", SHARED, str(shared), "0", str(SOMEBODY)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
            told = dict(sorted(tuple(map(int, run.stdout.readline().split())) for _ in range(2)))
            shown = sorted(path.name for path in shared.iterdir())
            run.communicate("\n", timeout=200)
        assert run.returncode == 0
        assert told.keys() == {0, SOMEBODY}
        assert all(written > 0 for written in told.values())
        assert shown == [], "an offload file shows"
    finally:
        shutil.rmtree(shared)
