"""The way of a call that looks like an earlier one to its program.

What a route does not look at (the leaves of a pure tree, the values of Variables), the
program itself does when JAX traces it for them: it then raises, and the call goes the
long way.
"""

import collections
import functools
import itertools
import operator
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
from flax import nnx

from flax_layoutmap._place.place import put
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._step.arguments import Slot
from flax_layoutmap._step.inputs import buffers_of
from flax_layoutmap._step.program import OtherArgumentsError, Program
from flax_layoutmap._tree.flax_internals import can_write, read_value, write_value
from flax_layoutmap._tree.graph import drain
from flax_layoutmap._tree.watch import Watch

# Routes of which one knows what the others have left.
STATES = 8


class Fetch(NamedTuple):
    """Where a pure tree is found in a call, and where its leaves are put.

    Attributes:
        at: position, or name.
        shardings: one per leaf, None for leaves that stay; None if all do.
    """

    at: int | str
    shardings: tuple[Any, ...] | None

    def tree(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The tree, placed."""
        tree = args[self.at] if isinstance(self.at, int) else kwargs[self.at]
        if self.shardings is None:
            return tree
        leaves, treedef = jax.tree.flatten(tree)
        placed = [
            leaf if sharding is None else put(leaf, sharding)
            for leaf, sharding in zip(leaves, self.shardings, strict=True)
        ]
        return jax.tree.unflatten(treedef, placed)


class Left:
    """Which values the last call of a route left in the Variables, by their ids.

    What a program has written shares memory with nothing; what is kept was compared
    once, where the route donates. So none of them has to be looked at again, whichever
    of the last few routes it was.
    """

    _recent: ClassVar[tuple["weakref.ref[Left]", ...]] = ()

    def __init__(self, donates: int) -> None:
        """Begins with none.

        Args:
            donates: how many values, the first ones, the route donates.
        """
        self.donates = donates
        self.ids: list[int] = []
        self.written: list[int] = []
        self._ref: weakref.ref[Left] = weakref.ref(self)

    def has(self, ids: list[int]) -> bool:
        """Whether values are known."""
        if ids == self.ids:
            return True
        recent = [left for ref in Left._recent if (left := ref()) is not None]
        # Among what is kept there may be arrays that share memory.
        if any(left.donates == self.donates and ids == left.ids for left in recent):
            return True
        count = self.donates
        own = set(ids)
        written = {at for left in recent for at in left.written}
        return (
            len(own) == len(ids)
            and own.issubset(written.union(self.ids))
            and written.union(self.ids[:count]).issuperset(ids[:count])
        )

    def note(self, ids: list[int], written: list[int]) -> None:
        """Notes what a call has left, and what of it its program has written."""
        self.ids, self.written = ids, written
        recent = Left._recent
        if not recent or recent[0] is not self._ref:
            others = [ref for ref in recent if ref is not self._ref]
            Left._recent = (self._ref, *others[: STATES - 1])


class Route:
    """The way of one kind of call to its program."""

    def __init__(
        self,
        program: Program,
        rules: RuleSet | None,
        watch: Watch,
        variables: Mapping[int, nnx.Variable[Any]],
        fetches: Mapping[Slot, Fetch],
        mesh: Any,
    ) -> None:
        """Keeps what a call needs.

        Args:
            program: the program.
            rules: the rule set, which the key holds by identity.
            watch: tells whether the objects are still the same.
            variables: position, over all leaves → the Variable.
            fetches: where the pure trees are.
            mesh: the abstract mesh that the program needs as context, or None.
        """
        self.program, self.rules, self.watch = program, rules, watch
        self.mesh = mesh
        positions = (*program.donated, *program.kept)
        self.variables = [variables[at] for at in positions]
        self.wanted = [program.wanted[at] for at in positions]
        self.changed = [variables[at] for at in program.changed]
        self.given = [(fetches[tree.slot], tree.treedef) for tree in program.given]
        self.rest = [fetches[tree.slot] for tree in program.rest]
        self.rest_is_flat = all(map(_is_leaf, (tree.treedef for tree in program.rest)))
        self.left = Left(len(program.donated))
        self.written = len(self.changed)
        first = self.variables[: self.written]
        self.writes_first = all(map(operator.is_, self.changed, first))
        self.hits = self.misses = 0

    def fits(self, roots: Sequence[Any]) -> bool:
        """Whether the objects of a call are those of this route."""
        if not roots:
            return True
        if not self.watch.fits(roots):
            return False
        variables = self.watch.variables
        return not variables or can_write(variables[0])

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
        """Runs the program and writes back.

        Returns:
            Whether it ran, and the function's result. If not, nothing has happened.
        """
        inputs = self._inputs(args, kwargs)
        if inputs is None:
            return False, None
        outputs: dict[int, list[Any]] = {}
        try:
            if self.mesh is None:
                result = self._run(inputs, outputs)
            else:
                with jax.sharding.use_abstract_mesh(self.mesh):
                    result = self._run(inputs, outputs)
        except OtherArgumentsError:
            return False, None  # other shapes
        except (RuntimeError, TypeError, ValueError) as error:
            # Either the arguments were refused, or the program failed while it ran.
            if isinstance(error, jax.errors.JaxRuntimeError):
                raise
            if self._are_as_wanted(inputs):
                raise
            return False, None
        if self.variables:
            written = list(map(id, outputs[0][:-1])) if self.changed else []
            if self.writes_first:
                self.left.note([*written, *self.left.ids[self.written :]], written)
            else:
                self.left.note(list(map(id, map(read_value, self.variables))), written)
        self.hits += 1
        return True, result

    def _run(self, inputs: Any, outputs: dict[int, list[Any]]) -> Any:
        """The function's result; what the program gave is kept in `outputs`.

        One expression in C runs the step and writes every value back: an interrupt
        comes between two steps of Python, so it cannot fall in between.
        """
        if not self.changed:
            return self.program.jitted(*inputs)[-1]
        results = itertools.chain.from_iterable(
            map(
                functools.partial(outputs.setdefault, 0),
                itertools.starmap(self.program.jitted, (inputs,)),
            )
        )
        drain(map(write_value, self.changed, results))
        return next(results)

    def _inputs(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...] | None:
        """The inputs of the program; None if they are not as it wants them.

        An array that was given away, or one that is donated and comes twice, may be the
        end of the process (jax 0.10, several devices). JAX refuses other layouts.
        """
        given: list[Any] = []
        for fetch, treedef in self.given:
            leaves, own = jax.tree.flatten(fetch.tree(args, kwargs))
            if own != treedef:
                return None
            given.append(leaves)
        rest = tuple([fetch.tree(args, kwargs) for fetch in self.rest])
        donated: list[Any] = []
        kept: list[Any] = []
        ids: list[int] = []
        if self.variables:
            values = list(map(read_value, self.variables))
            if are_deleted(values):
                return None
            count = len(self.program.donated)
            donated, kept = values[:count], values[count:]
            ids = list(map(id, values))
            if ids != self.left.ids:
                # Somebody else has put values there.
                if not self.left.has(ids):
                    if not all(map(_is_placed, values, self.wanted)):
                        return None
                    if donated and not are_apart(values, count):
                        return None
                self.left.ids = ids
        if given or donated:
            pure = list(itertools.chain.from_iterable(given))
            others = self._leaves(rest)
            if are_deleted(pure) or are_deleted(others):
                return None
            if pure:
                own = list(map(id, pure))
                own_ids = set(own)
                if len(own_ids) < len(own) or not own_ids.isdisjoint(ids):
                    return None
                ids = own + ids
            if not set(map(id, others)).isdisjoint(ids):
                return None
        return donated, kept, given, rest

    def _leaves(self, rest: tuple[Any, ...]) -> Sequence[Any]:
        """The leaves of the other trees; most data is a single array."""
        return rest if self.rest_is_flat else jax.tree.leaves(rest)

    def _are_as_wanted(self, inputs: tuple[Any, ...]) -> bool:
        """Whether inputs have the structures and layouts of the program."""
        donated, kept, given, rest = inputs
        if not all(map(_is_placed, (*donated, *kept), self.wanted)):
            return False
        program = self.program
        leaves = [leaf for own in given for leaf in own]
        positions = [at for tree in program.given for at in tree.positions]
        for place, tree in zip(program.rest, rest, strict=True):
            own, treedef = jax.tree.flatten(tree)
            if treedef != place.treedef:
                return False
            leaves += own
            positions += place.positions
        for at, leaf in zip(positions, leaves, strict=True):
            wanted = program.wanted[at]
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                # Before the call: what it gave away itself is to be told as lost.
                return are_deleted([leaf for own in given for leaf in own])
            if wanted is not None and getattr(leaf, "sharding", None) != wanted:
                return False
        return True


def _is_leaf(treedef: Any) -> bool:
    """Whether a tree is a single leaf, as every tree of that type is then."""
    return jax.tree_util.treedef_is_leaf(treedef)


def are_deleted(leaves: Sequence[Any]) -> bool:
    """Whether one of these is a deleted array."""
    if not leaves:
        return False
    try:
        # The method of the type: far less work than one attribute after the other.
        return any(map(type(leaves[0]).is_deleted, leaves))
    except (AttributeError, TypeError):  # other things among them
        return any(isinstance(x, jax.Array) and x.is_deleted() for x in leaves)


def are_apart(values: Sequence[Any], count: int) -> bool:
    """Whether the first of these arrays share no memory with others of them."""
    seen = collections.Counter(part for value in values for part in buffers_of(value))
    return all(seen[part] == 1 for v in values[:count] for part in buffers_of(v))


def _is_placed(value: Any, wanted: Any) -> bool:
    """Whether it is an array that lies where it should, or has been given away."""
    if not isinstance(value, jax.Array):
        return False
    if wanted is None or value.is_deleted():
        return True
    return value.committed and value.sharding == wanted
