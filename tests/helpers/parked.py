"""Models whose weights are on a tier whenever no operation uses them."""

from torch import nn

from hf_offload import OffloadConfig, attach
from hf_offload.session import OffloadSession


def parked(model: nn.Module, folder, params: str = "ssd", **settings) -> OffloadSession:
    """Weights of ``model`` leave memory after each use."""
    settings = {"tier": "none", "min_bytes": 1, **settings}
    session = attach(model, OffloadConfig(params=params, directory=folder, **settings))
    session.residency.limit_bytes = 1
    return session


def in_memory(session: OffloadSession) -> set[str]:
    return {weight.name for weight in session.residency.weights() if weight.is_here}


def leave_memory(session: OffloadSession) -> None:
    """All weights are written, and leave."""
    session.residency.let_all_leave()
    assert not in_memory(session)
