"""Output lengths that earlier runs with a model saw on this machine: one JSON file a model in the user's cache."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from plait.lengths import Lengths
from plait.lengths.past import Past, dense
from plait.lengths.survival import grid
from plait.table import I64, RequestTable
from plait.tree.prefix import PrefixTree


class History(Past):
    """One model's past. A damaged or unwritable file counts as none: it is only a cache."""

    def __init__(self, folder: Path, model: str) -> None:
        super().__init__()
        self._path = folder / "lengths" / (re.sub(r"[^\w.-]+", "_", model) + ".json")
        self._seen = self._load()

    def learn(self, lengths: Lengths, table: RequestTable, tree: PrefixTree, output_tokens: I64) -> None:
        """Add the answers of a run, in the file too."""
        super().learn(lengths, table, tree, output_tokens)
        if not lengths.exact:
            self._save()

    def _load(self) -> dict[str, Any]:
        try:
            found = json.loads(self._path.read_text())
            for counts in found.values():
                dense(counts, len(grid()))
            return dict(found)
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def _save(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._path.parent, delete=False) as draft:
                json.dump(self._seen, draft)
            Path(draft.name).replace(self._path)
        except OSError:
            return


def basis(table: RequestTable, familiar: float) -> str:
    """What a forecast's answer lengths rest on, in words. ``familiar``: what ``History.seed`` returned."""
    fixed = float(np.mean(table.min_tokens >= table.max_tokens)) if table.n else 1.0
    if fixed == 1.0:
        return "every answer's length is fixed by its request"
    if not fixed and not familiar:
        return "answer lengths are a guess: nothing like this has run here"
    parts = [f"{fixed:.0%} fixed by their requests"] if fixed else []
    if familiar:
        parts.append(f"{familiar:.0%} as in earlier runs of prompts that begin alike")
    if fixed + familiar < 0.995:
        parts.append("the rest is a guess, as nothing like it has run here")
    return "answer lengths: " + ", ".join(parts)
