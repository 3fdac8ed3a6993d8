"""Sources of the model of a planned step: a configuration of Hugging Face, or a function of the user's.

Modules and inputs are created on the device ``meta``: they have shapes and no contents.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

Made = tuple[nn.Module, tuple, dict]  # a module and its arguments
HEADS = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM")  # in this order


@dataclass(frozen=True)
class PlannedModel:
    """A model to plan for.

    title      its name in tables
    make       (batch, tokens) → the module and its arguments, on ``meta``
    dtype      of its weights by default; None leaves them as they are
    positions  the longest sequence that its configuration states, if it states one
    fixed      its sequences have a length of their own
    """

    title: str
    make: Callable[[int, int], Made]
    dtype: torch.dtype | None = None
    positions: int | None = None
    fixed: bool = False


def source_of(text: str) -> PlannedModel:
    """Find the model that a text names. It is a file, a folder with ``config.json``, the name of a
    configuration class or model type of transformers, or ``module:function``. Raises ValueError where
    there is none."""
    path, (name, _, function) = Path(text), text.rpartition(":")
    if name and function.isidentifier() and not path.exists():
        return source_of_function(text, function_of(name, function))
    if path.exists():
        file = (path / "config.json" if path.is_dir() else path).resolve()
        return source_of_config(
            config_of_file(file), file.parent.name if file.stem == "config" else file.stem
        )
    if text.endswith(".json") or os.sep in text:
        raise ValueError(f"The file {text!r} does not exist. Name a config.json, or a folder that holds one.")
    return source_of_config(config_of_name(text), text)


# Hugging Face


def transformers() -> ModuleType:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise ValueError(
            "The package transformers is not installed, and a configuration of Hugging Face needs it. "
            "Install transformers, or name a function of your own as module:function."
        ) from None


def config_of_file(path: Path) -> object:
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"The file {str(path)!r} cannot be read as JSON ({error}).") from None
    if not isinstance(given, dict) or "model_type" not in given:
        raise ValueError(f"The file {str(path)!r} has no model_type. Give a config.json of Hugging Face.")
    return config_class(given["model_type"]).from_dict(given)


def config_of_name(name: str) -> object:
    """Create the default configuration of a class such as ``Qwen3Config``, or of a model type such as
    ``qwen3``."""
    library = transformers()
    if name.endswith("Config") and hasattr(library, name):
        return getattr(library, name)()
    return config_class(name)()


def config_class(model_type: str) -> type:
    known = transformers().CONFIG_MAPPING
    if model_type not in known:
        near = difflib.get_close_matches(model_type, list(known), n=3)
        guess = f"Did you mean {' or '.join(near)}?" if near else "A newer one may have it."
        raise ValueError(
            f"The installed transformers has no model type {model_type!r}. {guess} Give a config.json, a "
            "model type such as qwen3, or module:function."
        )
    return known[model_type]


def source_of_config(config, name: str) -> PlannedModel:
    text = config.get_text_config()
    title = f"{name} ({config.model_type})" if name != config.model_type else name
    positions = getattr(text, "max_position_embeddings", None)

    def make(batch: int, tokens: int) -> Made:
        ids = torch.empty((batch, tokens), dtype=torch.int64, device="meta")
        return model_of(config), (), dict(input_ids=ids, labels=ids)

    return PlannedModel(title, make, torch.bfloat16, positions)


def model_of(config) -> nn.Module:
    """Build the model with a language head that a configuration describes, for training."""
    library = transformers()
    config.use_cache = config.get_text_config().use_cache = False
    named = next((getattr(library, a, None) for a in getattr(config, "architectures", None) or ()), None)
    autos = [a for a in (getattr(library, h) for h in HEADS) if type(config) in a._model_mapping]
    if named is None and not autos:
        raise ValueError(
            f"Models of type {config.model_type!r} have no language head in transformers. Write a function "
            "that returns the module and its inputs, and name it as module:function."
        )
    build = named._from_config if named is not None else autos[0].from_config
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return build(config, attn_implementation="sdpa").train()
        except (ValueError, ImportError):  # it has no such attention
            return build(config, attn_implementation="eager").train()


# A function of the user's


def function_of(name: str, function: str) -> Callable:
    """Import ``function`` of a module, or of a Python file."""
    try:
        module = module_of_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
    except (ImportError, FileNotFoundError) as error:
        raise ValueError(
            f"The module {name!r} cannot be imported ({error}). Run the command in the folder that it is in."
        ) from None
    found = getattr(module, function, None)
    if not callable(found):
        raise ValueError(f"The module {name!r} has no function {function!r}.")
    return found


def module_of_file(path: Path) -> ModuleType:
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def source_of_function(title: str, function: Callable) -> PlannedModel:
    """Wrap a function that returns a module and its inputs; it may take ``batch`` and ``tokens``."""
    takes = inspect.signature(function).parameters

    def make(batch: int, tokens: int) -> Made:
        given = {k: v for k, v in dict(batch=batch, tokens=tokens).items() if k in takes}
        with torch.device("meta"):
            made = function(**given)
        if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module):
            raise ValueError(
                f"The function {title} must return a module and its inputs, and returned "
                f"{type(made).__name__}. Inputs are a tensor, a tuple, or a mapping of keyword arguments."
            )
        module, inputs = made
        if isinstance(inputs, Mapping):
            return module, (), dict(inputs)
        return module, inputs if isinstance(inputs, tuple) else (inputs,), {}

    return PlannedModel(title, make, fixed="tokens" not in takes)
