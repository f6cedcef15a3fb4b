"""The former home of :func:`hf_offload.measure_errors`, for one version."""
