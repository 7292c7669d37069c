"""What is trained for: the loss of a batch, the metrics, and which of them is the headline.

Nothing else in the library knows of cross-entropy or accuracy. An objective compares a model's outputs with the
clients' targets. Metrics are ratios of sums, so that they are exact over batches: correct answers over answers, say.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pfedla.errors import ConfigError, ModelError
from pfedla.settings import RESOLVED, Settings, name_of

__all__ = ["OBJECTIVES", "Binary", "Classification", "Custom", "MultiLabel", "Objective", "PerPosition", "Regression"]

KNOWN_CLASSES, CLASS_PRIOR = "accuracy_known_classes", "accuracy_class_prior"
Ratios = dict[str, tuple[Tensor | float, Tensor | float]]  # {metric: (sum, what it is divided by)}


class Objective(Settings, ABC):
    """How a batch's loss is computed, what is measured, and which metric is the headline.

    `loss` is always measured; `percent` metrics are fractions that tables show as percentages.
    """

    section: ClassVar[str] = "objective"
    headline: str = "loss"
    higher_is_better: bool = False
    percent: bool = False
    by_class: bool = False  # targets are labels of classes, one per sample, which can be counted
    control_names: ClassVar[tuple[str, ...]] = ()  # what `controls` measures

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a batch, to be differentiated."""

    @abstractmethod
    def measure(self, outputs: Tensor, targets: Tensor) -> Ratios:
        """Return each metric of a batch as a sum and what it is divided by, the headline first; `loss` among them."""

    def prior(self, targets: Tensor) -> Tensor | None:  # noqa: ARG002
        """Return what a client's training targets tell before any input is seen, for `controls`; None if nothing."""
        return None

    def controls(self, outputs: Tensor, targets: Tensor, prior: Tensor) -> Ratios:  # noqa: ARG002
        """Measure the same outputs with that knowledge added: what it explains, personalization need not."""
        return {}

    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        """Return what outputs say, for people: a value or a class for each sample, `(n, ...)`, and how sure it is."""
        return {"prediction": outputs}

    def finish(self, means: dict[str, float]) -> dict[str, float]:
        """Return the metrics that the ratios over all batches stand for."""
        return means

    def outputs(self, targets: Sequence[np.ndarray]) -> int:
        """Return how many outputs a model needs for all clients' targets: one for each value of a target."""
        return int(np.prod(targets[0].shape[1:], dtype=np.int64))

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse outputs, of a small batch, that do not go with all of a client's targets."""
        try:
            few = targets[: len(outputs)]
            loss: object = self.loss(outputs, few)
            if not isinstance(loss, Tensor) or loss.dim():
                what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
                raise ModelError(f"the loss of a batch must be a tensor of one value, not {what}")
            metrics = {name: float(above) + float(below) for name, (above, below) in self.measure(outputs, few).items()}
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise ModelError(f"{self.name} cannot compare {_shapes(outputs, targets)}: {error}") from error
        if missing := {self.headline, "loss"} - metrics.keys():
            raise ModelError(f"{self.name} must measure {' and '.join(sorted(missing))}, not only {', '.join(metrics)}")

    @property
    def name(self) -> str:
        """The name by which configuration knows it: a short one, or `package.module:Class`."""
        return name_of(self, OBJECTIVES)


