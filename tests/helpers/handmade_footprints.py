"""Footprints made by hand, whose step can be worked out on paper."""

from hf_offload.plan.footprint import BlockSpan, Footprint, Saved, Segment

MB = 10**6


def footprint_of(sizes, seconds, live, *, boundary=1 * MB, base=100 * MB, blocks=True):
    """One unit a block: forward in order, backward in reverse, each saving one tensor that its own backward needs."""
    count = len(sizes)
    names = [f"layers.{index}" for index in range(count)]
    segments = [Segment(name, False, live[i], 0, seconds[i]) for i, name in enumerate(names)]
    segments += [Segment(names[i], True, live[i], 0, 2 * seconds[i]) for i in reversed(range(count))]
    saved = [Saved(name, sizes[i], i + 1, i + 1, 2 * count - 1 - i, 2 * count - i) for i, name in enumerate(names)]
    spans = [BlockSpan(name, boundary, (i, i + 1), 2 * count - 1 - i) for i, name in enumerate(names)] if blocks else []
    return Footprint(
        segments=tuple(segments),
        saved=tuple(saved),
        blocks=tuple(spans),
        units={name: name if blocks else None for name in names},
        classes=dict.fromkeys(names, "Block"),
        parameters=0,
        base_bytes=base,
        gradient_bytes=0,
        optimizer_step_bytes=0,
        optimizer_step_s=0.0,
        source="counted",
    )
