"""Public names that have changed: the former ones warn and do what the new ones do."""

import pytest
from torch import nn

from hf_offload import OffloadConfig, OffloadConfigError, attach


@pytest.mark.parametrize(("former", "now"), [("training", "run_id"), ("by", "owner")])
def test_former_arguments_and_attributes_of_a_session(former, now):
    with pytest.warns(FutureWarning, match=rf"attach\({former}=\) is called {now}= now") as caught:
        session = attach(nn.Linear(2, 2), OffloadConfig(tier="none"), **{former: "a value"})
    assert caught[0].filename == __file__
    with pytest.warns(FutureWarning, match=rf"OffloadSession\.{former} is called {now} now") as caught:
        assert getattr(session, former) == "a value"
    assert caught[0].filename == __file__
    assert getattr(session, now) == "a value"
    with pytest.warns(FutureWarning, match=rf"OffloadSession\.{former} is called {now} now"):
        setattr(session, former, "another")
    assert getattr(session, now) == "another"


@pytest.mark.parametrize(("former", "now"), [("training", "run_id"), ("by", "owner")])
def test_a_former_and_a_new_argument_at_once_are_refused(former, now):
    with pytest.raises(OffloadConfigError, match=rf"attach\({former}=\) is the old name of {now}="):
        attach(nn.Linear(2, 2), OffloadConfig(tier="none"), **{former: "one", now: "another"})


def test_the_former_name_of_recomputed_modules():
    session = attach(
        nn.Sequential(nn.Linear(4, 4), nn.GELU()), OffloadConfig(tier="none", recompute_elementwise="exact")
    )
    with pytest.warns(FutureWarning, match="rematerialized"):
        assert session.lean == session.rematerialized != []
    with pytest.warns(FutureWarning, match=r"OffloadConfig\.lean is called elementwise now"):
        assert session.config.lean is session.config.elementwise is not None
    session.detach()
