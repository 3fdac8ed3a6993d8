"""Ways to compile and to call a model; each is a row of benchmarks/engines.py."""

import pytest
from selection import representatives

from benchmarks.setups import compilation
from benchmarks.setups.measurement import measured


@pytest.mark.parametrize("name", representatives(compilation.SETUPS, {"dynamic=True", "functional_call"}))
def test_everything_streams(name, interpreted):
    row = measured(compilation.SETUPS[name])
    assert row.error < 1e-12
    assert (row.layers, row.head, row.notes) == (True, True, ())
