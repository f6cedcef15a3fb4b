"""A pytest plugin (``-p offloaded``): other projects' own tests, with everything they train offloaded.

Accelerators offload as in any script that :mod:`hf_offload.run` runs, by the variables of the settings, and so do those of
processes that tests start with accelerate's launcher (``HF_OFFLOAD_AUTOLOAD=1``). PEFT's tests train in loops of their own;
their models are attached to as soon as they are made. For each tensor that is packed, here or in a forked process, the file
``OFFLOAD_ACCEPTANCE_COUNT`` grows by one byte.
"""

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    from hf_offload.engine.hooks import Engine
    from hf_offload.engine.record import PackedView
    from hf_offload.run import switch_on
    from hf_offload.settings.environment import settings_with

    pack, count = Engine.pack, os.open(os.environ["OFFLOAD_ACCEPTANCE_COUNT"], os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def counted(engine, tensor):
        handle = pack(engine, tensor)
        if isinstance(handle, PackedView):
            os.write(count, b".")
        return handle

    Engine.pack = counted
    switch_on(settings_with({}, "The tests")[0])
    if os.environ.get("OFFLOAD_ACCEPTANCE_PEFT"):
        _attach_to_peft_models()


def _attach_to_peft_models() -> None:
    from peft import PeftModel

    from hf_offload import OffloadConfig, attach
    from hf_offload.settings.environment import settings_from

    make = PeftModel.__init__

    def attached(model, *args, **kwargs):
        make(model, *args, **kwargs)
        if not any(parameter.is_meta for parameter in model.parameters()):
            attach(model, OffloadConfig(**settings_from()))

    PeftModel.__init__ = attached
