"""What an opened checkpoint offers, and the one made of published files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from checkpoints.families import Leaf, Names, leaves_of
from checkpoints.leaves import audit, read_leaf
from checkpoints.model_config import ModelConfig, TokenizerSpec
from checkpoints.tensor_files import Array, TensorFiles

if TYPE_CHECKING:
    import jax

    from checkpoints.placing import Params

ProgressFn = Callable[[str, int, int], None]
"""(what is being done, how much of it is done, how much there is to do)."""


def no_progress(message: str, done: int, total: int) -> None:
    """Tell nobody."""


class Checkpoint(Protocol):
    """A model that can be served, wherever it comes from.

    Attributes:
        name: what to call the model unless told otherwise.
        config: its dimensions and switches.
        tokenizer: None if the checkpoint has none; then prompts can only be token ids.
    """

    @property
    def name(self) -> str: ...
    @property
    def config(self) -> ModelConfig: ...
    @property
    def tokenizer(self) -> TokenizerSpec | None: ...

    def load(
        self,
        *,
        dtype: npt.DTypeLike,
        sharding: jax.sharding.Sharding | None = None,
        progress: ProgressFn | None = None,
    ) -> Params:
        """Read the weights onto the device.

        Args:
            dtype: of everything but norms, which are float32.
            sharding: of every leaf; None is the default device.
            progress: called with bytes read and bytes to read.

        Returns:
            The parameter tree.

        Raises:
            CheckpointError: a tensor is missing, misshapen or left over.
        """
        ...


@dataclass(frozen=True, slots=True)
class PublishedCheckpoint:
    """Weights as their authors published them: a safetensors folder or a GGUF file.

    Attributes:
        name, config, tokenizer: as in Checkpoint.
        names: how the tensors are called.
        open_files: finds the tensors; called only when weights are wanted.
    """

    name: str
    config: ModelConfig
    tokenizer: TokenizerSpec | None
    names: Names
    open_files: Callable[[], TensorFiles]

    def load(
        self,
        *,
        dtype: npt.DTypeLike,
        sharding: jax.sharding.Sharding | None = None,
        progress: ProgressFn | None = None,
    ) -> Params:
        """Read, fuse and place one leaf after another."""
        from checkpoints.placing import place

        target = np.dtype(dtype)
        return place(self._read(target, progress or no_progress), sharding)

    def open_leaves(self) -> tuple[tuple[Leaf, ...], TensorFiles]:
        """Every leaf and the audited files that its parts are in."""
        leaves, files = leaves_of(self.config, self.names), self.open_files()
        audit(leaves, self.names, files)
        return leaves, files

    def _read(
        self, dtype: np.dtype[Any], progress: ProgressFn
    ) -> Iterator[tuple[tuple[str | int, ...], Array]]:
        leaves, files = self.open_leaves()
        total, done = sum(num_values(leaf) for leaf in leaves), 0
        for leaf in leaves:
            progress("loading weights", done, total)
            yield leaf.path, read_leaf(leaf, self.names, files, dtype)
            done += num_values(leaf)
        progress("loading weights", done, total)


def num_values(leaf: Leaf) -> int:
    """How many numbers a leaf holds."""
    return int(np.prod(leaf.shape, dtype=np.int64))
