"""torchft's own Manager, with its lighthouse: replicas that start different, or restart, end
equal.
"""

import json
import subprocess
import sys

_PROGRAM = """
import json, sys, threading
from datetime import timedelta
import torch
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.ddp import DistributedDataParallel
from torchft.optim import OptimizerWrapper
from ckptstore.core.ids import digest
from ckptstore.interop.torchft import StoreTransport
from ckptstore.state.tensors import memory_of

TIMEOUT = timedelta(seconds=60)
STEPS = 4
lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=100, quorum_tick_ms=20)
ended = threading.Barrier(2)
report = {}

def train(number):
    model = torch.nn.Linear(600, 600)
    torch.nn.init.constant_(model.weight, number)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def load(state):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    transport = StoreTransport(TIMEOUT)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        min_replica_size=2,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"replica_{number}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse.address(),
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        checkpoint_transport=transport,
    )
    replicated, step = DistributedDataParallel(manager, model), OptimizerWrapper(manager, optimizer)
    while manager.current_step() < STEPS:
        step.zero_grad()
        replicated(torch.ones(2, 600)).mean().backward()
        step.step()
    got = transport.received
    weight = digest(memory_of(model.weight.detach())).hex()
    report[number] = [weight, got.fetched_chunks if got else 0]
    ended.wait()
    manager.shutdown(wait=False)

threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
lighthouse.shutdown()
print(json.dumps(report))
"""


def test_a_replica_that_joins_a_manager_takes_the_others_state_through_the_transport() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (first, from_second), (second, from_first) = json.loads(done.stdout.splitlines()[-1]).values()
    assert first == second
    assert (from_second > 0) != (from_first > 0)  # one of them recovered from the other
