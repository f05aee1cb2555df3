"""Methods of classes that are replaced for a block."""

from collections.abc import Iterator
from typing import Any

import pytest

from flax_layoutmap._core import jax_internals as patches


@pytest.mark.parametrize("name", ["run", "stop"])
def test_a_block_may_end_while_another_begins_or_ends(name: str) -> None:
    """As the garbage collector ends blocks that an interrupt abandoned."""

    class Owner:
        def run(self) -> str:
            return "run"

        def stop(self) -> str:
            return "stop"

    def wrap(plain: Any) -> Any:
        abandoned.close()
        return lambda self: "wrapped"

    def block() -> Iterator[None]:
        with patches.patched(Owner, name, lambda plain: lambda self: "abandoned"):
            yield

    class Restores(type):
        def __setattr__(cls, key: str, value: Any) -> None:
            abandoned.close()
            super().__setattr__(key, value)

    class OnRestore(metaclass=Restores):
        run = Owner.run

    plain = dict(vars(Owner))
    abandoned: Any = block()
    next(abandoned)
    with patches.patched(Owner, "run", wrap):
        assert Owner().run() == "wrapped" and Owner().stop() == "stop"
    assert dict(vars(Owner)) == plain

    with patches.patched(OnRestore, "run", lambda plain: lambda self: "wrapped"):
        abandoned = block()
        next(abandoned)
    assert OnRestore().run() == "run" and dict(vars(Owner)) == plain
    assert not patches._PATCHED
