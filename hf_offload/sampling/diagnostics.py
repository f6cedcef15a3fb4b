"""The former home of :func:`hf_offload.measure_errors`, for one version."""

import warnings

from hf_offload.transforms.sampling.diagnostics import LayerError, measure_errors

__all__ = ["LayerError", "measure_errors"]

warnings.warn(
    "hf_offload.sampling.diagnostics has moved: use `from hf_offload import measure_errors`.",
    FutureWarning,
    stacklevel=2,
)
