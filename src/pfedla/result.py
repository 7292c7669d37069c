"""A run's result: figures, weights, and the personalized models."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch import nn

from pfedla.errors import ConfigError, RunError, unknown_name
from pfedla.layers import Layers, LayerSpec
from pfedla.ledger import Ledger

__all__ = ["Result", "weights_of"]


def weights_of(diagnostics: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Return a method's weights, `(..., clients, layers, clients)`; those on candidates spread over everybody."""
    if "alpha" not in diagnostics:
        return None
    alpha = diagnostics["alpha"]
    if "candidates" not in diagnostics:
        return alpha
    candidates = diagnostics["candidates"]
    everybody = np.zeros((*alpha.shape[:-1], alpha.shape[-3]), alpha.dtype)
    np.put_along_axis(everybody, np.broadcast_to(candidates[..., :, None, :], alpha.shape), alpha, axis=-1)
    return everybody


@dataclass(frozen=True, eq=False)
class Result:
    """What a run measured, and the personalized models. `pfedla.run` returns it, and `pfedla.load` reads it."""

    summary: dict[str, Any]
    history: list[dict[str, Any]]  # one record for each evaluated round
    diagnostics: dict[str, np.ndarray]  # of the method, over the rounds of `diagnostics["round"]`
    ledger: Ledger
    names: tuple[str, ...]  # of the clients
    template: nn.Module | None  # None if it was read without its model
    spec: LayerSpec | None
    models: Callable[[], Layers]

    @cached_property
    def personalized(self) -> Layers:
        """All personalized models by entry, `(clients, values)` each; empty if they were not kept."""
        return self.models()

    @cached_property
    def alpha(self) -> np.ndarray | None:
        """The aggregation weights, `(records, clients, layers, clients)`; None for methods without.

        There is a record for each evaluated round; `diagnostics["round"]` says which rounds these are.
        """
        return self._weights(slice(None))

    @property
    def final_alpha(self) -> np.ndarray | None:
        """The aggregation weights at the end, `(clients, layers, clients)`; None for methods without."""
        return self._weights(-1)

    def _weights(self, index: int | slice) -> np.ndarray | None:
        weights = ("alpha", "candidates")
        return weights_of({name: self.diagnostics[name][index] for name in weights if name in self.diagnostics})

    def model(self, client: int | str) -> nn.Module:
        """Return a client's personalized model, by number or name: a torch module in evaluation mode, ready to use."""
        if isinstance(client, str):
            if client not in self.names:
                raise unknown_name("client", client, self.names)
            client = self.names.index(client)
        if not isinstance(client, int | np.integer):
            raise ConfigError(f"a client is named, or numbered from 0 to {len(self.names) - 1}: not {client!r}")
        if not 0 <= client < len(self.names):
            raise ConfigError(f"there is no client {client}: clients are numbered from 0 to {len(self.names) - 1}")
        if self.template is None or self.spec is None:
            raise ConfigError("this run's model came from Python: name it, pfedla.load(path, model=...)")
        if not self.personalized:
            raise ConfigError(
                "the models were not kept: set machine.keep_models to true, or deploy.models where they stayed at "
                "their sites"
            )
        if client not in self.with_models:
            raise RunError(f"{self.names[client]} did not answer at the end: there is no model of it")
        return self.spec.build(self.template, self.personalized, client)

    @cached_property
    def with_models(self) -> list[int]:
        """The clients whose personalized models there are: all, unless models were not kept or some did not answer."""
        if not self.personalized:
            return []
        return (~next(iter(self.personalized.values())).isnan().all(1)).nonzero().flatten().tolist()

    def rows(self) -> list[dict[str, Any]]:
        """Return every client's metrics in every evaluated round as plain rows, for a data frame."""
        return [
            {"round": record["round"], "client": name, **{key: x[i] for key, x in record["clients"].items()}}
            for record in self.history
            for i, name in enumerate(self.names)
        ]

    def to_frame(self) -> Any:
        """Return `rows` as a pandas data frame; pandas must be installed."""
        try:
            pandas = importlib.import_module("pandas")
        except ImportError as error:
            raise ConfigError("a data frame needs pandas: install it, or use result.rows()") from error
        return pandas.DataFrame(self.rows())
