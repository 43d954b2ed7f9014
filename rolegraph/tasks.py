"""Ray tasks of the driver: they read and write the files of its node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rolegraph.batch import Batch


def on_this_node(function: Any, **options: Any) -> Any:
    """`function` as a Ray task on the node of this process.

    No CPU is asked for: the roles' placement groups may hold all of them, and the task would wait for ever.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(function).options(num_cpus=0, scheduling_strategy=here, **options)


def sent(shards: Iterable[Batch]) -> Iterator[Any]:
    """What a streaming task yields of each shard: its light part and its heavy columns, objects that outlive the task.

    A generator, so that a task can delegate to it: Ray resumes it with `send`, which the iterator of a tuple lacks.
    """
    for shard in shards:
        light, heavy = shard.to_parts()
        yield light
        yield heavy


def received(stream: Any) -> Batch:
    """The shards that a task yields by `sent`, the heavy columns left in the object store; its errors are raised."""
    import ray

    shards: list[Batch] = []
    while (light := next(stream, None)) is not None:
        shards.append(Batch.from_parts(ray.get(light), next(stream)))
    return Batch.concat(shards)
