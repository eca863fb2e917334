"""Where arrays lie on a mesh whose axes are explicit, as JAX's are unless told otherwise.

There every operation on sharded arrays must know where its result shall be, and most of those inside an engine have
nothing to say about it. So a whole computation says it of its results, and the compiler decides on what is between.
"""

from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, auto_axes


def axes(x):
    """For each axis of an array what it is sharded over, as in a PartitionSpec."""
    return tuple(jax.typeof(x).sharding.spec) or (None,) * x.ndim


def placed(f, args, over):
    """f(*args), with the first axes of all results sharded over `over`, where the mesh has explicit axes.

    What an earlier axis is sharded over, a later one is not.
    """
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(args)]
    mesh = next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)
    if mesh is None:
        return f(*args)
    explicit = tuple(a for a, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit)
    spec, taken = [], set()
    for names in over:
        own = set(names) if isinstance(names, tuple) else {names} - {None}
        spec.append(None if own & taken else names)
        taken |= own
    run: Any = auto_axes(f, axes=explicit, out_sharding=NamedSharding(mesh, PartitionSpec(*spec)))
    return run(*args)
