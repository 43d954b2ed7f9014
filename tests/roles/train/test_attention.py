"""How the responses to a shared prompt are laid out for attention, and their gradients' way back."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.engine


def test_responses_are_stacked_and_unstacked_with_the_gradients_of_plain_slices() -> None:
    from roles.train.attention import _places, _Stack, _Unstack

    lengths = [3, 1, 4]
    taken, place = _places(lengths, torch.device("cpu"))
    assert taken.tolist() == [0, 3, 4, 1, 3, 5, 2, 3, 6, 2, 3, 7]
    assert place.tolist() == [0, 3, 6, 1, 2, 5, 8, 11]

    packed = torch.randn(8, 1, 2, requires_grad=True)
    stacked = _Stack.apply(packed, taken, place)
    padded = torch.nn.utils.rnn.pad_sequence([part[:, 0] for part in torch.split(packed, lengths)])
    real = (torch.arange(4)[:, None] < torch.tensor(lengths)).view(-1)
    torch.testing.assert_close(stacked[real][:, 0], padded.view(12, 2)[real])
    weight = torch.randn(12, 1, 2) * real[:, None, None]
    (wanted,) = torch.autograd.grad((padded.view(12, 1, 2) * weight).sum(), packed, retain_graph=True)
    (found,) = torch.autograd.grad((stacked * weight).sum(), packed)
    torch.testing.assert_close(found, wanted)

    batch = torch.randn(12, 1, 2, requires_grad=True)
    weight = torch.randn(8, 1, 2)
    back = torch.cat([batch.view(4, 3, 1, 2)[:length, row] for row, length in enumerate(lengths)])
    torch.testing.assert_close(_Unstack.apply(batch, place), back)
    (wanted,) = torch.autograd.grad((back * weight).sum(), batch)
    (found,) = torch.autograd.grad((_Unstack.apply(batch, place) * weight).sum(), batch)
    torch.testing.assert_close(found, wanted)
