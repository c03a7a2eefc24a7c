"""The tables of the daemon's configuration, and an example of them with all that can be said.

Decides the names and what is meant where nothing is said. Refuses to know what the values mean.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from prefetchd.options import DEPTH_MAX

_Some = Annotated[int, Meta(ge=1, le=1 << 20)]

EXAMPLE = """\
# prefetchd serve --config prefetchd.toml

[daemon]
socket = "/run/prefetchd/prefetchd.sock"
socket_mode = "0660"          # who may connect at all; namespaces say who may use what
# clients = 256               # connected at once
# clients_per_uid = 128
# write_bytes = "64MiB"       # the largest write arena of one client
# memory = "64GiB"            # of staging of all namespaces together; else 80 % of the machine's
# http = "127.0.0.1:9464"     # metrics, health and a page; or unix:PATH

# Namespaces that a client of the daemon's own user may have made, by naming them.
[made]
enabled = false
# folder = "/nvme/prefetchd"
# namespaces = 64             # at most, the configured ones included
# bytes = "64GiB"             # payload of one, at most
# staging = "1GiB"            # of one, at most
# gpu = "cuda"                # as of a namespace

[namespaces.chat]
store = "/nvme/chat"          # a folder, of this namespace only
model = "llama-3-8b"          # or layers = 32 and page_bytes = "64KiB"
blocks = 100000               # both of a store that is to be made
staging = "4GiB"
users = []                    # names or numbers; without users and groups: the daemon's own user
groups = []
# token = "..."               # what a client has to know besides
# predictor = "auto"
# evict = "cycle"
# device = "uring"
# gpu = "cuda"                # the daemon pushes into its clients' GPU buffers; "host": it does not
# quota = "100GiB"
# key_file = "/etc/prefetchd/chat.key"   # encrypted; made with the store
# weight = 1                  # its share of thread and drives while others want them, 1 to 1000
# salt = "..."                # a secret: its keys on the medium cannot be computed without it
# erase_users = []            # who may erase it besides the daemon's own user and root
# drain = ["/nvme2/chat"]     # paths of the store to be emptied; SIGHUP begins it
# detach = ["/nvme2/chat"]    # empty ones that are not to be used any more
# replace = { "/nvme2/chat" = "/nvme3/chat" }   # another drive in the place of an empty one
"""


class Daemon(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    socket: str = ""
    socket_mode: str = "0600"
    clients: _Some = 256
    clients_per_uid: _Some = 128
    write_bytes: str = "64MiB"
    memory: str = ""
    http: str = ""


class Made(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What clients of the daemon's own user may have made."""

    enabled: bool = False
    folder: str = ""
    namespaces: _Some = 64
    bytes: str = "64GiB"
    staging: str = "1GiB"
    gpu: str = "host"


class Space(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A namespace."""

    store: str
    model: str = ""
    dtype: str = ""
    layers: int = 0
    page_bytes: str = ""
    blocks: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    fill: bool = True
    staging: str = ""
    users: list[str | int] = []
    groups: list[str | int] = []
    token: str = ""
    predictor: str = "auto"
    evict: str = "cycle"
    device: str = "uring"
    gpu: str = "host"
    depth: Annotated[int, Meta(le=DEPTH_MAX)] = 128
    quota: str = ""
    cap: str = ""
    floor: str = "0"
    ttl_s: float | None = None
    key_file: str = ""
    admission: str = "all"
    demand_timeout_s: float = 10.0
    weight: int = 1
    salt: str = ""
    erase_users: list[str | int] = []
    drain: list[str] = []
    detach: list[str] = []
    replace: dict[str, str] = {}


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    daemon: Daemon = Daemon()
    made: Made = Made()
    namespaces: dict[str, Space] = {}
