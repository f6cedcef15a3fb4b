import pytest
import torch

from hf_offload.storage.buffers import PAGE, empty_at_phase


@pytest.mark.parametrize(("nbytes", "attempts"), [(16 << 10, 1), (1 << 20, 2)])
def test_only_a_large_block_is_asked_for_in_the_hope_that_it_has_the_address(monkeypatch, nbytes, attempts):
    asked, empty = [], torch.empty
    anywhere = empty(nbytes + 2 * PAGE, dtype=torch.uint8)
    shift = (1 - anywhere.data_ptr()) % PAGE  # never at the phase that is wanted

    def allocate(size, **options):
        asked.append(size)
        return anywhere[shift : shift + size]

    monkeypatch.setattr(torch, "empty", allocate)
    buffer = empty_at_phase(nbytes, 64)
    assert buffer.data_ptr() % PAGE == 64
    assert len(asked) == attempts
    assert buffer.untyped_storage().nbytes() == nbytes
