"""Behaviours of the originals' tests that do not apply here, each with the reason.

Behaviours of Keras, tf-keras and DTensor that do apply are tested in `seeds/`, and
in the rooms of the functions: `place/`, `birth/`, `step/` and `checkpoint/`.
"""

# What their tests show that has no meaning here.
KERAS = {
    "initialize agrees on a seed": "Flax models are made from an explicit key",
    "classes of distributions": "there is a map and a mesh; a step is a function",
    "distribute_tensor by a Format": "a memory layout is not a layout over devices",
    "initializers with a `layout` argument": "jit lays out what they return",
    "data sets of tf.data and PyDataset": "it owns no data; rows come as arrays",
    "unknown batch size of a data set": "it owns no data; rows come as arrays",
    "names of variables": "a path is made of attributes; variables have no names",
    "an attribute with another name than its variable": "paths are attributes",
    "losses of regularizers after late creation": "Flax has none; a loss is a function",
    "a global seed that initializers need": "Flax models are made from an explicit key",
    "h5 files": "Flax has none; checkpoints are Orbax's",
    "keyword arguments `kernel_layout`": "rules, or the metadata of a variable",
    "the decorator for these arguments": "rules, or the metadata of a variable",
    "aggregated gradients of an optimizer": "a gradient in jit is summed already",
    "sparse gradients of an embedding": "gradients of JAX are dense",
    "names of slots": "optax's fields",
}

# What DTensor's own tests of Layout ask that has no meaning here, with the reason.
DTENSOR_LAYOUT = {
    "mesh is not a Mesh raises": "anything that DeviceMesh takes is a mesh",
    "from_device, from_single_device_mesh, is_single_device": (
        "an array on one device has a mesh of one device here, with axes"
    ),
    "to_parted, type": "for one of TensorFlow's own compilers; refused when read",
    "comparing with another type raises": "it is unequal, as everywhere in Python",
    "specs as a list only": "a tuple or a list, None or 'unsharded', several axes",
    "relayout, relayout_like, pack, unpack, call_with_layout": "tests of their own",
    "weight-update sharding": "rules for that: `layout_map.optimizer`",
}

# What DTensor's own tests of Mesh ask that has no meaning here, with the reason.
DTENSOR_MESH = {
    "shape() and size as methods": "properties, as in Keras; tuples, not lists",
    "mesh name": "a mesh has none; that of a text is read and not kept",
    "is_remote, min_global_device_id": "ids count from 0; local_device_ids() says it",
    "mesh[name] as MeshDimension": "dim_size(name) says it; meshes are not sequences",
    "one host CPU in many places": "a JAX device is in a mesh once",
    "from_device, single_device": "a mesh of one device has axes, as every JAX mesh",
    "comparing with another type raises": "it is unequal, as everywhere in Python",
    "device types that differ": "JAX refuses them when an array is made",
    "use_xla_spmd": "the compiler always partitions; the flag is read and not kept",
    "create_distributed_mesh": "jax.distributed.initialize, then any mesh",
}

# Of the original's tests of relayout, those that mean nothing here, and why.
DTENSOR_RELAYOUT = {
    "relayout in a graph without a mesh fails": (
        "JAX has no graphs apart from jit; a layout without a mesh is an error there "
        "as anywhere, see test_messages"
    ),
    "relayout_like across an init scope fails": "JAX has no init scopes",
    "weight-update sharding": "layout_map.optimizer does that, test_optimizer_state",
    "if and while in a graph": "jax.lax.cond; loops: test_like_in_a_loop_is_refused",
    "adding across meshes fails": "JAX's own error; no function of ours takes part",
    "replicated slice gradient": "JAX's own slicing and its gradient",
    "equivalent layouts": "TensorLayout.equivalent, see test_layout",
    "variable assign keeps its layout": (
        "a JAX array has no assign; nnx.Variables hold what they are given"
    ),
}

# Of the original's tests, those that mean nothing here, and why.
DTENSOR_PACK = {
    "pack and unpack inside a tf.function fail": "test_messages: traced values",
    "packing sparse tensors": "JAX has no sparse arrays on a mesh",
    ".numpy() of a sharded tensor is unsupported": "np.asarray gathers a JAX array",
}

# Of the original's tests, those that mean nothing here, and why.
DTENSOR_DEFAULT_MESH = {
    "operations on plain tensors run on the default mesh": (
        "what JAX itself makes goes where jax.set_mesh says"
    ),
    "default_mesh of a name in a tf.function": "JAX has no graphs apart from jit",
}
