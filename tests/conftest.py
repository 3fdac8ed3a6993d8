"""Every test starts from the same seed, on two threads, with nothing compiled before it."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def two_threads():
    torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def same_seed():
    torch.manual_seed(0)


@pytest.fixture
def fresh_dynamo():
    """Nothing compiled before; what is compiled here is forgotten after."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
