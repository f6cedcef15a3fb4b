"""Every differentiable operator of torch gives the same bits with and without offloading.

The operators, and inputs for them, are those of torch's own tests, and some that its list does not have. Backward gets all
bytes from the tier: nothing that was saved is still alive by then.
"""

import contextlib
import logging
import resource

import pytest
import torch

from tests.operators.catalogue import calls_of, differentiable, enlarged, others
from tests.operators.probes import Comparison, Saved, Trouble, mutable_arguments_saved, train

logger = logging.getLogger(__name__)  # what was compared and what was left out: --log-cli-level=INFO
EAGER_REFUSALS = {"raises without offloading", "differs from run to run without offloading"}


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fresh memory is filled with NaN: what is copied before it is written shows. Operators that cannot do so only warn."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@pytest.fixture
def bounded_memory():
    """Inputs of some operators grow faster than one thinks: then an allocation fails, and not the machine."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (14 << 30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture
def comparison(request, tmp_path):
    made = []

    def make(tier, minimum):
        made.append(Comparison(tier, tmp_path, minimum))
        return made[-1]

    yield make
    for one in made:
        one.close()
        logger.info("%s", one.tally)


def assert_same(tally):
    assert tally.different == []
    assert tally.skipped.keys() <= EAGER_REFUSALS
    assert tally.skipped_operators.keys() <= tally.operators, "an operator of which no call could be compared"


def compare_one(comparison, calls):
    """The first of ``calls`` that runs without offloading."""
    before = comparison.tally.calls
    for call in calls:
        comparison.compare([call])
        if comparison.tally.calls > before:
            return


def test_one_call_of_every_operator(comparison):
    every = comparison("ssd", 0)
    for operator in differentiable():
        every.compare(calls_of(operator, samples=1, variants=["usual"]))
    assert_same(every.tally)
    assert every.tally.saved <= every.tally.moved


@pytest.mark.parametrize("tier", ["ssd", "ram"])
def test_operators_with_a_state_and_functions_of_the_users_own(tier, comparison):
    one = comparison(tier, 0)
    one.compare(others())
    assert_same(one.tally)
    assert one.tally.saved <= one.tally.moved


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tier", ["ssd", "ram"])
@pytest.mark.usefixtures("bounded_memory")
def test_every_call_of_every_operator(tier, comparison):
    every = comparison(tier, 0)
    for operator in differentiable():
        every.compare(calls_of(operator))
    every.compare(others())
    assert_same(every.tally)
    assert every.tally.saved <= every.tally.moved


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tier", ["ssd", "ram"])
@pytest.mark.usefixtures("bounded_memory")
def test_large_tensors_of_every_operator_at_the_default_minimum(tier, comparison):
    every = comparison(tier, None)
    for operator in differentiable():
        if operator.name == "lu_unpack":
            continue  # reads behind the end of pivots that are fewer than its matrix has columns
        for call in calls_of(operator, samples=1, variants=["usual"]):
            compare_one(every, enlarged(call, 1 << 20))
    every.compare(others(rows=768))
    assert every.tally.different == []
    assert len(every.tally.moved) > 300


# ------------------------------------------------------------------------------------------------- when bytes become final


def watched(calls):
    """Every saved tensor that its operation changed afterwards without a new version, with the call's name."""
    found = []
    for call in calls:
        saved = Saved(compare=True)
        with contextlib.suppress(Trouble):  # some of torch's samples are not for backward
            train(call, saved.watch, before_backward=saved.end)
        found += [(call.operator, one) for one in saved.seen if one.written_later]
    return found


def assert_final_when_promised(found):
    assert {name for name, _ in found} >= {"rrelu, training=True", "batch_norm with statistics, training=True"}
    assert [name for name, one in found if one.required_gradient] == []
    # Statistics of a batch norm that is called twice: its backward uses those of the batch.
    assert {name for name, one in found if one.written_by_others} <= {"batch_norm with statistics, training=True"}


def test_only_what_requires_no_gradient_is_written_after_it_was_saved():
    assert_final_when_promised(watched(others()))


@pytest.mark.full
@pytest.mark.timeout(900)
def test_only_what_requires_no_gradient_is_written_after_it_was_saved_by_any_operator():
    found = watched(others())
    for operator in differentiable():
        found += watched(calls_of(operator))
    logger.info("Written after it was saved: %s", sorted({name for name, _ in found}))
    assert_final_when_promised(found)


def test_no_argument_that_is_written_to_after_it_was_saved_may_require_a_gradient():
    """By torch's own table of derivatives, which autograd is generated from."""
    found = mutable_arguments_saved()
    assert ("rrelu_with_noise", "noise") in found
    assert [argument for argument, is_differentiable in found.items() if is_differentiable] == []


def test_autograd_refuses_noise_that_requires_a_gradient():
    values, noise = torch.randn(2, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match="not differentiable with respect to argument 'noise'"):
        torch.ops.aten.rrelu_with_noise(values, noise, 0.1, 0.3, True)
