"""Report pages: whole in one file, readable without scripts, interactive with them."""

import logging
import re
import sys
from html.parser import HTMLParser

import pytest
from transformers import Trainer
from typer.testing import CliRunner

from hf_offload import OffloadConfig, OffloadTrainingArguments, ReportCallback, offload_activations, write_report
from hf_offload.cli.main import app
from hf_offload.errors import OffloadError
from hf_offload.plan.hardware import describe_hardware
from hf_offload.plan.planner import find_plan, make_problem
from hf_offload.planning.known import Known, Prediction
from hf_offload.planning.situation import Situation
from hf_offload.reports.charts import Chart, Kind, Series, interactive, thinned
from hf_offload.reports.page import Table, write_page
from hf_offload.reports.run_page import _last_micro_batch
from hf_offload.settings.sizes import format_bytes
from hf_offload.storage.wear import drive_of
from tests.helpers.activation_heavy_models import build
from tests.helpers.browser import rendered
from tests.helpers.handmade_footprints import MB, footprint_of
from tests.helpers.tiny_models import ExampleDataset, tiny_batch, tiny_model

pytestmark = pytest.mark.usefixtures("few_budgets")
CARD = ["--gpu", "24GB", "--tflops", "80", "--pcie", "25GB/s", "--ssd", "5GB/s", "--ram", "64GB"]
ODD = """<img src=x onerror="document.title='run'">&amp;"""
# Elements that end with their begin.
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """What a page holds. Fails where an element is not closed, or an id is there twice."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.attributes, self.cells, self.texts = [], [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"
        assert len(self.ids) == len(set(self.ids)), "an id is there twice"

    def handle_starttag(self, tag, attributes):
        self.attributes += [(tag, *one) for one in attributes]
        self.ids += [value for name, value in attributes if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style") and data.strip():
            (self.cells if self.open[-1] in ("td", "th") else self.texts).append(" ".join(data.split()))


def read(path):
    """The page, once it was checked to need nothing but itself."""
    text = path.read_text()
    found = Page(text)
    loads = [one for one in found.attributes if one[1] in ("src", "href", "xlink:href", "data") and "#" not in one[2]]
    assert not loads
    assert not re.search(r"@import|url\((?!#)", "".join(re.findall(r"<style>.*?</style>", text, re.DOTALL)))
    assert ("meta", "content", "width=device-width, initial-scale=1") in found.attributes
    return found


def check_in_browser(path, folder, figures):
    """All figures are drawn where scripts run, and are pictures where they do not."""
    shown, console = rendered(path, folder / "with", scripts=True)
    assert not console
    assert shown.count('<figure class="live">') == figures
    assert shown.count('class="interactive js-plotly-plot"') == figures
    plain, console = rendered(path, folder / "without", scripts=False)
    assert not console
    assert plain.count("<figure>") == figures
    assert 'class="interactive js-plotly-plot"' not in plain
    assert plain.count('<svg class="wide"') == plain.count('<svg class="narrow"') == figures
    assert plain.count("<table>") == path.read_text().count("<table>") > 0
    return shown


def test_a_plan_is_a_page_whatever_its_model_is_called(tmp_path):
    build("llama", 0.0).config.save_pretrained(tmp_path / ODD)
    path = tmp_path / "plan.html"
    result = CliRunner().invoke(app, ["plan", str(tmp_path / ODD), *CARD, "--min-bytes", "1KiB", "--html", str(path)])
    assert result.exit_code == 0, result.stderr
    page = read(path)
    assert any(ODD in text for text in page.texts)
    for axis in (r"memory \([GM]iB\)", r"time \(m?s\)", r"memory budget \([GM]iB\)", r"predicted step \(m?s\)"):
        assert sum(bool(re.fullmatch(axis, text)) for text in page.texts) == 2  # wide and narrow
    for kind in ("weights", "optimizer state", "gradients", "activations kept", "temporaries", "fastest plan"):
        assert kind in page.texts
    for cell in ("weights and buffers", "model.layers.0-2.mlp (3 x)", "recompute+ssd", "time until 600 TB are written"):
        assert cell in page.cells
    shown = check_in_browser(path, tmp_path, figures=2)
    assert "<title>Plan: " in shown, "a name was run as code"


def test_a_plan_that_does_not_fit_is_a_page_with_the_reason(tmp_path):
    path = tmp_path / "plan.html"
    small = ["model.config.n_layer=2", "model.config.n_embd=64", "model.config.n_head=2", "model.config.vocab_size=512"]
    result = CliRunner().invoke(
        app, ["plan", "gpt2-small", *small, *CARD, "--memory-budget", "1MiB", "--html", str(path)]
    )
    assert result.exit_code == 2
    page = read(path)
    assert any("the least this run can do with is" in text for text in page.texts)
    assert "fastest plan" in page.texts
    assert "weights and buffers" not in page.cells


def test_a_training_is_a_page_with_prediction_and_measurement(tiny_recipe, tmp_path, machine_with_drive):
    machine_with_drive(1e9)
    path = tmp_path / "run.html"
    words = [
        "offload.tier=auto",
        "offload.min_bytes=1KiB",
        "offload.directory=tier",
        "offload.drive_endurance_bytes=600TB",
    ]
    result = CliRunner().invoke(app, ["train", str(tiny_recipe), *words, "--report", str(path)])
    assert result.exit_code == 0, result.output + result.stderr
    page = read(path)
    for heading in (
        "Memory over time",
        "What is where",
        "Predicted and measured",
        "Budget and step time",
        "The drive's life",
    ):
        assert heading in page.texts
    for cell in ("weights and buffers", "activations, keep (8 x)", "transformer.h.0-1.mlp (2 x)"):
        assert cell in page.cells
    rating = f"% of {format_bytes(600 * 10**12)}"
    assert any(cell.endswith(rating) for cell in page.cells) == (drive_of(tmp_path) is not None)
    where = page.cells.index("peak of all tensors")
    predicted, measured, ratio = page.cells[where + 1 : where + 4]
    assert predicted.endswith("iB")
    assert measured.endswith("iB")
    assert float(ratio) > 0
    for series in ("measured", "moved", "kept", "step", "waited for bytes", "predicted step", "fastest plan"):
        assert series in page.texts
    check_in_browser(path, tmp_path, figures=5)


@pytest.mark.parametrize("tier", ["none", "ssd"])
def test_a_training_without_a_plan_is_a_page_of_what_was_measured(tiny_recipe, tmp_path, tier):
    path = tmp_path / "run.html"
    words = ["offload.tier=ssd", "offload.min_bytes=1KiB", "offload.directory=tier"] * (tier == "ssd")
    result = CliRunner().invoke(app, ["train", str(tiny_recipe), *words, "--report", str(path)])
    assert result.exit_code == 0, result.output + result.stderr
    page = read(path)
    assert any("Nothing was predicted" in text for text in page.texts)
    assert ("all units" in page.cells) == (tier == "ssd")
    assert ("moved" in page.texts) == (tier == "ssd")
    assert "step, median" in page.texts


def test_state_and_gradients_that_left_the_device_are_where_they_went(tiny_recipe, tmp_path):
    path = tmp_path / "run.html"
    words = ["offload.tier=none", "offload.optimizer=ssd", "offload.min_bytes=1KiB", "offload.directory=tier"]
    result = CliRunner().invoke(app, ["train", str(tiny_recipe), *words, "--report", str(path)])
    assert result.exit_code == 0, result.output + result.stderr
    page = read(path)
    for account in ("optimizer state in ssd", "gradients in ssd"):
        most, written, read_back = (size.split() for size in page.cells[page.cells.index(account) + 1 :][:3])
        assert all(float(number) > 0 for number, _ in (most, written, read_back))


def test_a_trainer_of_ones_own_writes_a_page_with_the_callback(tmp_path, caplog):
    path = tmp_path / "run.html"
    for offload in ({}, {"offload": "ssd", "offload_min_bytes": "1KiB", "offload_directory": str(tmp_path)}):
        arguments = OffloadTrainingArguments(
            output_dir=str(tmp_path), max_steps=2, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no",
            per_device_train_batch_size=2, **offload,
        )  # fmt: skip
        with caplog.at_level(logging.WARNING, "hf_offload"):
            Trainer(
                model=tiny_model("llama"),
                args=arguments,
                train_dataset=ExampleDataset("llama", 4),
                callbacks=[ReportCallback(path)],
            ).train()
        assert path.exists() == bool(offload)
        assert ("nothing was offloaded" in caplog.text) == (not offload)
        caplog.clear()
    page = read(path)
    assert "activations moved" in page.texts
    assert "waited for bytes" in page.texts


def test_a_loop_of_ones_own_writes_a_page_of_its_session(tmp_path):
    model = tiny_model("llama")
    with offload_activations(model, OffloadConfig(tier="ram", min_bytes="1KiB")) as session:
        model(**tiny_batch("llama")).loss.backward()
        session.end_step()
    write_report(tmp_path / "run.html", session)
    page = read(tmp_path / "run.html")
    assert page.cells[page.cells.index("all units") + 1] == "ram"
    assert "No drive was written to." in page.texts


@pytest.mark.parametrize("library", ["plotly", "matplotlib"])
def test_without_its_libraries_a_page_is_refused_before_the_work(library, tiny_recipe, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    install = 'pip install "hf-offload[report]"'
    for words in (["plan", "gpt/demo", "--html", "a.html"], ["train", str(tiny_recipe), "--report", "a.html"]):
        result = CliRunner(env={"COLUMNS": "200"}).invoke(app, words)
        assert result.exit_code == 2
        assert library in result.stderr
        assert install in result.stderr
    with pytest.raises(OffloadError, match=re.escape(install)):
        ReportCallback()
    assert CliRunner().invoke(app, ["train", str(tiny_recipe), "--report", "a.json"]).exit_code == 0


def test_whatever_a_page_is_given_stays_text(tmp_path):
    markup = "</script><script>document.title='run'</script><b "
    bad = f"{markup}\ud800"  # half a character, as in names of files that are not text
    chart = Chart(
        bad, bad, "x", "y", [Series(markup, [0, 1], [1, 2], "#000000"), Series("p", [0], [1], "#000000", Kind.POINTS)]
    )
    path = tmp_path / "page.html"
    write_page(path, bad, {bad: bad}, {bad: [bad, Table((bad, "b"), [(bad, bad)], bad, [bad]), chart], "empty": []})
    page = read(path)
    assert "<h2>empty</h2>" not in path.read_text()
    assert not any(tag == "b" and name for tag, name, _ in page.attributes)
    assert "<" not in interactive(chart)
    shown = check_in_browser(path, tmp_path, figures=1)
    assert "<title>run</title>" not in shown
    for tag in ("img", "iframe", "script"):
        path.write_text(f'{path.read_text()}<{tag} src="https://{tag}.invalid/a"></{tag}>')
    _, console = rendered(path, tmp_path / "with", scripts=True)
    refused = [line for line in console if "Content Security Policy" in line]
    assert all(any(f"{tag}.invalid" in line for line in refused) for tag in ("img", "iframe", "script"))


def test_a_long_curve_keeps_its_peak():
    curve = [(at, 1000 if at == 4321 else at % 7) for at in range(10_000)]
    short = thinned(curve, lambda point: point[1])
    assert len(short) < len(curve) / 10
    assert (4321, 1000) in short
    assert short == sorted(short)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_what_is_laid_over_a_planned_micro_batch_is_the_last_one_measured(micro_batches):
    footprint = footprint_of([10 * MB] * 3, [1.0] * 3, [5 * MB] * 3)
    problem = make_problem(footprint, describe_hardware("24GB", tflops=80), 1 << 30)
    solution = find_plan(problem)
    prediction = Prediction(
        solution.timeline.peak_bytes, micro_batches * solution.timeline.step_s, footprint.base_bytes
    )
    known = Known(Situation((), 0, 0, 0, "", True), footprint, problem, solution, prediction)
    memory = {
        "step_start_s": [0.0, 10.0],
        "step_end_s": [8.0, 18.0],
        "timeline_s": [float(second) for second in range(20)],
        "timeline_bytes": [MB * second for second in range(20)],
        "timeline_in_use_bytes": None,
        "baseline_bytes": 5 * MB,
    }
    first = 10 if micro_batches == 1 else 14
    expected = [(second - first, footprint.base_bytes + (second - 5) * MB) for second in range(first, 19)]
    assert _last_micro_batch(memory, known) == expected
