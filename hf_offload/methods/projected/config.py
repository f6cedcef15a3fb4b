"""Settings of GaLore, APOLLO and FRUGAL: one frozen dataclass each, whose errors are raised together."""

import dataclasses
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.classes import settings
from hf_offload.settings.values import Flag, Number, Whole, one_of

PROJ_TYPES = ("std", "reverse_std", "left", "right", "full")
SVDS = ("randomized", "exact")
ON_REFRESH = ("keep", "reset")
# Not float16: squares of small gradients are zero in it.
DTYPES = ("float32", "bfloat16", "8bit")
FRUGAL_PROJECTIONS = ("blocks", "random", "svd")
# bitsandbytes knows no others.
BLOCK_SIZES = (64, 128, 256, 512, 1024, 2048, 4096)


@settings(frozen=True, kw_only=True)
class ProjectedConfig:
    """What all methods share.

    Args:
        update_proj_gap: A parameter gets a new projection every so many of its steps.
        stagger: Parameters get it at different steps, spread evenly over the gap, so that no step but the first pays for all.
            Without it all get it at once, as in the published code.
        on_refresh: What becomes of the moments then. ``"keep"``: nothing, as published: they are read in the new space
            although they were gathered in the old one. ``"reset"``: they start from zero, and so does their bias correction.
        seed: Of every random draw, together with the parameter's place and its step: the same on every rank, and after
            a resume. CPU and CUDA draw different numbers.
        state_dtype: Of the moments of projected parameters: None is the parameter's own, as in ``torch.optim.AdamW``.
            ``"8bit"`` needs bitsandbytes. The arithmetic is done in float32 (float64 for float64 parameters). A second
            moment in bfloat16 or 8 bits hardly follows small changes, since one part in a thousand is rounded away.
        plain_state_dtype: Of the moments of all other parameters but vectors, likewise; vectors keep their own dtype.
        projector_dtype: Of a stored projection, likewise.
        block_size: How many numbers share one scale in 8 bits.
    """

    name: ClassVar[str] = ""

    update_proj_gap: Annotated[Whole, Field(ge=1)] = 200
    stagger: Flag = True
    on_refresh: Annotated[str, one_of(ON_REFRESH)] = "keep"
    seed: Annotated[Whole, Field(ge=0)] = 0
    state_dtype: Annotated[str | None, one_of(DTYPES)] = None
    plain_state_dtype: Annotated[str | None, one_of(DTYPES)] = None
    projector_dtype: Annotated[str | None, one_of(DTYPES)] = None
    block_size: Annotated[int, one_of(BLOCK_SIZES)] = 256

    def as_dict(self) -> dict[str, Any]:
        """Name and settings as plain values: what a state dict holds, so that a wrong one is refused."""
        return {"name": self.name, **dataclasses.asdict(self)}


@settings(frozen=True, kw_only=True)
class GaLoreConfig(ProjectedConfig):
    """Adam on the gradient's part in the space of its leading singular vectors (Zhao et al., ICML 2024, arXiv 2403.03507).

    Args:
        rank: Of the projected gradient. The paper: a quarter of the hidden size, 512 for LLaMA-1B, 1024 for 7B.
        scale: The step is multiplied by it.
        proj_type: Which side of the gradient ``[out, in]`` is projected. ``"std"``: the shorter one. ``"reverse_std"``: the
            longer one. ``"left"``: outputs. ``"right"``: inputs. ``"full"``: both (all but the diagonal of the first
            gradient in a new space is then rounding error, which Adam makes as large as the rest). A weight that is stored
            ``[in, out]`` (GPT-2's ``Conv1D``) is turned round first, so the words mean the same for it.
        svd: ``"randomized"`` (two power iterations, 8 vectors more than asked for) or ``"exact"``.
    """

    name: ClassVar[str] = "galore"

    rank: Annotated[Whole, Field(ge=1)] = 128
    scale: Annotated[Number, Field(ge=0)] = 0.25
    proj_type: Annotated[str, one_of(PROJ_TYPES)] = "std"
    svd: Annotated[str, one_of(SVDS)] = "randomized"


@settings(frozen=True, kw_only=True)
class ApolloConfig(ProjectedConfig):
    """The gradient itself, each channel as long as Adam would make it in a small random space (Zhu et al., MLSys 2025,
    arXiv 2412.05270): no SVD, and of the projection only the seed is kept.

    The space is a Gaussian one over the shorter side; channels lie along the longer one.

    Args:
        rank: Of the projected gradient.
        scale: The step is multiplied by it. (The published code takes the root of its ``scale``: its 128 is 128**0.5 here.)
        scale_by: ``"channel"``: ``||m/sqrt(v)|| / ||R||`` of each channel, ``R`` the projected gradient; ``"tensor"``: of the
            whole.
        norm_growth_limit: The norm of a parameter's step (before bias correction and learning rate, as published) grows at
            most by this factor from one step to the next; None: without a limit.
    """

    name: ClassVar[str] = "apollo"

    rank: Annotated[Whole, Field(ge=1)] = 256
    scale: Annotated[Number, Field(ge=0)] = 1.0
    scale_by: Annotated[str, one_of(("channel", "tensor"))] = "channel"
    norm_growth_limit: Annotated[Number | None, Field(ge=1)] = 1.01


@settings(frozen=True, kw_only=True)
class FrugalConfig(ProjectedConfig):
    """Adam on a part of the gradient, and a step without state on the rest (Zmushko et al., ICML 2025, arXiv 2411.07837).

    Args:
        density: How large the part is, 0 to 1: of the rank (``svd``, ``random``), or of the matrices. 0 is the rule without
            state alone.
        projection: ``"blocks"``: whole matrices, a new set in each period of ``update_proj_gap`` steps until all
            had their turn (these all change at the same step, whatever ``stagger`` is: there is nothing to compute).
            ``"random"``: a random orthonormal basis of the shorter side. ``"svd"``: as GaLore.
        free_rule: ``"sign"``: the sign of the rest of the gradient; ``"sgd"``: the rest itself. (A gradient that lies in the
            space of its singular vectors, as with fewer tokens than the rank, leaves rounding errors. They have signs.)
        free_scale: The learning rate of the rest is the usual one times this.
        svd: As in :class:`GaLoreConfig`.
    """

    name: ClassVar[str] = "frugal"

    on_refresh: Annotated[str, one_of(ON_REFRESH)] = "reset"
    density: Annotated[Number, Field(ge=0, le=1)] = 0.25
    projection: Annotated[str, one_of(FRUGAL_PROJECTIONS)] = "blocks"
    free_rule: Annotated[str, one_of(("sign", "sgd"))] = "sign"
    free_scale: Annotated[Number, Field(ge=0)] = 1.0
    svd: Annotated[str, one_of(SVDS)] = "randomized"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.on_refresh != "reset" and self.projection == "blocks":
            raise OffloadConfigError(
                f"on_refresh={self.on_refresh!r} has no meaning with projection='blocks': matrices take their moments with "
                "them. Set 'reset'."
            )
        return self
