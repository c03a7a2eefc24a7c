"""How many may be connected: who makes room for whom, and who is refused.

Decides by users, as the kernel names them. Refuses to know what anybody says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from prefetchd.sidecar.connection import Connection
from prefetchd.sidecar.greeting import ServerLimits


def make_room(
    connection: Connection, connections: Collection[Connection], limits: ServerLimits
) -> None:
    """Who has said nothing yet makes room for who comes after him."""
    uid = connection.peer.uid
    users = Counter(other.peer.uid for other in connections)
    if len(connections) > limits.clients or users[uid] > limits.clients_per_uid:
        for other in [one for one in connections if one.silent]:
            if other is not connection and other.peer.uid == uid:
                other.end("it says nothing, and others want in")
        users = Counter(other.peer.uid for other in connections)
    if len(connections) > limits.clients:
        connection.refuse("limit", f"{limits.clients} clients are connected, the most")
    elif users[uid] > limits.clients_per_uid:
        most = limits.clients_per_uid
        connection.refuse("limit", f"{most} clients of uid {uid} are connected, the most")
