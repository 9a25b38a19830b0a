"""A training loop that can be stopped anywhere and started again: run it twice on the same folder
and it goes on where it was."""

import sys
import tempfile

import torch

import ckptstore

STEPS = 20


def train(place: str, stop_after: int = STEPS) -> float:
    """Train from wherever the store stands to step `stop_after`; the last loss."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    app_state = {
        "model": model,
        "optimizer": optimizer,
        "random": ckptstore.RNGState(),
        "progress": {"step": 0},
    }
    loss = torch.tensor(0.0)

    with ckptstore.open(place) as store:
        store.resume(app_state)
        print(f"starting at step {app_state['progress']['step']}")
        for step in range(app_state["progress"]["step"] + 1, stop_after + 1):
            x = torch.randn(64, 8)
            loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            app_state["progress"]["step"] = step
            snapshot = store.commit(app_state, step=step, metrics={"loss": loss.item()})
            print(f"step {step}: loss {loss.item():.3f}, commit {snapshot.id[:12]}")
    return loss.item()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            train(f"{folder}/interrupted", stop_after=STEPS // 2)
            interrupted = train(f"{folder}/interrupted")
            assert interrupted == train(f"{folder}/whole"), "the interruption changed the result"
