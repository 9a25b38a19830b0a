"""Load models from commits: transformers, diffusers and PEFT adapters (docs/serving.md).

    model = from_pretrained(store.checkout("best:eval_loss"))

Weights are mapped from the packs into memory, and no file is written for them. Only files without
tensors, such as `config.json`, are written for the libraries to read, into a temporary directory.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ckptstore.errors import InvalidInput, NotFound
from ckptstore.plugin.pointers import HOLLOW_POINTER, Pointer
from ckptstore.plugin.pointers import write_pointer as write_file
from ckptstore.plugin.snapshots import Snapshot, contents_of
from ckptstore.plugins.adopt.commit_files import CommitFiles
from ckptstore.plugins.adopt.manifest import MODEL
from ckptstore.plugins.adopt.materializing import is_adopted

CONFIG = "config.json"
ADAPTER = "adapter_config.json"

_COPY_BYTES = 16 << 20


def from_pretrained(
    snapshot: Snapshot,
    model_class: Any = None,
    *,
    config: Any = None,
    key: str | None = None,
    mmap: bool = True,
    **options: Any,
) -> Any:
    """The model of a commit, as `model_class.from_pretrained` makes it.

    Args:
        snapshot: A commit of a directory that was adopted, or of a state with the model's weights.
        model_class: A class of transformers, one of its `Auto` classes, or a model class of
            diffusers; default: the first of the configuration's `architectures`.
        config: The model's configuration, or a directory that has one; default: the commit's own
            `config.json`.
        key: The key with the weights; default: `model`, or the only key.
        mmap: Map weights instead of reading them. They are not verified then; with `False`, every
            byte is.
        options: As `from_pretrained` takes them: `dtype`, `device_map`, …

    Raises:
        InvalidInput: The commit has no configuration, or several keys and none is called `model`.
        NotFound: The commit has no such key.

    Example:
        >>> model = from_pretrained(store.checkout("best:eval_loss"), AutoModelForCausalLM)
    """
    state = snapshot.state_dict(_key_of(snapshot, key), mmap=mmap)
    with tempfile.TemporaryDirectory() as folder:
        write_configuration(snapshot, folder)
        place: Any = folder
        if isinstance(config, str | os.PathLike):
            place, config = config, None
        elif config is None and not Path(folder, CONFIG).exists():
            raise InvalidInput(
                f"commit {snapshot.id[:12]} has no {CONFIG}: give config=, the configuration of "
                "the model or a directory that has it"
            )
        if hasattr(model_class, "load_config"):
            return _of_diffusers(model_class, state, config or model_class.load_config(place))
        return _of_transformers(model_class, state, config, place, options)


def write_configuration(
    snapshot: Snapshot, directory: str | os.PathLike[str], *, pointer: bool = False
) -> list[str]:
    """Write the files of an adopted commit that have no tensors: configuration, tokenizer, code.

    `directory` is made if need be. With `pointer`, a pointer file of the commit goes there too, so
    that a loader finds the weights (docs/serving.md). Returns the names; none for a commit that was
    not adopted.
    """
    files = _files_of(snapshot)
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    names = []
    if is_adopted(contents_of(snapshot)):
        names = _copy(files, "", target, lambda name: not files.has_tensors(name))
    if pointer:
        url = contents_of(snapshot).reader.url
        write_file(target / HOLLOW_POINTER, Pointer(url, snapshot.id))
    return names


def adapters(snapshot: Snapshot) -> dict[str, str]:
    """The PEFT adapters of an adopted commit: their directories in it by name. The one in the
    directory itself is called `default`."""
    files = _files_of(snapshot)
    if not is_adopted(contents_of(snapshot)):
        return {}
    folders = (
        name.rpartition("/")[0] for name in _walk(files, "") if name.split("/")[-1] == ADAPTER
    )
    return {folder or "default": folder for folder in folders}


def load_adapter(
    model: Any, snapshot: Snapshot, name: str = "default", *, as_name: str = "", **options: Any
) -> Any:
    """Add an adapter of a commit to `model`, and return the `PeftModel`.

    Args:
        model: The base model, or a `PeftModel` that gets one more adapter.
        name: An adapter of `adapters(snapshot)`.
        as_name: What the model calls it; default: `name`.
        options: As `PeftModel.from_pretrained` takes them.

    Raises:
        NotFound: The commit has no such adapter.

    Example:
        >>> model = load_adapter(base, store.checkout("sft@latest"))
    """
    from peft import PeftModel

    found = adapters(snapshot)
    if name not in found:
        raise NotFound(
            f"commit {snapshot.id[:12]} has no adapter {name!r}; it has "
            f"{', '.join(sorted(found)) or 'none'}"
        )
    called = as_name or name.replace("/", "_").replace(".", "_")
    with tempfile.TemporaryDirectory() as folder:
        _copy(_files_of(snapshot), found[name], Path(folder), lambda each: True, deep=False)
        if isinstance(model, PeftModel):
            model.load_adapter(folder, called, **options)
            return model
        return PeftModel.from_pretrained(model, folder, adapter_name=called, **options)


def _key_of(snapshot: Snapshot, key: str | None) -> str:
    if key is not None:
        return key
    keys = snapshot.keys()
    tensors = [key for key in keys if snapshot.only([key]).leaves(f"{key}/*")]
    if MODEL in keys or len(tensors) != 1:
        if MODEL in keys:
            return MODEL
        raise InvalidInput(
            f"which key of commit {snapshot.id[:12]} has the weights? Give key=, one of "
            f"{', '.join(keys)}"
        )
    return tensors[0]


def _of_transformers(
    model_class: Any, state: Any, config: Any, folder: Any, options: dict[str, Any]
) -> Any:
    import transformers

    config = config or transformers.AutoConfig.from_pretrained(folder)
    named = getattr(config, "architectures", None) or []
    mapping = getattr(model_class, "_model_mapping", None)
    if mapping is not None:
        classes = mapping[type(config)]
        several = classes if isinstance(classes, list | tuple) else (classes,)
        model_class = next((each for each in several if each.__name__ in named), several[0])
    elif model_class is None:
        model_class = next((getattr(transformers, name, None) for name in named), None)
        if model_class is None:
            raise InvalidInput(
                f"transformers has no class for the architectures {named} of the configuration: "
                "give model_class"
            )
    model = model_class.from_pretrained(None, config=config, state_dict=state, **options)
    if model.can_generate() and Path(folder, "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model


def _of_diffusers(model_class: Any, state: Any, config: Any) -> Any:
    with torch.device("meta"):
        model = model_class.from_config(config)
    if any(buffer.is_meta for name, buffer in model.named_buffers() if name not in state):
        model = model_class.from_config(config)  # it computes what no checkpoint has
    model.load_state_dict(state, assign=True)
    return model.eval()


def _files_of(snapshot: Snapshot) -> CommitFiles:
    time_ns = int(snapshot.time.timestamp() * 1e9)
    return CommitFiles(contents_of(snapshot), snapshot.id, time_ns)


def _walk(files: CommitFiles, folder: str) -> list[str]:
    """The names of all files below a directory."""
    found = []
    for base in files.names(folder):
        name = f"{folder}/{base}" if folder else base
        found += _walk(files, name) if files.find(name).is_folder else [name]
    return found


def _copy(
    files: CommitFiles,
    folder: str,
    target: Path,
    wanted: Callable[[str], bool],
    *,
    deep: bool = True,
) -> list[str]:
    """Write the files below a directory that are wanted; returns their names there."""
    names = []
    prefix = f"{folder}/" if folder else ""
    for name in _walk(files, folder):
        below = name.removeprefix(prefix)
        if wanted(name) and (deep or "/" not in below):
            path = target / below
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb") as out:
                for start in range(0, files.find(name).size, _COPY_BYTES):
                    out.write(files.read(name, start, start + _COPY_BYTES))
            names.append(below)
    return names
