"""Hosts that have joined, each a directory with an agent of this process."""

from contextlib import ExitStack
from pathlib import Path

from ckptstore.distributed.addresses import listen
from ckptstore.interop.torchft.invitation import Invitation
from ckptstore.plugins.hosts.agent import AgentServer
from ckptstore.plugins.hosts.members import Members, write_members


class Joined:
    """Three hosts, each a directory with an agent of this process."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.roots = [folder / f"host-{i}" for i in range(3)]
        self.servers = []
        for root in self.roots:
            root.mkdir(exist_ok=True)
            agent = Invitation(f"instance-{root.name}", f"token-{root.name}", ())
            server = AgentServer(root, listen(), agent)
            stack.callback(server.close)
            self.servers.append(server)
        self.join("job-1")

    def join(self, job: str, *, but: int | None = None) -> None:
        agents = tuple(
            Invitation(server.instance, f"token-{root.name}", (("127.0.0.1", server.port),))
            for server, root in zip(self.servers, self.roots, strict=True)
        )
        names = tuple(root.name for root in self.roots)
        for me, root in enumerate(self.roots):
            if me != but:
                takers = ((me + 1) % 3,)
                write_members(root, Members(job, me, names, agents, takers, (job,), joined=True))

    def put(self, host: int, key: str, data: bytes) -> None:
        """As if a writer had died before it came to the next host."""
        path = self.roots[host] / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def damage(self, host: int, key: str) -> None:
        path = self.roots[host] / key
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    def files(self, key: str) -> list[bool]:
        return [(root / key).is_file() for root in self.roots]
