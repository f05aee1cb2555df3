"""Every optimizer of the installed optax: its state has the right, stable sharding."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from optimizers import (
    AXES,
    TABLE,
    adam,
    arrays,
    check,
    rules,
)

import flax_layoutmap as flm
from flax_layoutmap._core.jax_internals import executables_of

# What optax is about to drop must work for as long as it is there.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:optax")


def test_the_table_has_the_optimizers_of_optax() -> None:
    assert len(TABLE) > 120
    assert {"adam", "adafactor", "partition", "contrib.muon", "lookahead"} <= {*TABLE}


@pytest.mark.parametrize("name", TABLE)
def test_every_dim_of_the_state_follows(name: str) -> None:
    case = TABLE[name]
    tx = case.make()
    params = jax.eval_shape(case.params, arrays())
    tree = {"params": params, "opt_state": jax.eval_shape(tx.init, params)}
    resolution = rules().resolve(tree, tx=tx)
    check(resolution, "opt_state/", case)


# One of each kind of state: moments, factors, other dims, parts of the parameters.
UPDATED = ("adamw", "adafactor", "sm3", "partition", "MultiSteps", "contrib.muon")


def update(tx: Any, params: Any, state: Any) -> tuple[Any, Any]:
    """One step of one optimizer."""
    slope = jax.tree.map(lambda leaf: leaf + leaf**3 - 1, params)
    updates, state = tx.update(slope, state, params)
    return optax.apply_updates(params, updates), state


def test_three_updates_agree_and_nothing_moves(mesh: flm.DeviceMesh) -> None:
    """Sharded against one device; several optimizers in one program: it is cheaper."""
    optimizers = {name: TABLE[name].make() for name in UPDATED}

    def begin(params: Any) -> Any:
        trees = {name: (params, tx.init(params)) for name, tx in optimizers.items()}
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, leaf.dtype), trees)

    def step(trees: Any) -> Any:
        traces.append(trees)
        return {n: update(tx, *trees[n]) for n, tx in optimizers.items()}

    traces: list[Any] = []
    # Updates of sm3 fail on scalars.
    given = {name: x for name, x in arrays().items() if name != "scale"}
    abstract = jax.eval_shape(begin, given)
    shardings = {}
    for name, tx in optimizers.items():
        params, state = abstract[name]
        tree = {"params": params, "opt_state": state}
        both = rules(mesh).shardings(tree, tx=tx)
        shardings[name] = both["params"], both["opt_state"]
    alone = jax.jit(begin)(given)
    sharded = jax.device_put(alone, shardings)
    reference = jax.jit(step)
    program: Any = jax.jit(
        step,
        in_shardings=(shardings,),
        out_shardings=shardings,
    )
    for _ in range(3):
        alone, sharded = reference(alone), program(sharded)
    assert len(traces) == 2 and executables_of(program) == 1
    for (path, leaf), expected, sharding in zip(
        jax.tree_util.tree_leaves_with_path(sharded),
        jax.tree.leaves(alone),
        jax.tree.leaves(shardings),
        strict=True,
    ):
        where = jax.tree_util.keystr(path)
        assert leaf.sharding == sharding, where
        np.testing.assert_allclose(leaf, expected, rtol=1e-4, atol=1e-5, err_msg=where)


class WithAverage(TrainState):
    """A TrainState that keeps an average of its parameters beside them."""

    ema_params: Any = None


def test_an_average_beside_the_parameters_lies_as_they_do() -> None:
    def begin(params: Any) -> WithAverage:
        return WithAverage.create(
            apply_fn=print, params=params, tx=adam(), ema_params=params
        )

    resolution = rules().resolve(jax.eval_shape(begin, arrays()))
    for name in set(AXES) - {"scale"}:
        average = resolution[f"ema_params/{name}"]
        assert average.layout == resolution[f"params/{name}"].layout
        moment = resolution[f"opt_state/0/mu/{name}"]
        assert moment.owner == name and moment.layout.axes == AXES[name]
