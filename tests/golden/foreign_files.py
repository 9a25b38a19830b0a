"""Writes `tests/golden/foreign`: files of libraries that the tests do not install.

`python -m tests.golden.foreign_files`, with jax 0.10.2, orbax-checkpoint 0.12.8, tensorstore
0.1.86, h5py 3.16.0, keras 3.15.1, onnx 1.23.2 and torch 2.13.0. The tests know the weights by
`weights`, not by what stands in the files.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

PLACE = Path(__file__).parent / "foreign"
LAYERS = 8


def weights(step: int) -> dict[str, np.ndarray[Any, Any]]:
    """Weights of which only the last layer depends on the step."""
    found: dict[str, np.ndarray[Any, Any]] = {}
    for i in range(LAYERS):
        seed = i if i < LAYERS - 1 else 100 + step
        found[f"layer{i}.kernel"] = np.random.default_rng(seed).normal(size=(20, 16)).astype("f4")
    found["count"] = np.arange(9)
    found["half"] = np.linspace(-2, 2, 700).astype(np.float16)
    return found


def _orbax(root: Path) -> None:
    import orbax.checkpoint as ocp

    for step in range(2):
        nested: dict[str, Any] = {}
        for name, value in weights(step).items():
            *above, last = name.split(".")
            at = nested
            for part in above:
                at = at.setdefault(part, {})
            at[last] = value
        saver = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
        saver.save((root / f"orbax-{step}").absolute(), nested)
        saver.close()


def _hdf5(root: Path) -> None:
    import h5py

    with h5py.File(root / "earliest.h5", "w", libver="earliest") as file:
        for name, value in weights(0).items():
            file[name.replace(".", "/")] = value
        for i in range(20):  # more names than a leaf of the tree of a group has
            file[f"many/{i}"] = np.full(3, i, np.int16)
        _odd(file)
        file["odd/around"] = file["/"]
    with h5py.File(root / "latest.h5", "w", libver="latest") as file:
        for name, value in list(weights(0).items())[:4]:
            file[name.replace(".", "/")] = value
        _odd(file)
        file["odd/elsewhere"] = h5py.ExternalLink("other.h5", "/x")
        for i in range(20):  # more than a group of the new kind has in its header
            file[f"many/{i}"] = np.full(3, i, np.int16)


def _odd(file: Any) -> None:
    import h5py

    file["mask"] = np.array([True, False, True])
    file["odd/scalar"] = np.float64(2.5)
    file["odd/unsigned"] = np.arange(5, dtype=np.uint8)
    file["odd/big_endian"] = np.arange(5, dtype=">f4")
    file["odd/text"] = "not a tensor"
    file["odd/nothing"] = np.empty((0, 3))
    file["soft"] = h5py.SoftLink("/mask")
    file.create_dataset("odd/chunked", data=np.zeros((9, 9)), chunks=(3, 3))
    file["odd"].attrs["made_by"] = "h5py"


def _keras(root: Path) -> None:
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    layers = [keras.layers.Dense(16, name=f"d{i}") for i in range(2)]
    model = keras.Sequential([keras.layers.Input((16,)), *layers])
    model.set_weights([_square(i, shape) for i, shape in enumerate([(16, 16), (16,)] * 2)])
    model.save(root / "model.keras")


def _square(seed: int, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(size=shape).astype("f4")


def _onnx(root: Path) -> None:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(16, 40), torch.nn.Linear(40, 16)).eval()
    for i, parameter in enumerate(model.parameters()):
        parameter.data = torch.from_numpy(_square(i, tuple(parameter.shape)))
    for name, external in (("inline", False), ("external", True)):
        (root / name).mkdir()
        torch.onnx.export(
            model,
            (torch.zeros(1, 16),),
            str(root / name / "model.onnx"),
            external_data=external,
            dynamo=True,
        )


if __name__ == "__main__":
    shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir()
    for make in (_orbax, _hdf5, _keras, _onnx):
        make(PLACE)
