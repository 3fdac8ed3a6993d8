"""Which parameters of a sweep `make test` runs; `make test-all` runs the others as well."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable

import pytest


def representatives(
    names: Iterable[Hashable], chosen: Collection[Hashable], compiled: Collection[Hashable] = ()
) -> list:
    """One parameter for each name (or function): those that are not chosen are marked ``slow``.

    compiled  of the chosen ones, those whose bodies Inductor compiles
    """
    names = list(names)
    unknown = {*chosen, *compiled} - set(names)
    assert not unknown, f"no such parameter: {unknown}"
    return [
        pytest.param(
            name,
            marks=[pytest.mark.slow] * (name not in chosen) + [pytest.mark.inductor] * (name in compiled),
        )
        for name in names
    ]