@dataclass(frozen=True)
class Classification(Objective):
    """One of several classes: logits `(batch, classes)`, labels `(batch,)` from 0. Cross-entropy; accuracy."""

    headline = "accuracy"
    higher_is_better = True
    percent = True
    by_class = True
    control_names = (KNOWN_CLASSES, CLASS_PRIOR)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy."""
        return functional.cross_entropy(outputs, targets)

    def measure(self, outputs: Tensor, targets: Tensor) -> Ratios:
        """Count right answers, and add up cross-entropies."""
        total = functional.cross_entropy(outputs, targets, reduction="sum")
        return {"accuracy": _right(outputs, targets), "loss": (total, len(targets))}

    def prior(self, targets: Tensor) -> Tensor:
        """Count the client's training samples of each class."""
        return torch.bincount(targets)

    def controls(self, outputs: Tensor, targets: Tensor, prior: Tensor) -> Ratios:
        """Count right answers among the classes the client trains on, and those of logits plus log frequencies.

        If clients differ in how often they see a class and in nothing else, the second makes a common classifier a
        personal one without any training.
        """
        share = functional.pad(prior, (0, outputs.shape[1] - len(prior))).to(outputs) / prior.sum()
        known = outputs.masked_fill(share == 0, -torch.inf)
        return {KNOWN_CLASSES: _right(known, targets), CLASS_PRIOR: _right(known + share.log(), targets)}

    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        """Return the most probable class, and its probability."""
        probability, predicted = outputs.softmax(1).max(1)
        return {"prediction": predicted, "probability": probability}

    def outputs(self, targets: Sequence[np.ndarray]) -> int:
        """Return the number of classes."""
        return 1 + max(int(labels.max()) for labels in targets)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse what is no row of logits per label, and labels without an output."""
        if outputs.dim() != 2:
            shape = tuple(outputs.shape)
            raise ModelError(f"the model must return logits of shape (batch, classes), not a tensor of shape {shape}")
        if targets.dim() != 1 or targets.is_floating_point():
            raise ModelError(f"labels must be whole numbers in one dimension, not {targets.dtype} {targets.dim()}-d")
        if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < outputs.shape[1]:
            classes = 1 + int(targets.max())
            raise ModelError(
                f"labels go from {int(targets.min())} to {int(targets.max())}, but the model has {outputs.shape[1]} "
                f"outputs: its last layer needs {classes}. If labels do not number the classes from 0 without gaps, "
                "np.unique(labels, return_inverse=True) gives such numbers"
            )


@dataclass(frozen=True)
class Regression(Objective):
    """Numbers: outputs and targets of one shape. Squared error; root mean squared error, mean absolute error."""

    headline = "rmse"

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean squared error."""
        return functional.mse_loss(outputs, _alike(targets, outputs))

    def measure(self, outputs: Tensor, targets: Tensor) -> Ratios:
        """Add up squared and absolute errors."""
        error = outputs - _alike(targets, outputs)
        squares, count = error.square().sum(), error.numel()
        return {"rmse": (squares, count), "mae": (error.abs().sum(), count), "loss": (squares, count)}

    def finish(self, means: dict[str, float]) -> dict[str, float]:
        """Take the root of the mean squared error."""
        return means | {"rmse": math.sqrt(means["rmse"])}


@dataclass(frozen=True)
class Binary(Objective):
    """Yes or no: one logit per sample, targets 0 or 1. Binary cross-entropy; accuracy at even odds."""

    headline = "accuracy"
    higher_is_better = True
    percent = True

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean binary cross-entropy."""
        return functional.binary_cross_entropy_with_logits(outputs, _alike(targets, outputs))

    def measure(self, outputs: Tensor, targets: Tensor) -> Ratios:
        """Count right answers, and add up cross-entropies."""
        targets = _alike(targets, outputs)
        total = functional.binary_cross_entropy_with_logits(outputs, targets, reduction="sum")
        right = ((outputs > 0) == (targets > 0.5)).sum()
        return {"accuracy": (right, targets.numel()), "loss": (total, targets.numel())}

    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        """Return 0 or 1, and the probability of 1."""
        return {"prediction": (outputs > 0).long(), "probability": outputs.sigmoid()}

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse targets that are neither 0 nor 1."""
        super().check(outputs, targets)
        if not ((targets == 0) | (targets == 1)).all():
            raise ModelError(f"targets must be 0 or 1, not from {targets.min():g} to {targets.max():g}")


@dataclass(frozen=True)
class MultiLabel(Binary):
    """Any of several labels: a logit and a 0 or 1 each, `(batch, labels)`. Binary cross-entropy; micro-averaged F1.

    F1 = 2 TP / (2 TP + FP + FN) has no value where nothing is labelled and nothing predicted.
    """

    headline = "f1"

    def measure(self, outputs: Tensor, targets: Tensor) -> Ratios:
        """Count what F1 and the accuracy of single labels are made of."""
        predicted, actual = outputs > 0, _alike(targets, outputs) > 0.5
        found = 2 * (predicted & actual).sum()
        return {"f1": (found, predicted.sum() + actual.sum()), **super().measure(outputs, targets)}


