"""Models whose weights are on a tier whenever no operation uses them."""

from torch import nn

from hf_offload import OffloadConfig, attach
from hf_offload.session import OffloadSession
from hf_offload.state.contexts import outside
from hf_offload.state.parked import Parked
from hf_offload.state.registry import parked_of
from hf_offload.state.step import Streaming


def parked(model: nn.Module, folder, params: str = "ssd", **settings) -> OffloadSession:
    """Weights of ``model`` leave memory after each use."""
    settings = {"tier": "none", "min_bytes": 1, **settings}
    session = attach(model, OffloadConfig(params=params, directory=folder, **settings))
    session.residency.limit_bytes = 1
    return session


def in_memory(session: OffloadSession) -> set[str]:
    return {weight.name for weight in session.residency.weights() if weight.is_here}


def let_weights_leave(session: OffloadSession) -> None:
    """All weights are written, and leave, as far as they may."""
    with outside():
        for weight in session.residency.weights():
            weight.leave()
    session.residency.store.settle()


def leave_memory(session: OffloadSession) -> None:
    """All weights are written, and leave."""
    let_weights_leave(session)
    assert not in_memory(session)


def state_that_moves(streaming: Streaming, parameter: nn.Parameter) -> list[Parked]:
    """What of the parameter's optimizer state leaves memory."""
    return [found for tensor in streaming.state_tensors(parameter) if (found := parked_of(tensor)) is not None]
