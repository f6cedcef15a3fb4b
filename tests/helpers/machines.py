"""Machines whose speed is given."""

from hf_offload.plan.hardware import Hardware, Measurement


def machine(bytes_per_s: float) -> Hardware:
    """One whose drive moves so many bytes a second."""
    given = {name: Measurement(1e11, "given") for name in ("float32", "bfloat16", "float16")}
    rate = {"ssd": Measurement(bytes_per_s, "given")}
    memory, copies = Measurement(4e9, "given"), Measurement(1e10, "given")
    return Hardware("a test", "cpu", memory, given, copies, rate, rate, {"ssd": Measurement(1e10, "given")})
