"""Weights on disk: one safetensors file of bf16 tensors, named as in `model.parameter_shapes`.

Its metadata names the configuration; the digest of the file is the weights revision that belongs in every cache key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from duokv.engine.config import ModelConfig, parameter_shapes
from duokv.engine.model import Model
from duokv.kernels.reference import rope_table
from duokv.kvstore.errors import UsageError

ASSETS = Path(str(resources.files("duokv.engine"))) / "assets"
"""What ships with the package: the small model, what it was trained on, and a slice of what it was not."""
TINY_WEIGHTS = ASSETS / "tiny.safetensors"


def save_weights(path: Path, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
    """Write weights as bf16, replacing `path` at once."""
    stored = {name: weights[name].detach().to(torch.bfloat16).contiguous() for name in parameter_shapes(config)}
    part = path.with_suffix(".part")
    save_file(stored, part, metadata={"model": config.name})
    part.chmod(0o644)  # the library leaves it to its owner alone
    part.replace(path)


def load_model(
    path: Path = TINY_WEIGHTS,
    *,
    max_positions: int = 16_384,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Model:
    """Load a model for texts of at most `max_positions` tokens.

    UsageError if the file is missing, is not whole, or holds other tensors than its configuration names.
    """
    try:
        with safe_open(path, framework="pt") as file:
            config = ModelConfig.preset((file.metadata() or {}).get("model", ""))
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            wanted = parameter_shapes(config)
            if found != wanted:
                odd = sorted(found.items() ^ wanted.items())[0][0]
                raise UsageError(f"weights {path}: tensor {odd!r} does not fit model {config.name!r}; train again")
            weights = {name: file.get_tensor(name).to(device, dtype) for name in wanted}
    except (OSError, SafetensorError) as error:
        raise UsageError(f"weights {path} cannot be read ({error}); run `python -m duokv.tools.train_tiny`") from error
    return Model(config, weights, rope_table(max_positions, config.rope_dim, theta=config.rope_theta).to(device))


def weights_revision(path: Path = TINY_WEIGHTS) -> str:
    """Return 16 hexadecimal digits of the file's SHA-256: the part of a cache key that tells weights apart."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