@dataclass(frozen=True)
class PerPosition(Objective):
    """A class at every position of a sequence or an image: logits `(batch, classes, ...)`, labels `(batch, ...)`.

    Cross-entropy and accuracy over all positions but those labelled `ignore`.
    """

    ignore: int = -100
    headline = "accuracy"
    higher_is_better = True
    percent = True

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of the positions that count."""
        return functional.cross_entropy(outputs, targets, ignore_index=self.ignore)

    def measure(self, outputs: Tensor, targets: Tensor) -> Ratios:
        """Count right positions, and add up cross-entropies."""
        total = functional.cross_entropy(outputs, targets, ignore_index=self.ignore, reduction="sum")
        counts = targets != self.ignore
        right = ((outputs.argmax(1) == targets) & counts).sum()
        return {"accuracy": (right, counts.sum()), "loss": (total, counts.sum())}

    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        """Return the class at every position."""
        return {"prediction": outputs.argmax(1)}

    def outputs(self, targets: Sequence[np.ndarray]) -> int:
        """Return the number of classes."""
        highest = max(int(labels[labels != self.ignore].max(initial=0)) for labels in targets)
        if highest >= 100_000:
            raise ModelError(f"label {highest}: labels are numbered from 0, and at most 99,999")
        return 1 + highest

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse other shapes, and labels without an output."""
        if outputs.dim() < 3 or outputs.shape[2:] != targets.shape[1:]:
            raise ModelError(
                f"the model must return logits of shape (batch, classes, positions...): {_shapes(outputs, targets)}"
            )
        if targets.is_floating_point():
            raise ModelError(f"labels must be whole numbers, not {targets.dtype}")
        counted = targets[targets != self.ignore]
        if len(counted) and not 0 <= int(counted.min()) <= int(counted.max()) < outputs.shape[1]:
            low, high = int(counted.min()), int(counted.max())
            raise ModelError(f"labels go from {low} to {high}, but the model has {outputs.shape[1]} classes")


@dataclass(frozen=True)
class Custom(Objective):
    """Any pair of functions of outputs and targets that return a batch's mean: a loss, and a metric to go by.

    Over several batches a metric is the mean of theirs, weighted by their samples. ::

        Custom(functional.huber_loss, functional.l1_loss, "mae")
    """

    loss_function: Callable[[Tensor, Tensor], Tensor] = field(metadata=RESOLVED)  # which no file can hold
    metric: Callable[[Tensor, Tensor], Tensor | float] | None = field(default=None, metadata=RESOLVED)
    headline: str = "loss"
    higher_is_better: bool = False
    percent: bool = False

    def __post_init__(self) -> None:
        """Refuse a metric without a name."""
        super().__post_init__()
        if (self.metric is None) != (self.headline == "loss") or not self.headline:
            raise ConfigError(f"a metric needs a name other than 'loss', and a name a metric: {self.headline!r}")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return what the loss function says."""
        return self.loss_function(outputs, targets)

    def measure(self, outputs: Tensor, targets: Tensor) -> Ratios:
        """Weigh the batch's means by its samples."""
        n = len(targets)
        found: Ratios = {} if self.metric is None else {self.headline: (self.metric(outputs, targets) * n, n)}
        return found | {"loss": (self.loss(outputs, targets) * n, n)}


OBJECTIVES: dict[str, type[Objective]] = {
    "classification": Classification,
    "regression": Regression,
    "binary": Binary,
    "multi-label": MultiLabel,
    "per-position": PerPosition,
}


def _right(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """Count right answers, and answers."""
    return (outputs.argmax(1) == targets).sum(), len(targets)


def _alike(targets: Tensor, outputs: Tensor) -> Tensor:
    """Return targets in the outputs' type and shape: `(batch,)` goes with `(batch, 1)`, and never by broadcasting."""
    if len(targets) != len(outputs) or targets.squeeze().shape != outputs.squeeze().shape:
        raise ValueError("they must be of one shape")
    return targets.to(outputs.dtype).view_as(outputs)


def _shapes(outputs: Tensor, targets: Tensor) -> str:
    return f"outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(targets.shape)}"
