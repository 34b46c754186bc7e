"""Ray Serve's request router for us: a request goes to the replica that it names, or waits.

Which one that is, `Affinity` decides in the host, who names it as the request's session. Ray's
default router scatters a match over the replicas by their queues, and by prefix all that share a
system prompt go to one.
"""

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from serving import ray_presence

ROUTER_PATH = "serving.ray_router:NamedReplicaRouter"


class NamedReplicaRouter(RequestRouter):
    """Obeys `session_id`; a request without one goes to any. Made by Ray in the process that holds
    the deployment's handle."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._tell()

    def on_replica_actor_died(self, replica_id: Any) -> None:
        # seen by a request, some time before Ray's controller finds out
        super().on_replica_actor_died(replica_id)
        self._tell()

    def _tell(self) -> None:
        ray_presence.tell(frozenset(map(name_of, self.curr_replicas.values())))

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The replica that is named, alone; none while there is no such replica."""
        if pending_request is None:
            return []
        # else Ray asks again without a pause
        pending_request.routing_context.should_backoff = True
        wanted = pending_request.metadata.session_id
        if not wanted:
            return [candidate_replicas]
        return [[replica for replica in candidate_replicas if name_of(replica) == wanted]]


def name_of(replica: Any) -> str:
    """Of a replica: Ray's short unique id."""
    return str(replica.replica_id.unique_id)
